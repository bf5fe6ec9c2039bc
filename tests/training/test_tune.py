"""Tune and make heads on a model's own choices; files are written whole or not at all, and load."""

import json
from pathlib import Path
from types import SimpleNamespace

import families
import lora
import mlx.core as mx
import numpy as np
import pytest
from drafters import HEADLESS

import mlx_mtp
from mlx_mtp.checkpoint import tuned as sidecars
from mlx_mtp.checkpoint.adapters import load_adapters
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.training import train as training
from mlx_mtp.training import tune

SMALL = {"tokens": 2000, "epochs": 5, "rows": 2, "rate": 4e-3}
NEW = {"new": True, "draft_vocab": None, "bits": None, **SMALL}


class Vocabulary:
    """The part of a tokenizer that a tuning on token ids needs."""

    def __init__(self, size: int = 13):
        self.size = size

    def get_vocab(self):
        return {str(i): i for i in range(self.size)}


def texts(seed: int = 0, count: int = 50, length: int = 64) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 13, (count, length)).tolist()


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    return families.headless(tmp_path_factory.mktemp("headless"), {**HEADLESS["qwen3"], "vocab_size": 13})[0]


@pytest.fixture(scope="module")
def recycled(tmp_path_factory):
    return families.build("mimo", tmp_path_factory.mktemp("mimo"), vocab_size=13)[0]


def load(path, **options):
    return mlx_mtp.load_model(path, kernels="off", **options)


def tuned(model, out: Path, given=None, **options):
    return mlx_mtp.tune_heads(model, Vocabulary(), texts() if given is None else given, out=out, **options)


def bytes_after(model, out: Path, **options) -> bytes:
    tuned(model, out, **options)
    return out.read_bytes()


@pytest.mark.parametrize("form", [{"bits": None}, {"bits": 8}, {"draft_vocab": 9}])
def test_a_new_head_drafts_for_the_target_it_was_made_for(form, headless, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tune, "most_frequent", lambda tokenizer, counts, size, vocab: [t for t, _ in counts.most_common(size)]
    )
    found = tuned(load(headless), tmp_path / "new.safetensors", **{**NEW, **form})
    assert found.after.cycle.mean > 1.1
    assert found.before is None
    model = load(headless, mtp_path=found.file)
    assert len(model.mtp) == 1
    prompt = mx.array([3, 1, 4])
    plain = [int(t) for t, *_ in mlx_mtp.generate_step(prompt, load(headless), max_tokens=40)]
    drafted = mlx_mtp.generate_step(prompt, model, max_tokens=40, num_draft_tokens=2, adaptive=False)
    assert [int(t) for t, *_ in drafted] == plain
    assert not list(tmp_path.glob("*.work"))


def test_a_new_head_of_an_adapted_target_has_plain_modules(headless, tmp_path):
    model = load(headless)
    load_adapters(model, lora.save(tmp_path / "adapter", model, seed=1))
    found = tuned(model, tmp_path / "new.safetensors", **{**NEW, "epochs": 1})
    assert found.file
    assert not [name for name in mx.load(str(found.file)) if "lora" in name]
    load(headless, mtp_path=found.file)


def test_existing_heads_become_better_and_the_model_keeps_its_own(recycled, tmp_path):
    model = load(recycled)
    before = dict(mx.utils.tree_flatten(model.parameters())) if hasattr(mx, "utils") else None
    heads = model.mtp
    found = tuned(model, tmp_path / "mtp.safetensors", **SMALL)
    assert found.after.cycle.mean > found.before.cycle.mean
    assert (model.mtp is heads and before is None) or before
    again = load(recycled, mtp_path=found.file)
    assert again.spec == model.spec


def test_a_seed_gives_the_same_file_also_after_an_interruption(headless, tmp_path, monkeypatch):
    whole = bytes_after(load(headless), tmp_path / "a.safetensors", **NEW)
    assert bytes_after(load(headless), tmp_path / "b.safetensors", **NEW) == whole
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    stop = iter([None] * 20)

    def interrupt(stage, done, total):
        if next(stop, "stop"):
            raise KeyboardInterrupt

    out = tmp_path / "c.safetensors"
    with pytest.raises(KeyboardInterrupt):  # while it records
        tuned(load(headless), out, progress=interrupt, **NEW)
    stages = []

    def later(stage, done, total):
        stages.append(stage)
        if stage.startswith("training") and done == 12:
            raise KeyboardInterrupt

    found = tuned(load(headless), out, progress=later, **NEW)
    assert len([stage for stage in stages if stage == "recording"]) < 32
    assert found.file == out  # Ctrl-C keeps the best so far
    assert bytes_after(load(headless), out, **NEW) == whole


def test_nothing_better_writes_nothing(recycled, tmp_path):
    found = tuned(load(recycled), tmp_path / "mtp.safetensors", **{**SMALL, "rate": 1e-9, "epochs": 1})
    assert found.file is None
    assert list(tmp_path.iterdir()) == []
    assert found.lines()[-1] == "The heads did not get better: nothing written."


REFUSED = {
    "too little text": (lambda: texts(count=3), {}, "too little text: 192 tokens in 3 documents"),
    "no text": (lambda: [], {}, "too little text: 0 tokens in 0 documents"),
    "tokens": (texts, {"tokens": 10}, "tokens=10: allowed are 2000 to"),
    "name": (texts, {"out": "heads.bin"}, r"out=heads.bin: allowed are names \*.safetensors"),
    "rank": (texts, {"rank": 4}, "rank=4: a new head is trained whole"),
    "foreign tokens": (lambda: [[99] * 64], {}, "token 99 in a text; the model has tokens 0 to 12"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_and_leave_no_file(case, headless, tmp_path):
    given, changes, message = REFUSED[case]
    options = {**NEW, "out": tmp_path / "new.safetensors", **changes}
    with pytest.raises(ValueError, match=message) as raised:
        mlx_mtp.tune_heads(load(headless), Vocabulary(), given(), **options)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_head_without_heads_to_tune(headless, tmp_path):
    with pytest.raises(ValueError, match="no MTP heads to tune; --new makes some"):
        tuned(load(headless), tmp_path / "mtp.safetensors", **SMALL)


def test_a_loss_of_nan_and_rows_of_nan_write_nothing(headless, tmp_path):
    with pytest.raises(ValueError, match="the loss of step 2 is not finite; lower --learning-rate"):
        tuned(load(headless), tmp_path / "a.safetensors", **{**NEW, "rate": 1e38})
    model = load(headless)
    model.model.norm.weight = model.model.norm.weight * float("nan")
    model.layers[-1].mlp.down_proj.weight = model.layers[-1].mlp.down_proj.weight * float("nan")
    with pytest.raises(ValueError, match="hidden rows hold NaN"):
        tuned(model, tmp_path / "b.safetensors", **NEW)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_full_disk_leaves_the_earlier_file(headless, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ValueError, match=r"needs .* and 10 bytes are free there"):
        tuned(load(headless), tmp_path / "new.safetensors", **NEW)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_recording_of_another_model_is_refused(headless, recycled, tmp_path):
    def stop(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(load(headless), tmp_path / "a.safetensors", progress=stop, **NEW)
    with pytest.raises(ValueError, match="recorded with another model"):
        tuned(load(recycled), tmp_path / "a.safetensors", **SMALL)


def test_a_sidecar_on_another_target_is_used_with_a_warning(headless, tmp_path):
    found = tuned(load(headless), tmp_path / "new.safetensors", **NEW)
    other = families.headless(tmp_path / "other", {**HEADLESS["qwen3"], "vocab_size": 13}, seed=7)[0]
    with pytest.warns(UserWarning, match="trained for another model"):
        load(other, mtp_path=found.file)


def test_conversions_keep_tuned_heads(headless, tmp_path):
    options = {**NEW, "bits": 8}
    source = tmp_path / "source"
    source.mkdir()
    for file in headless.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    found = tuned(load(headless), source / "mtp.safetensors", **options)
    made = mlx_mtp.convert(source, tmp_path / "made", quantize=True, q_group_size=32)
    assert made.report.heads == 1
    model = load(tmp_path / "made")
    assert model.spec.prefix == load(headless, mtp_path=found.file).spec.prefix
    facts = inspect_checkpoint(tmp_path / "made")
    assert (facts.depths, facts.missing, facts.problems) == (1, (), ())
    assert json.dumps(facts.head_tensors).count("tuned_mtp.0.") == len(facts.head_tensors)
    assert sidecars.target_of(found.file) == sidecars.fingerprint(load(headless))
