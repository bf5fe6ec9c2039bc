"""Break checkpoints of every family: one line names the file, the tensor, what was found and expected."""

import json
import os
import re
import warnings

import families
import mlx.core as mx
import pytest
import tiny
from sweep import paired, sampled

import mlx_mtp

NAMES = sorted(families.FAMILIES)
NUMBERED = [
    n for n in NAMES if any(".experts.0." in t for t in families.FAMILIES[n].trunk(families.FAMILIES[n].config))
]


class Broken:
    """A family's tiny checkpoint, and the message that loading it gives once it is damaged."""

    def __init__(self, name: str, path):
        self.path, self.weights, _ = families.build(name, path)
        self.config = json.loads((path / "config.json").read_text())
        self.heads = list(families.FAMILIES[name].heads(families.FAMILIES[name].config))
        self.zero_centred = families.FAMILIES[name].zero_centred
        self.trunk = [n for n in self.weights if n not in self.heads]

    def message(self, weights: dict, config: dict | None = None) -> str:
        tiny.save(self.path, config or self.config, weights)
        with pytest.raises(ValueError, match=r"model\.safetensors: ") as error:
            mlx_mtp.load_model(self.path)
        assert "\n" not in str(error.value)
        return str(error.value)

    def without(self, gone) -> dict:
        return {name: w for name, w in self.weights.items() if not gone(name)}

    def first(self, pattern: str) -> str:
        return next(name for name in self.heads if re.search(pattern, name))


@pytest.fixture
def broken(request, tmp_path):
    return Broken(request.param, tmp_path)


def in_families(first: int):
    """Every fourth family from one on, which differs from mistake to mistake; in a sweep all."""
    return pytest.mark.parametrize("broken", sampled(NAMES[first::4], NAMES), indirect=True)


@pytest.mark.parametrize(("broken", "part"), paired(NUMBERED, ["trunk", "heads"]), indirect=["broken"])
def test_experts_are_missing(broken, part):
    experts = [name for name in getattr(broken, part) if ".experts." in name]
    if not experts:
        pytest.skip("the heads have no experts")
    prefix = re.match(r".*\.experts\.", experts[0])[0]
    for number in sampled([3], (1, 3)):
        expected = rf"tensor {re.escape(prefix)}{number}\.\w+_proj\.weight is missing; (each expert|the rest) "
        assert re.search(expected, broken.message(broken.without(lambda n, e=number: n.startswith(f"{prefix}{e}."))))
        one = broken.message(broken.without(lambda n, e=number: n == f"{prefix}{e}.down_proj.weight"))
        assert re.search(expected.replace(r"\w+_proj", "down_proj"), one)
    message = broken.message(broken.without(lambda n: n.startswith(prefix)))
    layer = re.escape(prefix.removesuffix("experts."))
    assert re.search(rf"tensor {layer}experts\.[0*]\.\w+_proj\.weight is missing; .*\(\d, \d+, \d+\)", message)


@pytest.mark.parametrize("broken", sampled(NUMBERED[::4], NUMBERED), indirect=True)
def test_experts_of_another_number_than_config_says(broken):
    message = broken.message(broken.without(lambda n: ".experts.3." in n))
    assert re.search(
        r"tensor \S+\.experts\.3\.\w+_proj\.weight is missing; (the rest of its layer|each expert from 0 to 5 )",
        message,
    )
    more = {n.replace(".experts.3.", ".experts.4."): w for n, w in broken.weights.items()}
    message = broken.message(broken.weights | more)
    assert re.search(r"tensor \S+\.experts\.4\.\w+_proj\.weight is not part of the model", message)


@pytest.mark.parametrize("broken", ["qwen3_5_moe"], indirect=True)
@pytest.mark.parametrize(("part", "tensor"), paired(["trunk", "heads"], ["gate_up_proj", "down_proj"]))
def test_fused_experts_are_missing(broken, part, tensor):
    gone = next(name for name in getattr(broken, part) if name.endswith(f".experts.{tensor}"))
    layer = re.escape(gone.removesuffix(f"experts.{tensor}"))
    assert re.search(
        rf"tensor {layer}experts\.(\*\.)?\w+_proj\S* is missing", broken.message(broken.without({gone}.__contains__))
    )


@in_families(0)
def test_a_wrong_prefix(broken):
    renamed = {f"wrong.{n}" if n in broken.heads else n: w for n, w in broken.weights.items()}
    message = broken.message(renamed)
    assert re.search(
        r"tensor wrong\.\S+ is not part of the model; config\.json expects \d layers, and MTP heads ", message
    )
    layers = {**broken.config, **broken.config.get("text_config", {})}["num_hidden_layers"]
    where = re.search(r"MTP heads (?:from layer (\d+) on|under (\S+) made of .+)$", message)
    assert where[1] == str(layers) if where[1] else broken.heads[0].startswith(where[2].partition("#")[0])


@in_families(1)
def test_the_wrong_layer(broken):
    """As when the trunk was cut without renumbering the later layers."""
    later = lambda match: f"{match[1]}.{int(match[2]) + 3}."  # noqa: E731
    moved = {n: re.sub(r"(layers)\.(\d+)\.", later, n, count=1) if n in broken.heads else n for n in broken.weights}
    message = broken.message({moved[n]: w for n, w in broken.weights.items()})
    assert re.search(
        r"no tensors of MTP depth 0, but of depth \d, such as \S+|tensor mtp\.layers\.3\.\S+ is not part", message
    )


@in_families(2)
def test_nothing_but_zeros_or_nan(broken):
    """A whole head of zeros is a warning, because the output does not change; a part of one is an error."""
    zeros = {name: mx.zeros_like(w) for name, w in broken.weights.items() if name in broken.heads}
    tiny.save(broken.path, broken.config, broken.weights | zeros)
    with pytest.warns(
        UserWarning, match=r"model\.safetensors: MTP depth 0 holds only zeros, expected trained weights"
    ):
        mlx_mtp.load_model(broken.path)
    patterns = r"(eh_proj|fc|input_proj)\.weight$", r"(final_layernorm|norm)\.weight$", r"\.o_proj"
    for pattern, (value, words) in paired(patterns, [(0.0, "only zeros"), (float("nan"), "NaN")]):
        name = broken.first(pattern)
        if not value and broken.zero_centred and "norm" in name:
            continue  # stands for ones
        damaged = {**broken.weights, name: mx.full(broken.weights[name].shape, value)}
        assert f"tensor {name} holds {words}, expected trained weights" in broken.message(damaged)


@in_families(3)
def test_the_head_of_another_model(broken):
    """The head has twice the hidden size, as in a larger model of the family."""
    wide = {n: mx.concatenate([w, w], -1) for n, w in broken.weights.items() if n in broken.heads}
    message = broken.message(broken.weights | wide)
    found = re.search(r"tensor (\S+) has shape \((.+)\); config\.json expects \((.+)\)$", message)
    assert found[1] in broken.heads
    assert found[2] != found[3]


@in_families(0)
def test_tensors_that_no_head_has(broken):
    top = re.match(r"(mtp|model\.mtp\.layers\.\d|model\.mtp_layers\.\d|model\.layers\.\d)\.", broken.heads[-1])[0]
    block = broken.first(r"\.o_proj").partition("o_proj")[0]
    for name in (f"{top}surprise.weight", f"{block}surprise.weight"):
        message = broken.message({**broken.weights, name: mx.ones(3)})
        assert re.search(rf"tensor {re.escape(name)} is not part of the model", message)


@in_families(1)
def test_more_or_fewer_heads_than_declared(broken):
    text = broken.config.get("text_config", broken.config)
    field = "mtp_num_hidden_layers" if "mtp_num_hidden_layers" in text else "num_nextn_predict_layers"
    found = mlx_mtp.load_model(broken.path, lazy=True).report.heads
    for declared in (0, found + 4):
        text[field] = declared
        tiny.save(broken.path, broken.config, broken.weights)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = str(mlx_mtp.load_model(broken.path, lazy=True).report)
        assert f"{found} of {declared} declared" in report
        expected = f"tensors of {found} MTP heads found, config.json declares {declared}"
        messages = [str(w.message) for w in caught if "agrees with the target" not in str(w.message)]
        assert messages == ([f"{broken.path}: {expected}"] if declared else [])


@in_families(1)
def test_a_file_without_permission_is_not_called_damaged(broken, monkeypatch):
    monkeypatch.setattr(os, "access", lambda file, mode: file.name != "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read \(permission denied\)$"):
        mlx_mtp.load_model(broken.path)


@in_families(2)
def test_a_truncated_shard(broken):
    file = broken.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: -len(broken.weights)])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged"):
        mlx_mtp.load_model(broken.path)
