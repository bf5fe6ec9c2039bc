"""Run `mlx-mtp serve` in a process: it prints its address, answers, and exits with 0; errors are one line."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from command_line import call, free_port, one_line_error
from sweep import sweep

import mlx_mtp.cli.serve  # noqa: F401 - `mlx_mtp.cli.serve` is also the command
from mlx_mtp.cli.given_file import SIZE
from mlx_mtp.demo import demo_path

serve = sys.modules["mlx_mtp.cli.serve"]


def test_a_loaded_model_has_the_path_of_its_gguf_file(monkeypatch):
    tokenizer = SimpleNamespace(encode=lambda text: [1], eos_token_ids={2})
    monkeypatch.setattr(serve.options, "load_model", lambda flags: (None, tokenizer))
    monkeypatch.setattr(serve.options, "transcoded", lambda file, flags: demo_path())
    with click.Context(serve.serve) as ctx:
        paths = [serve._load(ctx, {"model": model}).path for model in ("x.gguf", None)]
    assert paths == [Path("x.gguf"), Path(demo_path())]


class Running:
    """`mlx-mtp serve` in a process, with a directory of prefix files, until the block ends."""

    def __init__(self, folder, *more):
        self.port, self.log, self.prompts = free_port(), folder / "log", folder / "prompts"
        command = [sys.executable, "-m", "mlx_mtp", "serve", "--port", str(self.port), "--log-file", self.log]
        command += ["--alias", "*", "--prompt-cache-dir", self.prompts, *more]
        env = {**os.environ, "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)

    def __enter__(self):
        lines = []
        while not lines or not lines[-1].startswith("curl"):
            lines.append(self.process.stderr.readline())
            assert lines[-1], lines
        assert any(f"http://127.0.0.1:{self.port}" in line for line in lines)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def ask(self, question, model="anything"):
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 2}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode()
        )
        request.add_header("content-type", "application/json")
        until = time.monotonic() + 60
        while True:
            try:
                return json.load(urllib.request.urlopen(request))
            except OSError:  # it listens slightly later
                assert time.monotonic() < until
                time.sleep(0.05)


@sweep
def test_a_killed_server_keeps_its_prefixes_and_a_closed_terminal_ends_it_cleanly(tmp_path):
    with Running(tmp_path) as server:
        first = server.ask("word " * 70)
        until = time.monotonic() + 60
        while not list(server.prompts.glob("*.safetensors")) and time.monotonic() < until:
            time.sleep(0.05)
        server.process.send_signal(signal.SIGKILL)
    with Running(tmp_path) as server:
        second = server.ask("word " * 70)
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.05)  # once more when the terminal's shell has ended
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.process.stderr.read()
    assert second["choices"] == first["choices"]
    assert second["usage"]["completion_tokens"] <= 2
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert "first after" in server.log.read_text()


def test_a_model_that_cannot_load_is_one_error_line(tmp_path):
    one_line_error(call("serve", "--model", tmp_path, "--port", free_port()))


def test_a_port_in_use_is_one_error_line():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        result = call("serve", "--port", s.getsockname()[1])
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: 127\.0\.0\.1:\d+: address already in use; --port N listens on another port", error)


def test_an_address_other_than_loopback_requires_a_key():
    assert "--api-key" in one_line_error(call("serve", "--host", "0.0.0.0"), code=2)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_the_page_opens_once_the_server_answers(monkeypatch, host):
    opened, tried = threading.Event(), []

    def answers(url, timeout):
        tried.append(url)
        if len(tried) < 3:
            raise ConnectionRefusedError
        return contextlib.nullcontext()

    monkeypatch.setattr("urllib.request.urlopen", answers)
    monkeypatch.setattr("webbrowser.open", lambda url: tried.append(url) or opened.set() or True)
    serve._loaded(None, {"quiet": True, "opens": True, "host": host, "port": 81, "root_path": "/x"})
    assert opened.wait(10)
    own = "[::1]" if host == "::" else "127.0.0.1"
    assert tried == [f"http://{own}:81/x/health"] * 3 + [f"http://{own}:81/x/"]


def flags(**changes):
    named = dict.fromkeys(("models_dir", "max_memory", *serve.OF_ONE))
    return {**named, "models": (), "adapter_path": (), "trust_remote_code": False, "max_context": None, **changes}


def test_one_model_or_several(tmp_path):
    with click.Context(serve.serve):
        one = flags(models=("x",))
        assert not serve._is_several(one)
        assert one["model"] == "x"
        assert serve._is_several(flags(models=("x", "y")))
        assert serve._is_several(flags(models_dir=tmp_path))
        for name, value in [("draft_model", "d"), ("mtp_path", "m"), ("draft_vocab", "v"), ("adapter_path", ("a",))]:
            assert not serve._is_several(flags(**{name: value}))
            with pytest.raises(click.UsageError, match=f"--{name.replace('_', '-')} belongs to one model"):
                serve._is_several(flags(models=("x", "y"), **{name: value}))
        with pytest.raises(click.UsageError, match="--max-memory: needs --models-dir"):
            serve._is_several(flags(max_memory=1))
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(click.UsageError, match="is a model itself"):
            serve._is_several(flags(models_dir=tmp_path))


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512 * 10**6), ("2 gb", 2 * 10**9), ("0.5", 5 * 10**8), ("0", 0), ("1048576GB", 2**20 * 10**9)],
)
def test_a_size_is_in_gb_or_has_a_unit(text, size):
    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GB", "5KB", "5 M", "-1MB", "nan", "inf", "1048577"])
def test_another_size_is_refused(text):
    with pytest.raises(click.BadParameter, match=r"expected a size such as|allowed is 0 to 1048576 GB"):
        SIZE.convert(text, None, None)


def test_the_models_of_a_server(tmp_path, monkeypatch):
    """Those of --model first; two of the same name are refused."""
    for name in ("a/x", "b/x", "b/y"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    found = serve._find(flags(models=(str(tmp_path / "b/y"),), models_dir=tmp_path / "a"))
    assert [offer.name for offer in found] == ["y", "x"]
    with pytest.raises(click.UsageError, match="two models are named 'x'"):
        serve._find(flags(models=(str(tmp_path / "a/x"), str(tmp_path / "b/x"))))


@sweep
def test_a_server_of_several_models(tmp_path):
    """It lists them, loads the one that is named, and ends in order, also while it loads."""
    for name in ("one", "two"):
        shutil.copytree(demo_path(), tmp_path / "models" / name)
    with Running(tmp_path, "--models-dir", tmp_path / "models", "--max-memory", "0.03") as server:
        assert [server.ask("What does len do?", model=name)["model"] for name in ("two", "one", "two")]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.process.stderr.read()
