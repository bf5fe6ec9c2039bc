"""Tune and make heads on a model's own choices; files are written whole or not at all, and load."""

import itertools
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import families
import lora
import mlx.core as mx
import numpy as np
import pytest
from drafters import HEADLESS
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint import load as loading
from mlx_mtp.checkpoint import tuned as sidecars
from mlx_mtp.checkpoint.adapters import load_adapters
from mlx_mtp.checkpoint.describe import describe
from mlx_mtp.checkpoint.inspect import as_text, inspect_checkpoint
from mlx_mtp.checkpoint.library import LocalModel
from mlx_mtp.training import estimate, heads, tune
from mlx_mtp.training import train as training
from mlx_mtp.training.measure import Acceptance, MeanShare
from mlx_mtp.training.optimize import Trainer
from mlx_mtp.training.reading import is_held_out
from mlx_mtp.training.settings import TuneSettings

SMALL = {"tokens": 2000, "epochs": 1, "rows": 4, "rate": 2e-2}
NEW = {"new": True, "draft_vocab": None, "bits": None, **SMALL}


class Vocabulary:
    """The part of a tokenizer that a tuning on token ids needs."""

    def __init__(self, size: int = 13):
        self.size = size

    def get_vocab(self):
        return {str(i): i for i in range(self.size)}


def texts(seed: int = 0, count: int = 50, length: int = 64) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 13, (count, length)).tolist()


TARGET = {**HEADLESS["qwen3"], "vocab_size": 13, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _short_rows(monkeypatch):
    """Rows in which documents of 64 tokens begin at different positions, with a fraction of the attention's work."""
    monkeypatch.setattr(tune, "LENGTH", 40)
    monkeypatch.setattr(training, "MEASURES", 3)  # half of the time was that of measuring
    monkeypatch.setattr(
        tune, "most_frequent", lambda tokenizer, counts, size, vocab: [t for t, _ in counts.most_common(size)]
    )


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    return families.headless(tmp_path_factory.mktemp("headless"), TARGET)[0]


@pytest.fixture(scope="module")
def recycled(tmp_path_factory):
    return families.build("mimo", tmp_path_factory.mktemp("mimo"), vocab_size=13)[0]


def load(path, **options):
    return mlx_mtp.load_model(path, kernels="off", **options)


def tuned(model, out: Path, given=None, **options):
    return mlx_mtp.tune_heads(model, Vocabulary(), texts() if given is None else given, out=out, **options)


FORMS = {"float": {}, "8 bits": {"bits": 8}, "9 tokens": {"draft_vocab": 9}}


@pytest.fixture(scope="module")
def made(headless, tmp_path_factory):
    """Return what a tuning of a new head returns in a form, made once."""

    @cache
    def of_form(form):
        return tuned(load(headless), tmp_path_factory.mktemp("made") / "new.safetensors", **{**NEW, **FORMS[form]})

    return of_form


@pytest.mark.parametrize("form", FORMS)
def test_a_new_head_drafts_for_the_target_it_was_made_for(form, headless, made):
    found = made(form)
    assert found.after.cycle.mean > 1.1
    assert found.before is None
    model = load(headless, mtp_path=found.file)
    assert len(model.mtp) == 1
    prompt = mx.array([3, 1, 4])
    plain = [int(t) for t, *_ in mlx_mtp.generate_step(prompt, load(headless), max_tokens=12)]
    drafted = mlx_mtp.generate_step(prompt, model, max_tokens=12, num_draft_tokens=2, adaptive=False)
    assert [int(t) for t, *_ in drafted] == plain
    assert list(found.file.parent.iterdir()) == [found.file]


def test_a_new_head_reads_rows_as_large_as_the_targets(headless):
    workshop = heads.new(load(headless), None, 1, None, mx.float32)
    before, (small, _, large) = workshop.trained.mtp[0].eh_proj.weight, mx.random.normal((3, 1, 32))
    heads.set_scale(workshop, mx.concatenate([small, 3 * large / mx.sqrt((large**2).mean()), 99 * large]))
    np.testing.assert_allclose(workshop.trained.mtp[0].eh_proj.weight, 3 * before, rtol=1e-5)


def test_a_new_head_of_an_adapted_target_has_plain_modules(headless, tmp_path):
    model = load(headless)
    load_adapters(model, lora.save(tmp_path / "adapter", model, seed=1))
    found = tuned(model, tmp_path / "new.safetensors", **{**NEW, "epochs": 0.2})
    assert found.file
    assert not [name for name in mx.load(str(found.file)) if "lora" in name]
    load(headless, mtp_path=found.file)


def test_a_new_head_of_a_quantized_target_has_the_types_of_its_norms(headless, tmp_path):
    path = tmp_path / "converted"
    mlx_mtp.convert(headless, path, dtype="bfloat16", quantize=True, q_group_size=32)
    found = tuned(load(path), tmp_path / "new.safetensors", **{**NEW, "epochs": 0.2})
    assert {w.dtype for w in mx.load(str(found.file)).values()} == {mx.bfloat16}


EIGHT, FOUR = ({"mtp_q_bits": bits, "mtp_q_group_size": 32} for bits in (8, 4))


EXISTING = [({}, {"rows": 3}), (EIGHT, {"rank": 4}), (FOUR, {})]


@pytest.mark.parametrize(("form", "options"), sampled(EXISTING[:2], EXISTING))
def test_existing_heads_become_better_and_are_stored_as_before(form, options, recycled, tmp_path):
    """In the types of a half-precision model and in the format of its heads, also after low-rank updates."""
    path = tmp_path / "converted"
    mlx_mtp.convert(recycled, path, dtype="bfloat16", **form)
    model = load(path)
    own, spec, unchanged = model.mtp, model.spec, dict(tree_flatten(model.parameters()))
    found = tuned(model, tmp_path / "new.safetensors", **SMALL | options)
    assert found.after.cycle.mean > found.before.cycle.mean
    assert model.mtp is own
    assert model.spec is spec
    assert all(w is unchanged[name] for name, w in tree_flatten(model.parameters()))
    assert load(path, mtp_path=found.file).spec == spec
    before, after = (
        {name: (w.shape, w.dtype) for name, w in tree_flatten(load(path, **given).parameters()) if "mtp." in name}
        for given in ({}, {"mtp_path": found.file})
    )
    assert after == before
    assert mx.bfloat16 in {dtype for _, dtype in before.values()}


def interrupted(function, at, *, after=False):
    """Return `function`, whose call number `at` raises KeyboardInterrupt, at its begin or at its end."""
    calls = itertools.count(1)

    def call(*given):
        now = next(calls) == at
        if now and not after:
            raise KeyboardInterrupt
        found = function(*given)
        if now:
            raise KeyboardInterrupt
        return found

    return call


def test_a_seed_gives_the_same_file_also_after_an_interruption(headless, made, tmp_path, monkeypatch):
    whole = made("float").file.read_bytes()
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
        if stage.startswith("training") and done == 6:
            raise KeyboardInterrupt

    found = tuned(load(headless), out, progress=later, **NEW)
    assert len([stage for stage in stages if stage == "recording"]) < 32
    assert found.file == out  # Ctrl-C keeps the best so far
    # In the middle of an update, after it, and after a step that is not counted yet and whose measurement is due.
    places = (AdamW, "apply_single", 5, False), (AdamW, "update", 1, True), (Trainer, "step", 2, True)
    for kind, name, at, after in places:
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, interrupted(getattr(kind, name), at, after=after))
            tuned(load(headless), out, **NEW)
    assert tuned(load(headless), out, **NEW).file.read_bytes() == whole


def test_the_best_heads_are_kept(headless, tmp_path, monkeypatch):
    shares, noted = iter([1.0, 3.0, 2.0, *[1.5] * 20]), []

    def measure(model, recording, documents, depths):
        noted.append(np.array(model.mtp[0].eh_proj.weight))
        return Acceptance((), MeanShare(next(shares), 0.0, 0.0), 1)

    monkeypatch.setattr(training, "measure", measure)
    found = tuned(load(headless), tmp_path / "new.safetensors", **NEW)
    assert [mean for _, mean in found.curve] == [1.0, 3.0]
    np.testing.assert_array_equal(mx.load(str(found.file))["tuned_mtp.0.eh_proj.weight"], noted[1])
    assert len(noted) > 2


@pytest.mark.parametrize("rows", [None, 3])
def test_the_first_batch_that_fits_is_chosen(rows, headless, monkeypatch):
    workshop = heads.new(load(headless), None, 2, None, mx.float32)
    asked = [(n, checkpoint) for n in ([rows] if rows else [8, 4, 2, 1]) for checkpoint in (False, True)]
    needed = {each: estimate.memory_of(workshop, each[0], 40, checkpoint=each[1]) for each in asked}
    assert [*needed.values()] == sorted(needed.values(), reverse=True)
    for each, size in needed.items():
        have = SimpleNamespace(bytes=size / estimate.ROOM + 2)
        monkeypatch.setattr(estimate, "available", lambda have=have: have)
        assert estimate.fit(workshop, rows, 40) == each
    monkeypatch.setattr(estimate, "available", lambda: SimpleNamespace(bytes=size))
    with pytest.raises(ValueError, match="used; give a smaller batch" if rows else "used; use a smaller draft"):
        estimate.fit(workshop, rows, 40)


@pytest.mark.parametrize(
    ("options", "width", "rate"),
    [
        ({}, 128, 1e-3),
        ({}, 32, 1e-3),
        ({}, 4096, 1e-3 / 32),
        ({"new": True}, 576, 1e-3),
        ({"new": True}, 2304, 2.5e-4),
        ({"rank": 8}, 5120, 2.5e-4),
        ({"rate": 3e-3}, 4096, 3e-3),
    ],
)
def test_the_default_rate_falls_with_the_hidden_size(options, width, rate):
    assert TuneSettings(**options).peak_rate(width) == pytest.approx(rate)


@pytest.mark.parametrize("held", [False, True])
def test_nothing_better_writes_nothing(held, recycled, tmp_path):
    """Also if no text, or every text, is held out by its hash: the last one is then on the other side."""
    given = [text for text in texts(count=800) if is_held_out(text[:16]) == held]
    options = {**SMALL, "rate": 1e-9, "epochs": 0.2}
    found = tuned(load(recycled), tmp_path / "mtp.safetensors", given[:32], **options)
    assert found.file is None
    assert list(tmp_path.iterdir()) == []
    assert found.lines()[-1] == "The heads did not get better: nothing written."


REFUSED = {
    "too little text": (lambda: texts(count=3), {}, "too little text: 192 tokens in 3 documents"),
    "no text": (lambda: [], {}, "too little text: 0 tokens in 0 documents"),
    "tokens": (texts, {"tokens": 10}, "tokens=10: allowed are 2000 to"),
    "name": (texts, {"out": "heads.bin"}, r"out=heads.bin: allowed are names \*.safetensors"),
    "rank": (texts, {"rank": 4}, "rank=4: a new head is trained whole"),
    "rows": (texts, {"rows": 0}, "rows=0: allowed are 1 to"),
    "rate": (texts, {"rate": 0.0}, "rate=0.0: allowed are"),
    "draft_vocab": (texts, {"draft_vocab": 0}, "draft_vocab=0: allowed are 1 to"),
    "low rank": (texts, {"new": False, "rank": 0}, "rank=0: allowed are 1 to"),
    "seed": (texts, {"seed": -1}, "seed=-1: allowed are 0 to"),
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


def test_models_that_cannot_be_tuned_are_refused_before_a_text_is_read(headless, tmp_path):
    with pytest.raises(ValueError, match="no MTP heads to tune; --new makes some"):
        tuned(load(headless), tmp_path / "mtp.safetensors", iter, **SMALL)
    model = load(headless)
    model.runtime.trials = object()  # as with kernels
    with pytest.raises(ValueError, match='load it with kernels="off"'):
        tuned(model, tmp_path / "mtp.safetensors", iter, **NEW)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_of_nan_and_rows_of_nan_write_nothing(headless, tmp_path):
    with pytest.raises(ValueError, match="the loss of step 2 is not finite; lower --learning-rate"):
        tuned(load(headless), tmp_path / "a.safetensors", **{**NEW, "rate": 1e38})
    model = load(headless)
    model.model.norm.weight = model.model.norm.weight * float("nan")
    model.layers[-1].mlp.down_proj.weight = model.layers[-1].mlp.down_proj.weight * float("nan")
    with pytest.raises(ValueError, match="hidden states for a document contain NaN"):
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


def test_a_sidecar_on_another_target_is_used_with_a_warning(made, tmp_path):
    other = families.headless(tmp_path / "other", TARGET, seed=7)[0]
    with pytest.warns(UserWarning, match="trained for another model"):
        load(other, mtp_path=made("float").file)


def test_conversions_keep_tuned_heads(headless, made, tmp_path):
    source, file = tmp_path / "source", tmp_path / "source" / "mtp.safetensors"
    source.mkdir()
    for part in headless.iterdir():
        (source / part.name).write_bytes(part.read_bytes())
    file.write_bytes(made("8 bits").file.read_bytes())
    assert mlx_mtp.convert(source, tmp_path / "made", quantize=True, q_group_size=32).report.heads == 1
    model = load(tmp_path / "made")
    assert model.spec.prefix == load(headless, mtp_path=file).spec.prefix
    facts = inspect_checkpoint(tmp_path / "made")
    assert (facts.depths, facts.missing, facts.problems) == (1, (), ())
    assert json.dumps(facts.head_tensors).count("tuned_mtp.0.") == len(facts.head_tensors)
    assert sidecars.target_of(file) == sidecars.fingerprint(load(headless))


def test_heads_of_the_package_are_found_by_their_target_and_weights_are_read_once(
    headless, recycled, made, tmp_path, monkeypatch
):
    monkeypatch.setattr(sidecars, "SHIPPED_HEADS", (made("9 tokens").file,))
    loads, real = [], loading.load_port
    monkeypatch.setattr(loading, "load_port", lambda *args, **how: loads.append(how["lazy"]) or real(*args, **how))
    assert len(load(headless).mtp) == 1
    assert loads.count(False) == 1
    other = families.headless(tmp_path / "other", TARGET, seed=7)[0]
    assert [len(load(path, **how).mtp) for path, how in ((other, {}), (headless, {"mtp": False}))] == [0, 0]
    facts, row = inspect_checkpoint(headless), describe(LocalModel("headless", headless))
    assert f"MTP heads  0 found; mlx-mtp has 1, {made('9 tokens').file}" in as_text(facts)
    assert (facts.report.lm_head, row.drafts) == ("own, of 9 tokens", "1 of mlx-mtp")
    own = load(recycled)
    monkeypatch.setattr(loading, "shipped_heads", lambda config: made("9 tokens").file)
    assert load(recycled).spec == own.spec


@pytest.mark.parametrize("header", ['{"__metadata__": null}', "{}", "[]", "[", '{"__metadata__": {}}'])
def test_files_without_a_target(header, tmp_path):
    file = tmp_path / "mtp.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert sidecars.target_of(file) is None
