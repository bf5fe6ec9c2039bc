"""Whatever fails before a training ends in one line and leaves neither a file nor a useless folder."""

import json

import families
import lora
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from drafters import HEADLESS
from letter_chats import make_tokenizer

import mlx_mtp
from mlx_mtp.checkpoint.adapters import load_adapters
from mlx_mtp.cli import main
from mlx_mtp.training import tune
from mlx_mtp.training.recording import DOCUMENTS, ROWS, Recording

OPTIONS = {"new": True, "draft_vocab": None, "bits": None, "tokens": 2000, "epochs": 0.2, "rows": 2}
TARGET = {**HEADLESS["qwen3"], "vocab_size": 16, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _short_rows(monkeypatch):
    monkeypatch.setattr(tune, "LENGTH", 40)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = families.headless(tmp_path_factory.mktemp("target"), TARGET)[0]
    make_tokenizer(None)._tokenizer.save_pretrained(path)
    return path


def texts(seed=0, count=50, length=64):
    return np.random.default_rng(seed).integers(4, 16, (count, length)).tolist()


def tuned(model, out, given, **options):
    return mlx_mtp.tune_heads(model, make_tokenizer(), given, out=out, **OPTIONS | options)


def load(path):
    return mlx_mtp.load_model(path, kernels="off")


REFUSED = {
    "short": (texts(count=3), {}, "too little text: 192 tokens in 3 documents"),
    "draft_vocab": (texts(), {"draft_vocab": 1}, "draft_vocab=1: too few"),
    "foreign": ([[99] * 64], {}, "token 99 in a text; the model has tokens 0 to 15"),
    "one document": ([[5] * 300], {}, "too little text: 300 tokens in 1 documents"),
    "not a text": ([[{"role": "user"}]], {}, "text 1: expected messages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_before_the_training_leaves_nothing(case, target, tmp_path):
    given, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as raised:
        tuned(load(target), tmp_path / "new.safetensors", given, **options)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(target, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_mtp.training.recording._write_at", full)
    with pytest.raises(OSError, match="No space left"):
        tuned(load(target), tmp_path / "new.safetensors", texts())
    assert not list(tmp_path.iterdir())


def stop(stage, done, total):
    if done > 200:
        raise KeyboardInterrupt


@pytest.mark.parametrize("other", ["texts", "fewer", "own", "seed", "tokens", "adapter"])
def test_a_recording_of_other_texts_or_settings_is_not_continued(other, target, tmp_path):
    out = tmp_path / "new.safetensors"
    with pytest.raises(KeyboardInterrupt):
        tuned(load(target), out, texts(), progress=stop)
    model, given = load(target), {"texts": texts(1), "fewer": texts(count=2), "own": None}.get(other, texts())
    if other == "adapter":
        load_adapters(model, lora.save(tmp_path / "adapter", model, seed=1))
    changed = {"seed": {"seed": 1}, "tokens": {"tokens": 3000}}.get(other, {})
    with pytest.raises(ValueError, match=r"recorded with (another|other) ") as raised:
        tuned(model, out, given, **changed)
    assert "\n" not in str(raised.value)
    assert (tmp_path / "new.safetensors.work" / "recording" / DOCUMENTS).stat().st_size


def test_a_line_that_was_cut_is_dropped_and_missing_rows_are_damage(tmp_path):
    made = Recording(tmp_path, {}, 2)
    for _ in range(2):
        made.append([1] * 20, mx.zeros((20, 2)), mx.zeros(20, mx.int32), 0, held=False)
    whole = (tmp_path / DOCUMENTS).read_text()
    for cut in (1, 5):
        (tmp_path / DOCUMENTS).write_text(whole[:-cut])
        again = Recording(tmp_path, {}, 2)
        assert again.size == 20
        again.append([2] * 20, mx.zeros((20, 2)), mx.zeros(20, mx.int32), 0, held=False)
        assert Recording(tmp_path, {}, 2).size == 40
    (tmp_path / ROWS).write_bytes(b"\0" * 79)
    with pytest.raises(ValueError, match=f"a damaged recording; delete it \\({ROWS} is too short"):
        Recording(tmp_path, {}, 2)


def command_line(target, *args):
    """Return the result of a command that makes new heads."""
    return CliRunner().invoke(main, ["tune-heads", "--model", str(target), "--new", *args])


COMMANDS = {
    "an empty directory": (["empty"], "no files in empty"),
    "an empty file": (["--data", "empty.jsonl"], "too little text: 0 tokens"),
    "other fields": (["--data", "wrong.jsonl"], "wrong.jsonl: line 1: expected an object with text"),
    "few tokens": (["--data", "empty.jsonl", "--tokens", "200"], "tokens=200: allowed are 2000 to"),
    "no directory": (["--data", "empty.jsonl", "--out", "no/x.safetensors"], "no such directory"),
    "no such rank": (["--data", "empty.jsonl", "--rank", "3"], "a new head is trained whole"),
    "another suffix": (["--data", "empty.jsonl", "--out", "x.bin"], "allowed are names *.safetensors"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands_that_fail(case, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "wrong.jsonl").write_text(json.dumps({"txt": "a"}))
    before = sorted(tmp_path.iterdir())
    args, message = COMMANDS[case]
    found = command_line(target, "--quiet", *args)
    assert found.exit_code in (1, 2)
    assert isinstance(found.exception, SystemExit)
    assert message in found.output.replace("\n", " ")
    assert sorted(tmp_path.iterdir()) == before


def test_data_of_a_command_are_trained_on(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    letters = np.random.default_rng(0).choice(list("abcdefghij"), (60, 40))
    lines = [json.dumps({"prompt": "".join(row[:20]), "completion": "".join(row)}) for row in letters]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    args = ["--data", "data.jsonl", "--tokens", "2000", "--epochs", "0.3", "--batch", "2", "--depths", "3"]
    args += ["--draft-vocab", "99999", "--learning-rate", "1e-2", "--quiet", "--out", "new.safetensors"]
    found = command_line(target, *args)
    assert found.exit_code == 0, found.output
    assert "Written: " in found.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "new.safetensors"]
    assert len(mlx_mtp.load_model(target, kernels="off", mtp_path=tmp_path / "new.safetensors").mtp) == 1
