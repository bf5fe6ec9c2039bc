"""`verify-lossless` on heads that are wired, stored or converted wrongly; no text is another one, only slower."""

import warnings

import mlx.core as mx
import pytest
import tiny
import trained

import mlx_mtp
from mlx_mtp.lossless.check import Settings, Verdict, conclude, examine
from mlx_mtp.lossless.heads import Known
from mlx_mtp.lossless.one_pass import OnePass

CHECKPOINTS = {name: trained.checkpoint(name) for name in trained.NAMES}


def load(path, config, weights, **options):
    """(the model, what its loader warned of)"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = mlx_mtp.load_model(tiny.save(path, config, weights), **options)
    return model, [str(w.message) for w in said]


def verdict_on(model):
    """What the heads' examination comes to, on texts that it did not learn."""
    texts = []
    for seed in (1000, 1001):
        one_pass = OnePass(model, trained.text(seed))
        texts.append(Known.of(one_pass.tokens, one_pass.hidden, one_pass.said))
    verdict = Verdict("float32")
    examine(model, texts, Settings(2), verdict, lambda *_: None)
    conclude(model, verdict)
    return verdict


@pytest.fixture(scope="module")
def right_models(tmp_path_factory):
    return {name: load(tmp_path_factory.mktemp(name), *CHECKPOINTS[name]) for name in trained.NAMES}


@pytest.mark.parametrize("name", trained.NAMES)
def test_right_heads_pass(right_models, name):
    model, said = right_models[name]
    verdict = verdict_on(model)
    assert min(verdict.agreement) > 0.6
    assert (said, verdict.broken, verdict.warnings) == ([], [], [])


class Tensors(dict):
    """A checkpoint's tensors; those of heads by (depth, path)."""

    def __init__(self, name, model):
        super().__init__(CHECKPOINTS[name][1])
        layers = model.args.num_hidden_layers
        self.places = {place: n for n in self if (place := model.spec.locate(n, layers))}
        self.shift = 1 if name == "step3p5" else 0  # norms are stored less one

    def change(self, path, function):
        """Every depth's tensor at paths that begin so becomes function(depth, tensor)."""
        for (depth, at), n in self.places.items():
            if at.startswith(path):
                self[n] = function(depth, self[n])

    def swap(self, path, order):
        found = {depth: {p: self[n] for (d, p), n in self.places.items() if d == depth} for depth in order}
        for (depth, p), n in self.places.items():
            if p.startswith(path):
                self[n] = found[order[depth]][p]


def shift_norms(paths):
    """A shift that was forgotten, or done twice."""

    def plant(tensors):
        for path in paths:
            tensors.change(path, lambda _, w: w + 1 if w.ndim == 1 else w)

    return plant


def other_order(tensors):
    tensors.change("eh_proj", lambda _, w: mx.concatenate(mx.split(w, 2, axis=1)[::-1], axis=1))


def other_side_of_the_norm(spec):
    """Weights that belong to the hidden state on the other side of the final norm."""

    def plant(tensors):
        norm = tensors["model.norm.weight"] + tensors.shift
        factor = norm if spec == "post" else 1 / norm
        tensors.change(
            "hnorm",
            lambda depth, w: (w + tensors.shift) * factor - tensors.shift if not depth or spec == "post" else w,
        )

    return plant


def fed_behind_the_norm(tensors):
    """Depths from the second on whose weights belong to the depth before behind its norm."""
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
CASES = {
    **{f"{name}: {norms} +1": (name, shift_norms(paths)) for name in trained.NAMES for norms, paths in NORMS.items()},
    **{f"{name}: hidden and embedding": (name, other_order) for name in trained.NAMES},
    "step3p5: hidden state before the norm": ("step3p5", other_side_of_the_norm("pre")),
    "mimo: hidden state before the norm": ("mimo", other_side_of_the_norm("pre")),
    "mimo_v2_flash: hidden state behind the norm": ("mimo_v2_flash", other_side_of_the_norm("post")),
    "step3p5: feedback before the norm": ("step3p5", fed_behind_the_norm),
    **{
        f"{name}: depths {order}": (name, lambda tensors, order=order: tensors.swap("", order))
        for name in ("step3p5", "mimo_v2_flash")
        for order in ((1, 0, 2), (0, 2, 1), (1, 2, 0))
    },
    **{
        f"step3p5: LM heads {order}": ("step3p5", lambda tensors, order=order: tensors.swap("head", order))
        for order in ((1, 0, 2), (2, 0, 1), (0, 0, 0), (0, 1, 1))
    },
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_heads_are_found(tmp_path, right_models, case):
    name, plant = CASES[case]
    tensors = Tensors(name, right_models[name][0])
    plant(tensors)
    model, said = load(tmp_path, CHECKPOINTS[name][0], dict(tensors))
    verdict = verdict_on(model)
    print(case, "|", verdict.agreement, "|", said, verdict.broken, verdict.warnings)
    assert verdict.broken or verdict.warnings or said
