"""Convert every family: the result loads with the source's parameters in the chosen formats, and stays lossless."""

import json
import re
import shutil
import warnings

import families
import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint import files
from mlx_mtp.checkpoint.convert import convert, extract_heads
from mlx_mtp.checkpoint.norm_conventions import conventions

PROMPT = [1, 2, 3, 4, 5, 6, 7]
STEP = {**tiny.CONFIG, "vocab_size": 13}
NAMES = [*sorted(families.FAMILIES), "step3p5", "step3p7"]
VARIANTS = ("glm4_moe_untied", "glm_moe_dsa_shared", "nemotron_h", "step3p7")  # of families that another one covers
FAMILIES = [name for name in NAMES if name not in VARIANTS]
NOT_MLX_LM = ("glm_moe_dsa_shared", "step3p7")  # mlx-lm has another model, or none, for these
BITS = {"bf16": {"dtype": "bfloat16"}, "8": {"quantize": True, "q_bits": 8}, "4": {"quantize": True, "q_bits": 4}}
KINDS = ("weight", "scales", "biases")
G32 = {"q_group_size": 32, "mtp_q_group_size": 32}


WHOLE = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32}  # so that groups fit


def hub(name, path):
    """A checkpoint directory with the hub's names, and its tensors."""
    if name in families.FAMILIES:
        return families.build(name, path, **(WHOLE if "q_lora_rank" in families.FAMILIES[name].config else {}))[:2]
    config = STEP if name == "step3p5" else {"model_type": "step3p7", "text_config": STEP}
    weights = tiny.random_weights(STEP)
    return tiny.save(path, config, weights), weights


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> (directory, tensors, every parameter that a load of it has)."""
    built = {}

    def build(name):
        if name not in built:
            path, weights = hub(name, tmp_path_factory.mktemp(name))
            built[name] = path, weights, parameters(path)
        return built[name]

    return build


def parameters(path, **options):
    found = dict(tree_flatten(mlx_mtp.load_model(path, lazy=True, **options).parameters()))
    mx.eval(found)  # before a test changes the files
    return found


def names_of_heads(name: str, weights: dict) -> set[str]:
    if name in families.FAMILIES:
        return set(families.FAMILIES[name].heads(families.FAMILIES[name].config))
    return {n for n in weights if re.match(r"model\.layers\.[456]\.", n)}


def text(model, k):
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=5, num_draft_tokens=k, adaptive=False)
    return [token for token, _, _ in steps]


def decoded(model):
    """Return the tokens with all drafts, and per depth the number of drafts and of accepted drafts."""
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=5, adaptive=False, prompt_lookup=False, stats=stats)
    return [token for token, _, _ in steps], stats.drafted, stats.accepted


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert mx.array_equal(a[name], b[name]), name


def in_bits(before: dict, bits: int, found: dict, of_heads: int = 8) -> dict:
    """Return the parameters `before`, with those quantized whose scales are in `found`."""
    wanted = {}
    for name, w in before.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in found:
            wanted[name] = w
            continue
        router = re.search(r"mlp\.(shared_expert_)?gate$", module)  # mlx-lm's exception
        width = of_heads if name.startswith("mtp.") else 8 if router else bits
        wanted |= {f"{module}.{kind}": part for kind, part in zip(KINDS, mx.quantize(w, 32, width), strict=True)}
    return wanted


def packed_of_heads(before: dict) -> set[str]:
    """Return every matrix of a head whose rows are whole groups, except eh_proj, norms and routers."""
    kept = re.compile(r"\.(eh_proj|gate|shared_expert_gate|\w*norm)\.weight$")
    heads = {n for n, w in before.items() if n.startswith("mtp.") and w.ndim > 1 and w.shape[-1] % 32 == 0}
    return {n.removesuffix("weight") + "scales" for n in heads if not kept.search(n)}


ROUND_TRIPS = [(n, b) for n in NAMES for b in BITS if n in FAMILIES or b == "4"]
if not SWEEP:  # every fourth family in one of three formats, variants in 4 bits
    ROUND_TRIPS = [(n, list(BITS)[FAMILIES.index(n) % 3] if n in FAMILIES else "4") for n in NAMES[::4]]


@pytest.mark.parametrize(("name", "bits"), ROUND_TRIPS)
def test_round_trip(checkpoints, tmp_path, name, bits):
    """The result has the source's parameters in the chosen formats, and decodes without loss, also in mlx-lm."""
    path, _, before = checkpoints(name)
    new = tmp_path / "new"
    convert(path, new, **BITS[bits], **(G32 if bits != "bf16" else {}))
    model = mlx_mtp.load_model(new)
    found = dict(tree_flatten(model.parameters()))
    if bits == "bf16":
        kept = re.compile(r"correction_bias|router_bias" + ("" if name == "qwen3_next" else "|A_log"))  # by mlx-lm
        rounded = {n: w if kept.search(n) else w.astype(mx.bfloat16) for n, w in before.items()}
        expanded = model.report.expanded
        same(found, {n: w.astype(mx.float32) for n, w in rounded.items()} if expanded else rounded)
        model.set_dtype(mx.float32)
    else:
        same(found, in_bits(before, int(bits), found))
        assert {n for n in found if re.match(r"mtp\..*\.scales$", n)} == packed_of_heads(before)
    if name in NOT_MLX_LM:
        assert text(model, 2) == text(model, 0)
        return
    plain, _ = mlx_lm_utils.load_model(new)
    if bits == "bf16":
        plain.set_dtype(mx.float32)
    drafted = text(model, 2)
    assert drafted == tiny.greedy(plain, PROMPT, 5, drafted)


# One whose heads mlx-lm would load as the target's, and others.
@pytest.mark.parametrize("name", sampled(FAMILIES[::5], FAMILIES))
def test_heads_in_shards_and_in_a_sidecar(checkpoints, tmp_path, name):
    """Both layouts have the source's parameters, tokens and accepted drafts; mlx-lm reads the target's parameters.

    mlx-lm would load two families' heads as the target's: their conversion to shards is refused.
    """
    path, _, before = checkpoints(name)
    sidecar, new = tmp_path / "sidecar", tmp_path / "shards"
    convert(path, sidecar)
    refused = name in ("deepseek_v3", "qwen3_next")
    if refused:
        with pytest.raises(ValueError, match=r"^mtp_layout='shards': mlx-lm would not load \S+ in files with heads"):
            convert(path, new, mtp_layout="shards")
        assert not new.exists()
        shutil.copytree(sidecar, new)
        merged = mx.load(str(new / "model.safetensors")) | mx.load(str(new / "mtp.safetensors"))
        mx.save_safetensors(str(new / "model.safetensors"), merged, files.CONVERTED)
        (new / "mtp.safetensors").unlink()
        (new / files.INDEX).unlink()
    else:
        convert(path, new, mtp_layout="shards")
    assert (sidecar / "mtp.safetensors").exists()
    assert not (new / "mtp.safetensors").exists()
    target = {n: w for n, w in before.items() if not n.startswith("mtp.")}
    source = mlx_mtp.load_model(path, lazy=True)
    wanted = decoded(source)
    assert wanted[0] == text(source, 0)
    for converted in (sidecar, new):
        model = mlx_mtp.load_model(converted)
        same(dict(tree_flatten(model.parameters())), before)
        assert decoded(model) == wanted
        if refused and converted == new:
            with pytest.raises(ValueError, match="parameters not in model"):
                mlx_lm_utils.load_model(converted)
        elif name not in NOT_MLX_LM:
            plain, _ = mlx_lm_utils.load_model(converted)
            same(dict(tree_flatten(plain.parameters())), target)


ONCE = ["qwen3_5_moe", "qwen3_next", "step3p5", "deepseek_v3", "nemotron_h"]


@pytest.mark.parametrize("name", sampled(ONCE[1:2], ONCE))
def test_a_conversion_is_converted_to_itself(checkpoints, tmp_path, name):
    """Norms are not shifted again, experts not stacked again, and quantized modules stay the same."""
    path, _, before = checkpoints(name)
    convert(path, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    same(parameters(tmp_path / "b"), before)
    convert(tmp_path / "b", tmp_path / "c", quantize=True, **G32)
    convert(tmp_path / "c", tmp_path / "d")
    for file in ("model.safetensors", "mtp.safetensors", "config.json"):
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "d" / file).read_bytes()


@pytest.mark.parametrize(("name", "sidecar"), paired(["qwen3_5", "qwen3_next", "step3p5"], [True, True, False]))
def test_small_norms_of_a_head_are_not_shifted_twice(checkpoints, tmp_path, name, sidecar):
    """Norms nearer to the hub's convention than to ours: the conversion's metadata decide."""
    path, weights, _ = checkpoints(name)
    small = {n: weights[n] - 0.8 if "norm" in n else weights[n] for n in names_of_heads(name, weights)}
    config = json.loads((path / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such norms cause a warning
        tiny.save(tmp_path / "source", config, weights | small)
        before = parameters(tmp_path / "source")
        norm = before["mtp.0.block.input_layernorm.weight"]
        assert 0 < norm.mean() < 0.4
        layout = "sidecar" if sidecar or name == "qwen3_next" else "shards"
        convert(tmp_path / "source", tmp_path / "a", mtp_layout=layout)
        same(parameters(tmp_path / "a"), before)
        convert(tmp_path / "a", tmp_path / "b")
        same(parameters(tmp_path / "b"), before)


@pytest.mark.parametrize(("metadata", "raw"), [(files.CONVERTED, False), ({"format": "mlx"}, True)])
def test_small_norms_of_a_trunk_without_other_evidence(tmp_path, metadata, raw):
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {"model.layers.0.input_layernorm.weight": mx.full((8,), 0.2)}, metadata)
    assert conventions(("no name", "no name"), files.read_header([file]), {}) == (raw, raw)


@pytest.mark.parametrize(
    ("repeated", "name"),
    paired([("embed_tokens",), ("head",), ("embed_tokens", "head")], ["glm4_moe", "deepseek_v3"]),
)
def test_modules_that_repeat_the_target_are_dropped(checkpoints, tmp_path, name, repeated):
    """With another format than the target's it would be a separate embedding or LM head."""
    path, weights, _ = checkpoints(name)
    config = json.loads((path / "config.json").read_text())
    inside = f"model.layers.{config['num_hidden_layers']}."
    copies = {"embed_tokens": ("embed_tokens", "model.embed_tokens"), "head": ("shared_head.head", "lm_head")}
    for module in repeated:
        own, shared = copies[module]
        weights = weights | {f"{inside}{own}.weight": weights[f"{shared}.weight"]}
    tiny.save(tmp_path / "source", config, weights)
    convert(tmp_path / "source", tmp_path / "new", quantize=True, **G32)
    kept = mx.load(str(tmp_path / "new" / "mtp.safetensors"))
    for module, (own, _) in copies.items():
        assert (f"{inside}{own}.weight" in kept) == (module not in repeated)
    (head,) = mlx_mtp.load_model(tmp_path / "new").mtp
    assert {"embed_tokens", "head"} - set(head) == set(repeated)


ALONE = ["deepseek_v32", "mimo_v2_flash", "nemotron_h_latent", "qwen3_5_moe", "step3p7"]


@pytest.mark.parametrize("name", sampled(ALONE[1::5], ALONE))
def test_heads_alone_for_a_conversion_without(checkpoints, tmp_path, name):
    """Heads next to a target that was quantized without them; only their file contains their format."""
    path, _, before = checkpoints(name)
    convert(path, tmp_path / "new", quantize=True, **G32)
    whole = parameters(tmp_path / "new")
    (tmp_path / "new" / "mtp.safetensors").unlink()
    done = extract_heads(path, tmp_path / "new", mtp_q_bits=4, mtp_q_group_size=32)
    assert done.path == tmp_path / "new" / "mtp.safetensors"
    found = parameters(tmp_path / "new")
    target = {n: w for n, w in whole.items() if not n.startswith("mtp.")}
    same({n: w for n, w in found.items() if n in target}, target)
    heads = {n: w for n, w in before.items() if n.startswith("mtp.")}
    same({n: w for n, w in found.items() if n.startswith("mtp.")}, in_bits(heads, 4, found, of_heads=4))
    extract_heads(path, tmp_path / "head.safetensors")
    same(parameters(tmp_path / "new", mtp_path=tmp_path / "head.safetensors"), target | heads)


@pytest.mark.parametrize("name", sampled(FAMILIES[1::5], FAMILIES))
def test_heads_of_a_repository_need_no_more_than_their_files(checkpoints, tmp_path, monkeypatch, name):
    """Only files of the heads, and of target modules that they may repeat, are downloaded from the hub."""
    path, weights, before = checkpoints(name)
    heads = names_of_heads(name, weights)
    ends = {n for n in weights if n.endswith(("embed_tokens.weight", "lm_head.weight"))} - heads
    parts = {
        "model-1.safetensors": ends,
        "model-2.safetensors": heads,
        "model-3.safetensors": weights.keys() - heads - ends,
    }
    hub, here = tmp_path / "hub", tmp_path / "here"
    hub.mkdir()
    shutil.copy(path / "config.json", hub)
    for file, names in parts.items():
        mx.save_safetensors(str(hub / file), {n: weights[n] for n in names}, {"format": "pt"})
    places = {n: file for file, names in parts.items() for n in names}
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    def download(repo, revision, allow_patterns):
        here.mkdir(exist_ok=True)
        for file in hub.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, here)
        return here if (repo, revision) == ("they/model", "v2") else None

    monkeypatch.setattr(files, "snapshot_download", download)
    extract_heads("they/model", tmp_path / "mtp.safetensors", revision="v2")
    compared = {"glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"}  # which have their own
    needed = ["model-1.safetensors"] if name in compared else []
    assert sorted(file.name for file in here.glob("*.safetensors")) == [*needed, "model-2.safetensors"]
    same(parameters(path, mtp_path=tmp_path / "mtp.safetensors"), before)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "step3p5"])
def test_large_norms_of_heads_without_their_target(checkpoints, tmp_path, name):
    """Norms nearer to our convention than to the hub's: the hub's metadata decide."""
    path, weights, _ = checkpoints(name)
    large = {n: weights[n] + 0.9 if "norm" in n else weights[n] for n in names_of_heads(name, weights)}
    config = json.loads((path / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such norms cause a warning
        before = parameters(tiny.save(tmp_path / "whole", config, weights | large))
        assert before["mtp.0.block.input_layernorm.weight"].mean() > 1.75
        (tmp_path / "part").mkdir()
        shutil.copy(path / "config.json", tmp_path / "part")
        mx.save_safetensors(str(tmp_path / "part" / "model-2.safetensors"), large, {"format": "pt"})
        extract_heads(tmp_path / "part", tmp_path / "mtp.safetensors")
        same(parameters(tmp_path / "whole", mtp_path=tmp_path / "mtp.safetensors"), before)


def test_a_head_in_few_bits_for_a_target_in_many(checkpoints, tmp_path):
    path, _, before = checkpoints("glm4_moe")
    convert(path, tmp_path / "new", mtp_q_bits=6, mtp_q_group_size=32)
    assert "quantization" not in json.loads((tmp_path / "new" / "config.json").read_text())
    found = parameters(tmp_path / "new")
    same(found, in_bits(before, 6, found, of_heads=6))
    assert packed_of_heads(before) == {n for n in found if n.endswith(".scales")}
    plain, _ = mlx_lm_utils.load_model(tmp_path / "new")
    drafted = text(mlx_mtp.load_model(tmp_path / "new"), 2)
    assert drafted == tiny.greedy(plain, PROMPT, 5, drafted)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_target_with_nan_is_refused(checkpoints, tmp_path, bits):
    """A tensor with NaN is neither copied nor quantized, and no files are left."""
    path, weights, _ = checkpoints("glm4_moe")
    name = "model.layers.1.self_attn.q_proj.weight"
    w = mx.where(mx.arange(weights[name].shape[1]) == 7, mx.nan, weights[name])
    source = tiny.save(tmp_path / "source", json.loads((path / "config.json").read_text()), weights | {name: w})
    options = {} if bits is None else {"quantize": True, **G32}
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight holds NaN, expected"):
        convert(source, tmp_path / "new", **options)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("bad", ["NaN", "only zeros"])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_head_that_was_never_trained_is_refused(checkpoints, tmp_path, bad, bits):
    """It is refused before quantization, which would hide zeros, and no files are left."""
    path, weights, _ = checkpoints("glm4_moe")
    name = "model.layers.3.self_attn.q_proj.weight"
    w = weights[name] * 0 if bad != "NaN" else mx.where(mx.arange(weights[name].shape[1]) == 7, mx.nan, weights[name])
    source = tiny.save(tmp_path / "source", json.loads((path / "config.json").read_text()), weights | {name: w})
    for write in (
        lambda: convert(source, tmp_path / "new", mtp_q_bits=bits, mtp_q_group_size=bits and 32),
        lambda: extract_heads(source, tmp_path / "new.safetensors", mtp_q_bits=bits, mtp_q_group_size=bits and 32),
    ):
        with pytest.raises(ValueError, match=rf"source: tensor {name} holds {bad}, expected trained weights$"):
            write()
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
