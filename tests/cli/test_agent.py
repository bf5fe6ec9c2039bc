"""`serve --install-agent` and `--uninstall-agent`: the unit runs the same server, and only its user can read it."""

import os
import plistlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from command_line import call, free_port, one_line_error

from mlx_mtp.cli import agent as options
from mlx_mtp.cli import main
from mlx_mtp.demo import demo_path
from mlx_mtp.serve import agent

KEY = 'a $key 100% "mine"'
# Fails as launchctl does: `print` if nothing is loaded, `bootstrap` while something is.
LAUNCHCTL = """#!/bin/sh
echo "$@" >> "$CALLS"
case $1 in
  print) test -e "$CALLS.loaded" ;;
  bootout) rm "$CALLS.loaded"; exit 36 ;;
  bootstrap) test ! -e "$CALLS.loaded" && touch "$CALLS.loaded" || { echo "Bootstrap failed: 5" >&2; exit 5; } ;;
esac
"""
SYSTEMCTL = '#!/bin/sh\necho "$@" >> "$CALLS"\n'
NEVER_FILES = {  # options of `serve` whose value is any text, and never a file
    *("alias", "allow_host", "api_key", "chat_template_config", "cors_origin", "extra_eos_token", "host"),
    *("fetch_images", "regex", "root_path", "wired_limit"),
}


@pytest.fixture(params=["darwin", "linux"])
def system(request, monkeypatch, tmp_path):
    """Return the parts of a machine without agents: its `home`, and `calls` of launchctl or systemctl, by line."""
    calls, tools = tmp_path / "calls", tmp_path / "tools"
    tools.mkdir()
    for name, text in (("launchctl", LAUNCHCTL), ("systemctl", SYSTEMCTL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(agent, "sys", SimpleNamespace(platform=request.param))
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(home=tmp_path, tools=tools, calls=lambda: calls.read_text().splitlines())


def unit():
    """Return the words and the environment that the written unit states, read as launchd or systemd does."""
    file = agent.manager().file
    if file.suffix == ".plist":
        found = plistlib.loads(file.read_bytes())
        return found["ProgramArguments"], found["EnvironmentVariables"]
    lines = file.read_text().splitlines()
    (command,) = [systemd_words(line) for line in lines if line.startswith("ExecStart=")]
    variables = [systemd_words(line)[0] for line in lines if line.startswith("Environment=")]
    return [word.replace("$$", "$") for word in command], dict(variable.split("=", 1) for variable in variables)


def systemd_words(line):
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line.partition("=")[2])
    return [re.sub(r"\\(x..|.)", unescaped, quoted or plain).replace("%%", "%") for quoted, plain in found]


def unescaped(found):
    return chr(int(found[1][1:], 16)) if len(found[1]) > 1 else found[1]


def test_the_unit_has_the_other_options_absolute_paths_and_no_key_in_its_command(system):
    (system.home / "model").symlink_to(demo_path())
    given = ["--model", "model", "--no-mtp", "--alias", "a", "--alias", "model b", "--log-file", "l", "--max-tokens"]
    given += ["-1", "--chat-template-config", '{"a": "$b %h"}', "--models-dir", "."]
    done = call("serve", "--install-agent", *given, "--api-key", KEY)
    assert done.returncode == 0, done.stderr
    words, environment = unit()
    assert words[:4] == [sys.executable, "-m", "mlx_mtp", "serve"]
    expected = ["--model", str(system.home / "model"), "--models-dir", str(system.home), "--no-mtp"]
    expected += ["--alias", "a", "--alias", "model b"]
    expected += ["--log-file", str(system.home / "l"), "--max-tokens", "-1"]
    assert words[4:] == [*expected, "--chat-template-config", '{"a": "$b %h"}']  # and no key
    assert environment["MLX_MTP_API_KEY"] == KEY
    file = agent.manager().file
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(file) in done.stdout
    assert agent.manager().reading in done.stdout


def test_a_second_agent_replaces_the_first_and_removing_none_is_one_line(system):
    for port in (8001, 8002):
        done = call("serve", "--install-agent", "--port", port)
        assert done.returncode == 0, done.stderr
    assert unit()[0][-2:] == ["--port", "8002"]
    second = [line.split()[0 if agent.manager().file.suffix == ".plist" else 1] for line in system.calls()]
    expected = {
        ".plist": ["print", "enable", "bootstrap", "print", "bootout", "print", "enable", "bootstrap"],
        ".service": ["daemon-reload", "stop", "enable"] * 2,
    }
    assert second == expected[agent.manager().file.suffix]
    assert call("serve", "--uninstall-agent").returncode == 0
    assert not agent.manager().file.exists()
    assert "no agent is installed" in one_line_error(call("serve", "--uninstall-agent"))


@pytest.mark.parametrize("fault", ["missing", "fails"])
def test_without_the_tool_the_unit_is_written_and_the_error_is_one_line(system, fault, monkeypatch):
    for tool in system.tools.iterdir():
        tool.write_text("#!/bin/sh\necho 'No bus' >&2; exit 1\n")
    if fault == "missing":
        monkeypatch.setenv("PATH", str(system.home))
    line = one_line_error(call("serve", "--install-agent"))
    file = agent.manager().file
    assert f"{file} is written, but could not be loaded" in line
    assert {"missing": "not found", "fails": "No bus"}[fault] in line
    assert unit()[0]
    removed = call("serve", "--uninstall-agent")
    if fault == "missing" or file.suffix == ".service":  # launchctl that fails means: not loaded
        assert f"{file} is deleted" in one_line_error(removed)
    assert not file.exists()


@pytest.mark.parametrize(("flags", "code"), [(["--model", "./missing"], 1), (["--host", "0.0.0.0"], 2)])
def test_what_the_server_refuses_is_refused_before_anything_is_written(system, flags, code):
    one_line_error(call("serve", "--install-agent", *flags), code)
    assert not agent.manager().file.exists()


@pytest.mark.parametrize("system", ["linux"], indirect=True)
def test_the_command_of_the_unit_serves(system):
    port = free_port()
    assert call("serve", "--install-agent", "--port", port, "--api-key", KEY, "--quiet").returncode == 0
    words, environment = unit()
    own = {"PATH": os.defpath, "HOME": str(system.home), "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(words, env={**own, **environment}, cwd="/")
    try:
        until = time.monotonic() + 60
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models")
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models")
        request.add_header("authorization", f"Bearer {KEY}")
        assert urllib.request.urlopen(request).status == 200
    finally:
        process.kill()
        process.wait()


def answers(url):
    try:
        return urllib.request.urlopen(url).status == 200
    except OSError:
        return False


def test_every_option_of_serve_is_a_name_or_a_path():
    """An option that takes a file as text is in NAMES, or the agent would read its value in another directory."""
    texts = {param.name for param in main.commands["serve"].params if param.type is click.STRING}
    assert texts - NEVER_FILES == set(options.NAMES)


@pytest.mark.parametrize("system", ["linux"], indirect=True)
def test_systemd_reads_every_word_as_it_was(system):
    words = ["/a b/python", "", "'", '"', "\\", "a\\nb", "\n\t\x7f", "$HOME ${X} $$", "%h%%", ";", "ä", "a=b,c"]
    agent.Systemd().write(agent.Program(words, {"A": '%h $x "', "B": ""}, 3))
    assert unit() == (words, {"A": '%h $x "', "B": ""})
