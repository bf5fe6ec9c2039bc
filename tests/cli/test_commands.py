"""Run the command line, in a new process if the test needs one, else in this one."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module

import huggingface_hub.constants
import pytest
import tiny
from click.testing import CliRunner
from command_line import call, one_line_error, run
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.files import read_config
from mlx_mtp.cli import main
from mlx_mtp.decoding import row_check
from mlx_mtp.demo import demo_path


def test_generate_prints_the_layout_of_mlx_lm():
    result = call("generate", "-p", "What does os.path.join do?", "-m", 12)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [lines[0], lines[-5]] == ["=" * 10] * 2
    assert lines[-4].startswith("Prompt: ")
    assert lines[-4].endswith(" tokens-per-sec")
    assert lines[-3].startswith("Generation: 12 tokens, ")
    assert lines[-2].startswith("Peak memory: ")
    assert re.match(r"MTP: \d+\.\d drafts per cycle( \(at most 3\))?, \d\.\d\d tokens per cycle, ", lines[-1])
    assert result.stderr.count("\n") == 1
    assert "demo" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_the_text_does_not_depend_on_drafting():
    texts = set()
    for flags in (["--num-draft-tokens", 0], ["--no-mtp"], []):
        result = call("generate", "--verbose", "False", "-p", "-", "-m", 12, *flags, stdin="def read_lines(path):\n")
        assert result.returncode == 0, result.stderr
        texts.add(result.stdout)
    assert len(texts) == 1


def test_the_seed_determines_sampled_text():
    flags = ["--temp", 1, "--top-p", 0.9, "--seed", 3, "--verbose", "False", "-m", 10, "--ignore-chat-template"]
    texts = {call("generate", *flags, "--num-draft-tokens", k, "-p", "def ").stdout for k in (0, 3)}
    assert len(texts) == 1


def test_report():
    result = call("generate", "--report", "-m", 1)
    for word in ("family", "target", "MTP heads", "LM heads", "own, one per depth", "norms", "shifted"):
        assert word in result.stdout


def test_rows_are_checked_at_the_load(own_cache, monkeypatch):
    monkeypatch.setattr(row_check, "check_rows", partial(row_check.check_rows, contexts=[3]))
    flags = ["--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 2]
    result = call("generate", "--report", "--check-rows", *flags, "-m", 1)
    assert "rows       up to 16 of a pass equal the same rows alone, within rounding, at context 3;" in result.stdout
    result = call("generate", "--report", *flags, "-m", 1)  # the findings are stored
    assert "rows       up to 16 of a pass" in result.stdout
    assert "rows  " not in call("generate", "--report", "-m", 1).stdout  # other caches


def test_quantized_and_limited_caches():
    flags = ["--kv-bits", 8, "--mtp-kv-bits", 8, "--kv-group-size", 32, "--max-kv-size", 64, "--verbose", "False"]
    texts = {call("generate", *flags, "-m", 60, "--num-draft-tokens", k).stdout for k in (0, 3)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-draft-tokens", 9], "'--num-draft-tokens': num_draft_tokens=9: allowed is 0 to 3"),
        (["--num-draft-tokens", -1], "'--num-draft-tokens': -1"),
        (["--num-draft-tokens", 2, "--no-mtp"], "--no-mtp"),
        (["--temp", "warm"], "'--temp': 'warm' is not a number."),
        (["--top-k", "1.5"], "'--top-k': '1.5' is not an integer."),
        (["--top-k", 100000], "top_k=100000: allowed is 0"),
        (["--top-p", 1.5], "'--top-p'"),
        (["--max-tokens", 0], "0: allowed is 1 or more"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--mtp-path", "/no/such/file"], "/no/such/file: no such file"),
        (["--prompt-cache-file", "/no/such/file"], "/no/such/file"),
        (["--adapter-path", "/no/such/adapter"], "no adapter_config.json"),
        (["--chat-template-config", "{"], "not JSON"),
        (["--kv-bits", 7], "'--kv-bits'"),
        (["-p", "-", "--ignore-chat-template"], "prompt is empty"),
        (["--seed", -1], "'--seed': -1"),
        (["--seed", 2**63], "'--seed': 9223372036854775808"),
        (["--max-kv-size", 2**31], "'--max-kv-size'"),
        (["--min-tokens-to-keep", 99999], "min_tokens_to_keep=99999: allowed is 1 to"),
        (["--kv-bits", 8, "--kv-group-size", 128], "'--kv-group-size': kv_group_size=128"),
        (["--chat-template-config", '{"tokenize": true}'], "tokenize: the command sets this variable; leave it out"),
        (["--system-prompt", "\udcff"], "'--system-prompt': not valid UTF-8 text"),
        (["--prefill-response", "\udcff"], "'--prefill-response': not valid UTF-8 text"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(args, message):
    started = run if "\udcff" in args[1:2] and "--system-prompt" in args else call  # as bytes of the command line
    assert message in one_line_error(started("generate", *args), 2)


@pytest.mark.parametrize(
    ("contents", "code", "message"), [(b"\xff\xfe", 2, "not a text file in UTF-8"), (b"x", 1, "not JSON (Expecting")]
)
def test_errors_of_a_schema_name_its_file(tmp_path, contents, code, message):
    file = tmp_path / "schema.json"
    file.write_bytes(contents)
    assert f"--json-schema {file}: {message}" in one_line_error(call("generate", "--json-schema", file), code)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "/no/such/directory"],
            "/no/such/directory: no such directory, and not a name on the hub",
        ),
        (["--model", "some-org/some-model"], "some-org/some-model: no such directory, no whole copy in the"),
        (["--model", "some-org/some-model"], "and offline: unset HF_HUB_OFFLINE to download it"),
        (["--prompt-cache-file", __file__], "not a prompt cache"),
    ],
)
def test_failures_are_one_line_and_exit_code_1(monkeypatch, args, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert message in one_line_error(call("generate", *args))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no such role') }}", "refuses this conversation (no such role)"),
        ("{% for", "refuses this conversation"),
        ("{# nothing #}", "the prompt is empty: the chat template renders nothing"),
    ],
)
def test_broken_templates(tmp_path, template, message):
    path = shutil.copytree(demo_path(), tmp_path / "copy")
    (path / "chat_template.jinja").write_text(template)
    assert message in one_line_error(call("generate", "--model", path, "-m", 1))


@pytest.mark.parametrize("config", ["{}", '{"num_layers": 1, "lora_parameters": {"rank": 4, "scale": 1}}'])
def test_broken_adapters(tmp_path, config):
    (tmp_path / "adapter_config.json").write_text(config)
    assert f"{tmp_path}: no usable adapters (" in one_line_error(call("generate", "--adapter-path", tmp_path))


def test_configs_that_are_not_objects(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    with pytest.raises(ValueError, match="must be JSON objects"):
        read_config(tmp_path)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_of_library_callers(tiny_models, seed):
    with pytest.raises(ValueError, match=rf"seed={seed}: allowed is 0 to 2\*\*63 - 1"):
        mlx_mtp.generate_step([0], tiny_models()[0], seed=seed)


def test_an_error_of_mlx_is_one_line():
    code = """if True:
        from mlx_mtp.cli import main

        @main.command("f")
        def f():
            raise RuntimeError("[x] y\\nz")

        main()
    """
    result = subprocess.run([sys.executable, "-c", code, "f"], capture_output=True, text=True)
    assert one_line_error(result) == "error: [x] y"


def test_group_size_of_quantized_caches_fits_the_demo():
    result = call("generate", "--kv-bits", 8, "--quantized-kv-start", 0, "-m", 3)
    assert result.returncode == 0, result.stderr


def test_a_temperature_next_to_zero_is_greedy():
    quiet = ("generate", "--quiet", "-m", 8)
    assert call(*quiet, "--temp", "1e-40").stdout == call(*quiet).stdout


def test_quiet():
    result = call("generate", "--quiet", "-p", "What does len do?")
    assert (result.stdout, result.stderr) == ("Return the number of items in a container.\n", "")


def test_input_that_is_not_text():
    command = [sys.executable, "-m", "mlx_mtp", "generate", "-p", "-"]
    result = subprocess.run(command, input=b"\xff\xfe\x80", capture_output=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.decode().splitlines()[-1] == "error: the prompt is not valid UTF-8 text"


def test_a_long_prompt_and_a_closed_pipe_print_no_errors(tmp_path):
    """Neither this program nor a library prints anything, even for a prompt longer than the model supports."""
    path = shutil.copytree(demo_path(), tmp_path / "copy")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 40}))
    (tmp_path / "prompt").write_text("def f(x):\n    return x\n" * 10)
    options = f"--model {path} -m 200 --ignore-chat-template -p - <{tmp_path}/prompt"
    result = in_shell(f"generate {options} | head -c 5 >/dev/null; exit ${{PIPESTATUS[0]}}")
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "command"), [(9, ["generate", "-m", 1]), (11, ["cache-prompt", "--prompt-cache-file", "F"])]
)
def test_a_prompt_of_more_tokens_than_positions_is_a_warning(words, command, tmp_path, monkeypatch):
    """Both commands read 10 tokens; `cache-prompt` drops the last two, which a following text may change."""
    monkeypatch.chdir(tmp_path)
    path = shutil.copytree(demo_path(), tmp_path / "copy")
    config = json.loads((path / "config.json").read_text())
    for positions, warned in ((9, True), (10, False)):
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        result = call(*command, "--model", path, "--ignore-chat-template", "-p", "x " * words)
        assert result.returncode == 0, result.stderr
        assert (f"tokens, more than the model's {positions} positions" in result.stderr) == warned


def test_unknown_command_and_help():
    assert "nothing" in one_line_error(call("nothing"), 2)
    assert call("--help").returncode == 0
    bare = run()
    assert (bare.returncode, bare.stdout) == (2, "")
    assert bare.stderr.startswith("Usage: ")
    assert "--mtp-kv-bits" in call("generate", "--help").stdout
    assert call("--version").stdout.startswith("mlx-mtp, version ")


def test_a_checkpoint_without_heads_warns_in_one_line(tmp_path):
    """Its missing tokenizer is the error; the warning about heads precedes it, once."""
    path = tiny.save(tmp_path, tiny.CONFIG, tiny.random_weights(tiny.CONFIG, heads=0))
    result = call("generate", "--model", path)
    assert result.stderr.splitlines()[0].startswith("warning: ")
    assert "no MTP heads found" in result.stderr.splitlines()[0]
    assert "no usable tokenizer" in one_line_error(result)


def in_shell(command):
    line = f"{sys.executable} -m mlx_mtp {command}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)


def test_closed_and_full_streams():
    closed = ["generate -m 2 >&- 2>&-", "generate -m 2 >&-", "generate -m 2 2>&-", "chat <&-"]
    for line in sampled(["generate --help >&- 2>&-"], closed):
        assert in_shell(line).returncode == 0
    if os.path.exists("/dev/full"):
        for command in sampled(["generate --help"], ["generate --help", "generate -m 2"]):
            error = one_line_error(in_shell(f"{command} >/dev/full"))
            assert "No space left on device: 'standard output'" in error


def test_help_imports_no_mlx():
    code = "import sys, mlx_mtp.cli; assert not {'mlx', 'rich', 'prompt_toolkit'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", [["inspect"], ["generate", "-p", "a", "--model"]])
def test_names_in_files_do_not_write_on_the_terminal(tmp_path, command):
    weights = tiny.random_weights(tiny.CONFIG)
    weights["model.\x1b[2J\x9bnorm.weight"] = weights["model.norm.weight"]
    path = tiny.save(tmp_path / "m", tiny.CONFIG, weights)
    shutil.copy(demo_path() / "tokenizer.json", path)
    result = CliRunner().invoke(main, [*command, str(path)], color=True)
    assert result.exit_code == 1
    assert "model.\ufffd[2J\ufffdnorm.weight" in result.output
    assert not {"\x1b", "\x9b"} & {*result.output}


def test_names_of_the_package_are_imported_on_use(monkeypatch):
    """In a package that is imported again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_mtp"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        import_module("mlx_mtp.session")
        package, starred = import_module("mlx_mtp"), {}
        assert "load" not in vars(package)
        assert callable(package.generate)
        assert callable(package.load)
        exec("from mlx_mtp import *", starred)
        assert set(package.__all__) <= starred.keys()
        assert package.load is import_module("mlx_mtp.checkpoint.load").load
        assert set(package.__all__) <= set(dir(package))
        assert not hasattr(package, "nothing")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_mtp"]:
            del sys.modules[name]


@pytest.mark.parametrize("group", [(), ("bench",)])
def test_help_describes_every_command_in_a_whole_line(group):
    commands = call(*group, "--help").stdout.partition("Commands:\n")[2]
    assert commands.count("\n") > 5
    assert all(line.endswith(".") and "..." not in line for line in commands.splitlines() if line)
