"""Compare the floors of `bench model` with modules, caches and the draft loop, and with measured times."""

import importlib
import itertools
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import published
import pytest
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from sweep import sampled

from bench.cost_model import documents
from mlx_mtp import generate_step, load_model
from mlx_mtp.bench import random_model
from mlx_mtp.bench.roofline import chips, cost, models, ops, phases
from mlx_mtp.bench.roofline.cost import KERNELS
from mlx_mtp.bench.roofline.ops import OVERLAPS
from mlx_mtp.cache.make_cache import make_prompt_cache
from mlx_mtp.cache.recurrent import RecurrentCache
from mlx_mtp.demo import demo_path
from mlx_mtp.layers.mtp_head import MTPHead
from mlx_mtp.layers.port import Port

FITTED = chips.fitted_chips()
M3_ULTRA = FITTED["M3 Ultra"]
MODELS = st.sampled_from(sorted(models.MODELS))
CONTEXTS = st.integers(1, 200_000)
WHOLE = ("embed_tokens", "embeddings", "lm_head", "head")  # names of embeddings and LM heads


def build(name, heads=1):
    """Return the port of a family's tiny config; its weights are never computed."""
    config = FAMILIES[name].config
    port = importlib.import_module(f"mlx_mtp.models.{config['model_type']}")
    return port.Model(port.ModelArgs.from_dict(config), heads, port.Model.SPEC.resolve(()))


def matrices(module):
    """Return (shared, experts) bytes of arrays of at least two dimensions, without embeddings and LM heads."""
    arrays = [(path, a) for path, a in tree_flatten(module.parameters()) if a.ndim > 1]
    arrays = [(path, a) for path, a in arrays if not any(f".{name}." in f".{path}" for name in WHOLE)]
    experts = sum(a.nbytes for path, a in arrays if "switch_mlp" in path)
    return sum(a.nbytes for _, a in arrays) - experts, experts


def stored(layers):
    """Return the same bytes from operations, with all experts."""
    made = [(layer.count, op) for layer in layers for op in layer.ops]
    shared = sum(n * op.nbytes for n, op in made if isinstance(op, ops.LinearOp))
    return shared, sum(n * op.total * op.nbytes for n, op in made if isinstance(op, ops.ExpertsOp))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_a_port_is_read(name, quantized):
    model = build(name)
    if quantized:
        nn.quantize(
            model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
        )
    walked = models.of_port(model)
    real = [matrices(layer) for layer in model.layers]
    assert stored(walked.layers) == pytest.approx(tuple(map(sum, zip(*real, strict=True))))
    for depth, head in enumerate(model.mtp):
        assert stored([walked.drafts[depth].block]) == pytest.approx(matrices(head))
        assert walked.drafts[depth].lm_head.nbytes == pytest.approx(
            sum(a.nbytes for a in model.unembedding(depth).values())
        )
    assert walked.head.nbytes == pytest.approx(sum(a.nbytes for a in model.unembedding().values()))
    tops = {op.top for layer in walked.layers for op in layer.ops if isinstance(op, ops.ExpertsOp)}
    text = FAMILIES[name].config.get("text_config", FAMILIES[name].config)
    assert tops <= {text.get("num_experts_per_tok")}


@pytest.mark.parametrize("name", FAMILIES)
def test_caches_and_states_have_their_real_size(name):
    model = build(name)
    walked, caches = models.of_port(model), make_prompt_cache(model, num_draft_tokens=0).layers
    model.hidden(mx.array([[1, 2, 3]]), caches)
    of_token = [
        sum(part.nbytes // part.shape[2] for part in c.parts) for c in caches if not isinstance(c, RecurrentCache)
    ]
    states = sum(c.parts[1].nbytes for c in caches if isinstance(c, RecurrentCache))
    found = phases.pass_floor(walked, 1, 1, "independent")
    assert (found.cache, found.state) == (sum(of_token), 2 * states)
    windows = [w for w in model.windows() if w is not RecurrentCache]
    top, index = getattr(model.args, "index_topk", None), getattr(model.args, "index_head_dim", 0)
    for context in (7, 10**4):
        lengths = [min(context, window or top or context) for window in windows]
        expected = sum(length * size for length, size in zip(lengths, of_token, strict=True))
        if top:  # the indexer reads keys at every position
            indexers = sum("indexer" in layer.self_attn for layer in model.layers)
            expected += indexers * 4 * index * (context - min(context, top))
        assert phases.pass_floor(walked, 1, context, "independent").cache == expected


RELEASED = {
    "Step-3.5-Flash": "step-3.5-flash",
    "GLM-4.5": "glm-4.5-fp8",
    "Qwen3.6-27B": "qwen3.5-27b",
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "GLM-4.7-Flash": "glm-4.7-flash",
    "DeepSeek-V3": "deepseek-v3",
}


@pytest.mark.parametrize("name", sampled([*RELEASED][::2], RELEASED))
def test_released_models_match_their_config(name, tmp_path):
    """Layer by layer, except routers that mlx-lm keeps in 16 bits and gates of 1 row."""
    file = Path(published.__file__).parent / "fixtures" / f"{RELEASED[name]}.txt"
    line = next(x for x in file.read_text().splitlines() if x.startswith("config "))
    (tmp_path / "config.json").write_text(line.removeprefix("config "))
    shaped, _ = random_model.shaped_model(tmp_path / "config.json")
    built, known = models.of_port(shaped, 2), models.MODELS[name]
    for rows in (1, 2, 8):
        for part in ("experts", "cache", "state", "head"):
            pair = [getattr(phases.pass_floor(m, rows, 5000, "published"), part) for m in (built, known)]
            assert pair[0] == pytest.approx(pair[1], rel=1e-6)
    assert built.shared_bytes == pytest.approx(known.shared_bytes, rel=0.012)
    assert (len(built.drafts), built.recycled) == (len(known.drafts), known.recycled)
    for k in range(1, known.max_drafts + 1):
        totals = [phases.draft_floor(m, k, 5000, "published").total for m in (built, known)]
        assert totals[0] == pytest.approx(totals[1], rel=0.02)


DRAFTED = [("demo", 1), ("demo", 2), ("demo", 3), ("glm4_moe", 1), ("glm4_moe", 3)]


@pytest.mark.parametrize(("name", "k"), sampled([("demo", 3), ("glm4_moe", 3)], DRAFTED))
def test_heads_read_the_rows_of_the_loop(name, k, monkeypatch):
    model = load_model(demo_path(), lazy=True) if name == "demo" else build(name)
    read, drafted = [], []
    call_head, choose = MTPHead.__call__, Port.draft_logits

    def watched(self, embeddings, hidden, cache):
        read.append((next(i for i, head in enumerate(model.mtp) if head is self), hidden.shape[1]))
        return call_head(self, embeddings, hidden, cache)

    def noted(self, depth, output):
        drafted.append((depth, output.size // output.shape[-1]))
        return choose(self, depth, output)

    monkeypatch.setattr(MTPHead, "__call__", watched)
    monkeypatch.setattr(type(model), "draft_logits", noted)
    for _ in generate_step([1, 2, 3], model, max_tokens=12, num_draft_tokens=k, adaptive=False, prompt_lookup=False):
        pass
    walked = models.of_port(model)
    passes = walked.draft_passes(k)
    depths = [0] * k if walked.recycled else list(range(k))
    assert read[-k:] == [(depth, rows) for depth, (_, rows) in zip(depths, passes, strict=True)]
    assert drafted[-k:] == [(depth, 1) for depth in depths]


SMALL = ops.ModelOps(
    (
        ops.LayerOps(
            "glm experts",
            2,
            (ops.LinearOp("q", 10, 10), ops.ExpertsOp(10, 10, 8, 2), ops.AttentionOp(4, 2, 5, window=6)),
        ),
    ),
    ops.LinearOp("lm_head", 30, 10, bits=8, group=None),
    (
        ops.DraftHeadOps(
            ops.LayerOps("glm dense", 1, (ops.LinearOp("eh_proj", 10, 20), ops.StateOp(40))),
            ops.LinearOp("lm_head", 5, 10),
        ),
    ),
    recycled=True,
)


def test_floors_by_hand():
    one = 100 * 0.5625
    found = phases.pass_floor(SMALL, 3, 100, "independent")
    assert found.shared == 2 * one
    assert found.experts == pytest.approx(2 * 8 * (1 - 0.75**3) * 3 * one)
    assert (found.head, found.cache, found.state) == (300, 2 * 6 * 2 * 10 * 2, 0)
    drafts = phases.draft_floor(SMALL, 2, 100, "shared")
    assert drafts == phases.Bytes(shared=2 * 2 * one, head=2 * 50 * 0.5625, state=2 * 80)
    assert phases.cycle_floor(SMALL, 2, 100, "independent").total == pytest.approx(found.total + drafts.total)
    assert phases.draft_floor(SMALL, 0, 100, "shared") == phases.Bytes()
    with pytest.raises(ValueError, match="8 drafts; allowed are 0 to 7"):
        SMALL.draft_passes(8)


@settings(max_examples=50, deadline=None)
@given(MODELS, st.integers(1, 8), CONTEXTS)
def test_floors_grow_with_rows_and_shrink_with_overlap(name, rows, context):
    model = models.MODELS[name]
    floors = [phases.pass_floor(model, rows, context, o).total for o in OVERLAPS]
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(floors))
    plain = phases.pass_floor(model, 1, context, "independent").total
    assert floors[-1] == pytest.approx(plain)
    assert all(
        phases.pass_floor(model, rows + 1, context, o).total >= f for o, f in zip(OVERLAPS, floors, strict=True)
    )
    assert phases.pass_floor(model, 1, context, "published").total == pytest.approx(plain)


@settings(max_examples=50, deadline=None)
@given(MODELS, st.sampled_from(sorted(chips.CHIPS)), CONTEXTS, st.sampled_from((2, 4, 8)))
def test_nothing_is_predicted_below_its_floor(name, chip, context, rows):
    model, on = models.MODELS[name], FITTED[chip]
    floors = {
        (f["phase"], f["rows"], f["overlap"]): f["bytes"]["total"] for f in phases.floors(model, context, (rows,))
    }
    for line in phases.predicted(model, on, context, (rows,)):
        if line["side"] == "ours" or line["overlap"] == "independent":
            assert line["seconds"] >= floors[line["phase"], line["rows"], line["overlap"]] / on.bandwidth


@settings(max_examples=50, deadline=None)
@given(MODELS, CONTEXTS, st.sampled_from((2, 4, 8)))
def test_savings_of_kernels_are_the_difference_of_stock_and_ours(name, context, rows):
    model = models.MODELS[name]
    lines = {line["kernels"]: line for line in phases.kernels(model, M3_ULTRA, context, (rows,))}
    times = {
        p["side"]: p["seconds"]
        for p in phases.predicted(model, M3_ULTRA, context, (rows,))
        if (p["phase"], p["overlap"]) == ("verify", "published")
    }
    assert lines["all"]["stock"] == times["stock MLX"]
    assert lines["all"]["seconds"] == pytest.approx(times["stock MLX"] - times["ours"])
    alone = sum(lines[kind]["seconds"] for kind in KERNELS)
    assert alone == pytest.approx(lines["all"]["seconds"], abs=400 * M3_ULTRA.launch)  # several save them


def test_kernels_touch_only_what_they_replace():
    glm, qwen = (
        {line["kernels"]: line["seconds"] for line in phases.kernels(models.MODELS[name], M3_ULTRA, 4096, (4,))}
        for name in ("GLM-4.5", "Qwen3.6-27B")
    )
    assert glm["recurrence"] == 0 < qwen["recurrence"]
    assert qwen["experts"] == 0 < glm["experts"]
    assert min(glm["products"], qwen["products"], glm["attention"]) > 0
    head, at = models.MODELS["GLM-4.5"].head, cost.PassShape(4)
    stock, ours = (
        cost.seconds(cost.of_op(head, replace(at, on=on), M3_ULTRA), M3_ULTRA) for on in (frozenset(), {"head"})
    )
    assert glm["head"] == pytest.approx(stock - ours)
    assert stock > ours


def test_the_documents_and_their_limits():
    lines = documents.documents(FITTED)
    assert len(lines) == len(documents.published()) == 42
    for line, row in zip(lines, documents.published(), strict=True):
        assert line["cycle"] / line["plain"] == pytest.approx(row.cycle_cost_in_plain_steps, abs=0.011)
        assert line["plain"] > line["plain_floor"]
        assert line["cycle"] > line["cycle_floor"]["independent"] >= line["cycle_floor"]["published"]
        assert line["cycle_floor"]["published"] > line["cycle_floor"]["shared"] > line["plain_floor"]
        assert bool(line["predicted"]) == (row.machine == "Mac Studio")


@pytest.mark.parametrize(("weights", "bits", "head_bits", "k"), [("IQ4_XS", 4.25, 16, 1), ("Q4_K_S", 4.5, 4.5, 3)])
def test_a_documents_floor_by_hand(weights, bits, head_bits, k):
    """The engine drafts with one recycled head that has its own LM head; `head_bits` are those of its cache."""
    row = "Mac Studio", weights, 32768, k
    lines = documents.documents(FITTED)
    line = next(x for x in lines if (x["machine"], x["weights"], x["context"], x["drafts"]) == row)
    h, vocabulary, experts = 4096, 128896, 8 * 3 * 1280
    full, sliding = (2 * heads * 128 + 2 * 1024 + heads for heads in (64, 96))
    dense, sparse = 3 * 11264, 288 + experts + 3 * 1280
    read = h * (12 * full + 33 * sliding + 3 * dense + 42 * sparse + vocabulary)
    cache = 2 * 1024 * 2 * (12 * 32768 + 33 * 512)
    usable = 819e9 * M3_ULTRA.usable
    assert line["plain_floor"] == pytest.approx((read * bits / 8 + cache) / usable)
    head = h * (2 * h + sliding + dense + vocabulary) * bits / 8 + 2 * 1024 * 512 * head_bits / 8
    assert line["cycle_floor"]["shared"] == pytest.approx(line["plain_floor"] + k * head / usable)
    routed = (ops.distinct(288, 8, k + 1) / 8 - 1) * h * 42 * experts * bits / 8
    assert line["cycle_floor"]["independent"] == pytest.approx(line["plain_floor"] + (k * head + routed) / usable)
