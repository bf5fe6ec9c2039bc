"""Run `verify-lossless` on heads that are wired, stored or converted wrongly: output stays, drafts get worse."""

import warnings

import mlx.core as mx
import pytest
import tiny
import trained
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.run import Drafts
from mlx_mtp.lossless.check import CheckSettings, Verdict, _kept, conclude, examine
from mlx_mtp.lossless.compare import Comparison, Reference, compare, ways
from mlx_mtp.lossless.heads import Known, right
from mlx_mtp.lossless.prompts import NamedPrompt
from mlx_mtp.lossless.rounding_judge import OnePass

FEW_TEXTS = 3 if SWEEP else 1
CHECKPOINTS = {name: trained.checkpoint(name) for name in trained.NAMES}


def load(path, config, weights, **options):
    """Return (the model, its loader's warnings)."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        model = mlx_mtp.load_model(tiny.save(path, config, weights), **options)
    return model, [str(w.message) for w in messages]


def verdict_on(model, count):
    """Return the verdict on the heads alone, from `count` texts that they were not trained on."""
    texts = []
    for seed in range(1000, 1000 + count):
        one_pass = OnePass(model, trained.text(seed))
        texts.append(Known.of(one_pass.tokens, one_pass.hidden, one_pass.predicted))
    verdict = Verdict("float32")
    examine(model, texts, CheckSettings(2), verdict, lambda *_: None)
    conclude(model, verdict)
    return verdict


@pytest.fixture(scope="module")
def right_models(tmp_path_factory):
    return {name: load(tmp_path_factory.mktemp(name), *CHECKPOINTS[name]) for name in trained.NAMES}


@pytest.mark.parametrize("name", sampled(trained.NAMES[-1:], trained.NAMES))
def test_correct_heads_pass(right_models, name):
    model, messages = right_models[name]
    verdict = verdict_on(model, FEW_TEXTS)
    assert min(verdict.agreement) > 0.6
    assert (messages, verdict.broken, verdict.warnings) == ([], [], [])


class Tensors(dict):
    """A checkpoint's tensors; those of heads by (depth, path)."""

    def __init__(self, name, model):
        super().__init__(CHECKPOINTS[name][1])
        layers = model.args.num_hidden_layers
        self.places = {place: n for n in self if (place := model.spec.locate(n, layers))}
        self.shift = 1 if name == "step3p5" else 0  # norms are stored minus one

    def change(self, path, function):
        """Replace every depth's tensors at paths with this prefix by function(depth, tensor)."""
        for (depth, at), n in self.places.items():
            if at.startswith(path):
                self[n] = function(depth, self[n])

    def swap(self, path, order):
        found = {depth: {p: self[n] for (d, p), n in self.places.items() if d == depth} for depth in order}
        for (depth, p), n in self.places.items():
            if p.startswith(path):
                self[n] = found[order[depth]][p]


def unshifted(paths):
    """Omit or undo a shift by one."""

    def plant(tensors):
        for path in paths:
            tensors.change(path, lambda _, w: w - 1 if w.ndim == 1 else w)

    return plant


def other_order(tensors):
    tensors.change("eh_proj", lambda _, w: mx.concatenate(mx.split(w, 2, axis=1)[::-1], axis=1))


def behind_the_norm(tensors):
    """Store a first depth trained on the hidden state after the final norm; it reads the one before."""
    norm, shift = tensors["model.norm.weight"] + tensors.shift, tensors.shift
    tensors.change("hnorm", lambda depth, w: w if depth else (w + shift) / norm - shift)


def fed_behind_the_norm(tensors):
    """Store later depths trained on the normed output of the previous depth."""
    norms = {d: tensors[n] + 1 for (d, p), n in tensors.places.items() if p == "norm.weight"}
    tensors.change("hnorm", lambda depth, w: (w + 1) / norms[depth - 1] - 1 if depth else w)


NORMS = {
    "norms": ("enorm", "hnorm", "norm", "block.input_layernorm", "block.post_attention_layernorm"),
    "norms of the block": ("block.input_layernorm", "block.post_attention_layernorm"),
    "norms of the fusion": ("enorm", "hnorm"),
    "enorm": ("enorm",),
    "hnorm": ("hnorm",),
    "last norm": ("norm",),
}
FEW_NORMS = {("mimo_v2_flash", "norms")}
# Expected part of the verdict; a norm's shift may be named by another norm whose shift has the same effect.
NAMED = {
    "hidden and embedding": "with fuse=",
    "hidden state before the norm": "with capture='post' for 'pre'",
    "feedback before the norm": "with feedback='post' for 'pre'",
    "depths (1, 0, 2)": "with depths in the order 2, 1, 3",
    "depths (0, 2, 1)": "with depths in the order 1, 3, 2",
    "depths (1, 2, 0)": "with depths in the order 3, 1, 2",
    "LM heads (1, 0, 2)": "with LM heads of depths 2, 1, 3",
    "LM heads (2, 0, 1)": "with LM heads of depths 2, 3, 1",
}
CASES = {
    **{
        f"{name}: {norms}": (name, unshifted(paths))
        for name in trained.NAMES
        for norms, paths in NORMS.items()
        if (SWEEP or (name, norms) in FEW_NORMS)
        and (name, norms) != ("mimo", "last norm")  # three in four above one: less one they choose the same
    },
    **{f"{name}: hidden and embedding": (name, other_order) for name in sampled([], trained.NAMES)},
    **{f"{name}: hidden state before the norm": (name, behind_the_norm) for name in sampled([], ["step3p5", "mimo"])},
    **{f"{name}: feedback before the norm": (name, fed_behind_the_norm) for name in sampled([], ["step3p5"])},
    **{
        f"{name}: depths {order}": (name, lambda tensors, order=order: tensors.swap("", order))
        for name in ("step3p5", "mimo_v2_flash")
        for order in ((1, 0, 2), (0, 2, 1), (1, 2, 0))
        if SWEEP or (name, order) == ("mimo_v2_flash", (0, 2, 1))
    },
    **{
        f"step3p5: LM heads {order}": ("step3p5", lambda tensors, order=order: tensors.swap("head", order))
        for order in sampled([], [(1, 0, 2), (2, 0, 1), (0, 0, 0), (0, 1, 1)])
    },
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_heads_are_found(tmp_path, right_models, case):
    name, plant = CASES[case]
    tensors = Tensors(name, right_models[name][0])
    plant(tensors)
    model, messages = load(tmp_path, CHECKPOINTS[name][0], dict(tensors))
    verdict = verdict_on(model, 3 if name == "step3p5" else FEW_TEXTS)  # it needs more texts for a clear result
    assert verdict.broken or messages
    if why := NAMED.get(case.partition(": ")[2]):
        assert why in verdict.broken[-1]


@pytest.mark.parametrize("name", sampled(["mimo_v2_flash"], trained.NAMES))
def test_a_hidden_state_of_another_position_is_found(right_models, monkeypatch, name):
    model, _ = right_models[name]
    real = type(model).capture
    monkeypatch.setattr(type(model), "capture", lambda self, hidden: shifted(real(self, hidden)))
    verdict = verdict_on(model, FEW_TEXTS)
    assert "with the hidden state of the position behind" in verdict.broken[-1]


def shifted(rows):
    return mx.concatenate([rows[:, :1], rows[:, :-1]], axis=1)


# The loop's own drafts compared with those of a head that reads the whole text.


class OneRowOff(Heads):
    def propose(self, frame, run, k):
        return super().propose(frame, run._replace(hidden=shifted(run.hidden)), k)


class LastFirst(Heads):
    def propose(self, frame, run, k):
        return Drafts(super().propose(frame, run, k).tokens[:, ::-1])


LOOPS = {"right": Heads, "hidden states one row off": OneRowOff, "the last draft first": LastFirst}


PAIRS = paired(LOOPS, trained.NAMES[::2])


@pytest.mark.parametrize(("plant", "name"), sampled(PAIRS[:2], PAIRS))
def test_a_loop_that_drafts_worse_than_its_heads_is_found(right_models, monkeypatch, name, plant):
    model, _ = right_models[name]
    prompts = [
        NamedPrompt(str(seed), trained.text(seed, 12), stops=False) for seed in range(2000, 2004 if SWEEP else 2001)
    ]
    references = [Reference(model, prompt, 48, ()) for prompt in prompts]
    k = len(model.mtp)
    way = ways(k, adaptive=False, p_min=0.5, lookup=False, compiled=False)[k - 1]
    monkeypatch.setattr(model, "drafter", LOOPS[plant](model))
    comparison = Comparison(way.name)
    for reference in references:
        compare(reference, way, comparison)
    assert not comparison.differences
    own = [right(model, Known.of(p.tokens, p.hidden, p.predicted), k) for p in (r.one_pass for r in references)]
    verdict = Verdict("float32", kept=_kept(references, own, [comparison] * (k + 1), k))
    conclude(model, verdict)
    assert bool(verdict.broken) == (plant != "right"), verdict.kept
    assert plant != "right" or verdict.kept[0] - verdict.kept[1] in range(4 * k + 1)
