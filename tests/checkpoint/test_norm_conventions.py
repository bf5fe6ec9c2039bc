"""Test the detection of zero-centred norms: decidable files load correctly, ambiguous ones cause a warning."""

import json
import re
import warnings

import families
import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

import mlx_mtp

NAMES = [name for name in sorted(families.FAMILIES) if families.FAMILIES[name].zero_centred]
STEP = {**tiny.CONFIG, "vocab_size": 13}


class Case:
    """A zero-centred family's tensors by the hub's names, and mlx-lm's conversion of the trunk."""

    def __init__(self, name: str, path):
        if name == "step3p5":
            self.config, weights = STEP, tiny.random_weights(STEP)
            plain = tiny.plain_model(STEP, weights)
            self.heads = {n: w for n, w in weights.items() if re.match(r"model\.layers\.[456]\.", n)}
        else:
            _, weights, plain = families.build(name, path)
            self.config = json.loads((path / "config.json").read_text())
            names = families.FAMILIES[name].heads(families.FAMILIES[name].config)
            self.heads = {n: weights[n] for n in names}
            for n in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
                self.heads[n] = self.heads[n] - 0.6  # as released: damped, so near zero in either convention
        self.path = path / "checkpoint"
        self.raw = {n: w for n, w in weights.items() if n not in self.heads}
        self.converted = dict(tree_flatten(plain.parameters()))

    def load(self, trunk: dict, heads: dict | None = None, sidecar: dict | None = None, format: str = "mlx"):
        """Return (the model, the warnings) of a trunk with heads in its shards or in a sidecar."""
        tiny.save(self.path, self.config, trunk | (heads or {}))
        if sidecar is not None:
            mx.save_safetensors(str(self.path / "mtp.safetensors"), sidecar, {"format": format})
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = mlx_mtp.load_model(self.path, lazy=True)
        mx.eval(model.parameters())  # before the next checkpoint replaces the file
        messages = [str(w.message) for w in warned]  # without warnings about random heads
        return dict(tree_flatten(model.parameters())), [m for m in messages if "agrees with the target" not in m]


def shifted(weights: dict, by: int = 1) -> dict:
    return {n: w + by if "norm" in n and "linear_attn" not in n else w for n, w in weights.items()}


@pytest.fixture
def case(request, tmp_path):
    return Case(request.param, tmp_path)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(mx.allclose(a[n], b[n], atol=1e-6) for n in a)


every_family = pytest.mark.parametrize("case", [*NAMES, "step3p5"], indirect=True)


@every_family
def test_decidable_containers_load_correctly(case):
    """Trunk and heads, each raw or converted, in one container or two: all load as one model, without warnings."""
    expected, warned = case.load(case.raw, case.heads)
    assert warned == []
    done = shifted(case.heads)
    layouts = {
        "a head copied raw into converted shards": {"trunk": case.converted, "heads": case.heads},
        "a converted head in converted shards": {"trunk": case.converted, "heads": done},
        "a raw sidecar of a converted trunk": {"trunk": case.converted, "sidecar": case.heads, "format": "pt"},
        "a raw sidecar that a converter wrote": {"trunk": case.converted, "sidecar": case.heads},
        "a converted sidecar of a raw trunk": {"trunk": case.raw, "sidecar": done},
        "a converted sidecar written by torch": {"trunk": case.converted, "sidecar": done, "format": "pt"},
    }
    for layout, parts in layouts.items():
        found, warned = case.load(**parts)
        assert same(found, expected), layout
        assert warned == [], layout


@every_family
def test_a_trunk_converted_without_the_shift(case):
    _, (warned, *more) = case.load(shifted(case.converted, by=-1), shifted(case.heads))
    found = re.match(
        r"(\S+): \d+ norms of the trunk \((\S+) \.\.\.\) have mean (\S+) once loaded, expected near 1; ", warned
    )
    assert found[1] == str(case.path / "model.safetensors")
    assert found[2] in case.converted
    assert abs(float(found[3])) < 0.1
    assert warned.endswith("they look stored zero-centred and not shifted")
    assert more == []


@every_family
def test_a_head_shifted_among_the_shards_of_a_raw_trunk(case):
    """The names are raw, so the head is shifted again; released norms may be large, so this is a warning."""
    _, warned = case.load(case.raw, shifted(case.heads))
    assert warned
    for depth, message in enumerate(warned):
        found = re.match(
            rf"\S+: \d+ norms of MTP depth {depth} \((\S+) \.\.\.\) have mean (\S+) once loaded", message
        )
        assert found[1] in case.heads
        assert abs(float(found[2]) - 2) < 0.1
        assert message.endswith("they look shifted twice")


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_two_conventions_in_one_head(case):
    """Only the last norm is shifted, or only the others: the layer's norms decide, and a warning names the last."""
    last = case.heads["mtp.norm.weight"]
    for heads, words in (
        ({**case.heads, "mtp.norm.weight": last + 1}, "all were shifted by +1"),
        ({**shifted(case.heads), "mtp.norm.weight": last}, "none was shifted"),
    ):
        found, (warned,) = case.load(case.converted, heads)
        assert re.match(
            r"\S+model\.safetensors: tensor mtp\.norm\.weight of MTP depth 0 has mean \S+, the norms of ", warned
        )
        assert warned.endswith(f"two conventions in one head; {words}")
        assert abs(float(found["mtp.0.block.input_layernorm.weight"].mean()) - 1) < 0.1


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_heads_published_on_their_own(case, tmp_path):
    """The names have no prefix, as in conversions of a head alone."""
    expected, _ = case.load(case.raw, case.heads)
    bare = {n.removeprefix("mtp."): w for n, w in shifted(case.heads).items()}
    found, warned = case.load(case.converted, sidecar=bare)
    assert same(found, expected)
    assert warned == []
