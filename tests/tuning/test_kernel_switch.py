"""Check which modules kernels replace, their memory and launches, and that a wrong kernel stays off."""

import json
import re
import shutil
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from exact import draw, one_row
from metal_cases import linux_only
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v3
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from quantized_models import STEP, quantized
from recorded_graphs import recorded
from stock_ops import stock_ops
from sweep import sampled

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.kinds import make_cache
from mlx_mtp.kernels import _source
from mlx_mtp.layers.products import GLU, Dense, Stack, VerifyRouter
from mlx_mtp.tuning import ab_test, kernel_switch
from mlx_mtp.tuning.kernel_trials import KernelVerdict

pytestmark = linux_only
CONFIG = {**tiny.CONFIG, **STEP, "quantization": {"group_size": 32, "bits": 4}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("step"), CONFIG, quantized(tiny.random_weights(CONFIG)))


def load(checkpoint):
    model = mlx_mtp.load_model(checkpoint, lazy=True, kernels="off")
    mx.eval(model.parameters())
    return model


@pytest.fixture
def only_products(monkeypatch):
    """Restrict sites to products; other trials have their own tests and are slow in the emulator."""
    place = kernel_switch.place
    monkeypatch.setattr(
        kernel_switch,
        "place",
        lambda model, **lane: [s for s in place(model, **lane) if isinstance(s, Stack | GLU | Dense)],
    )


def test_without_metal_nothing_changes(checkpoint):
    model = mlx_mtp.load_model(checkpoint, lazy=True, kernels="exact")
    assert not [m for m in model.modules() if hasattr(m, "site") or hasattr(m, "glu")]
    assert (model.report.kernels, model.report.not_exact) == (("none: no Metal GPU",), ())


def test_which_modules_get_sites(checkpoint):
    model = load(checkpoint)
    before = {name: a.shape for name, a in tree_flatten(model.parameters())}
    bits = {name: np.array(a.view(mx.uint8)) for name, a in tree_flatten(model.parameters())}
    found = Counter(site.op for site in kernel_switch.place(model))
    assert {op: found[op] for op in ("verify_qmm", "verify_glu", "verify_moe")} == {
        "verify_qmm": 4 * 4 + 3 + 1 + 3 * 6,
        "verify_glu": 4 + 3,
        "verify_moe": 3,
    }
    assert {name: a.shape for name, a in tree_flatten(model.parameters())} == before
    for name, array in tree_flatten(model.parameters()):
        assert np.array_equal(np.array(array.view(mx.uint8)), bits[name])
    attention = model.layers[1].self_attn
    assert attention.q_proj.site is attention.g_proj.site
    assert attention.q_proj.site.weights.ends == (192, 256, 320, 326)
    assert isinstance(model.layers[0].mlp, type(load(checkpoint).layers[0].mlp))
    assert model.layers[3].mlp.share_expert.glu.limit == 0.5
    assert model.layers[0].mlp.glu.limit is None


def test_adapters_around_swapped_modules(checkpoint):
    """mlx-lm adds adapters to a loaded model; no kernel then computes the product that they replace."""
    model, x = load(checkpoint), mx.random.normal((1, 3, 64)).astype(mx.bfloat16)
    found, mlp = kernel_switch.place(model), model.layers[0].mlp
    assert "adapters" not in kernel_switch.others_not_exact(model)
    linear_to_lora_layers(model, 4, {"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": ["mlp.gate_proj"]})
    lora = mlp.gate_proj
    lora.lora_b = mx.random.normal(lora.lora_b.shape)
    want = mlp(x)
    for site in found:
        site.rows = frozenset({3})
    with emulator.emulated() as launches:
        assert mx.allclose(mlp(x), want, atol=0.05 * mx.abs(want).max().item())
    assert {launch.kernel for launch in launches} == {"verify_qmm"}
    assert "adapters" in kernel_switch.others_not_exact(model)


def test_launches_per_layer(checkpoint, on_paper):
    """Count launches in recorded graphs of attention projections and MLPs."""
    model, x = load(checkpoint), mx.zeros((1, 4, 64), mx.bfloat16)
    attention, dense, shared = model.layers[1].self_attn, model.layers[0].mlp, model.layers[3].mlp.share_expert

    def projections(x):
        q, k, v, g = (getattr(attention, f"{name}_proj")(x) for name in "qkvg")
        return attention.o_proj(q), k, v, g

    def counts():
        return [dict(recorded(f, x)) for f in (projections, dense, shared)]

    assert counts() == [
        {"QuantizedMatmul": 5},
        {"QuantizedMatmul": 3, "Sigmoid": 1, "Multiply": 2},
        {"QuantizedMatmul": 3, "Sigmoid": 1, "Multiply": 2, "Maximum": 1, "Minimum": 2},
    ]
    for site in kernel_switch.place(model):
        site.rows = frozenset(site.candidates)
    assert counts() == [{"CustomKernel": 2}, {"CustomKernel": 2}, {"CustomKernel": 2}]


def test_routers_use_the_kernels_product():
    config = {"n_routed_experts": 8, "hidden_size": 64, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    defaults = {"vocab_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1, "model_type": "deepseek_v3"}
    gate = deepseek_v3.MoEGate(deepseek_v3.ModelArgs.from_dict(config | defaults))
    gate.weight, x = mx.random.normal((8, 64)), mx.random.normal((1, 5, 64))
    want = gate(x)
    gate.site = Dense(gate)
    gate.__class__ = type("MoEGate", (VerifyRouter, deepseek_v3.MoEGate), {})
    gate.site.rows = frozenset({5})
    with emulator.emulated() as launches:
        chosen, weights = gate(x)
    assert [launch.kernel for launch in launches] == ["verify_gemv"]
    assert mx.array_equal(chosen, want[0])
    assert mx.allclose(weights, want[1], atol=1e-5)


def broken(monkeypatch, tmp_path, file: str, right: str, wrong: str) -> None:
    """Replace the kernels' sources by a copy with one mistake."""
    directory = tmp_path / "kernels"
    shutil.copytree(_source.DIRECTORY, directory)
    text = (directory / file).read_text()
    assert text.count(right) == 1
    (directory / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(_source, "DIRECTORY", directory)


BOTH = {"verify_qmm", "verify_glu"}


ROUNDED = ("T open = gate * rate;", "T open = T(float(gate) / (1 + exp(-float(gate))));")
MISTAKES = {
    "scale": (BOTH, "quantized.h", "float(from[r / EACH].scales[group])", "float(from[r / EACH].scales[group ^ 1])"),
    "drift": (BOTH, "quantized.h", "sum += chunk;", "sum = chunk + sum * 1.0001f;"),
    "a constant": ({"verify_qmm"}, "verify_qmm.metal", "= static_cast<T>(sum)", "= static_cast<T>(sum + 1e-3f)"),
    "rounding": ({"verify_glu"}, "activations.h", *ROUNDED),
    "one row for all": ({"verify_glu"}, "verify_glu.metal", "result[m][PAIRS + r]", "result[0][PAIRS + r]"),
    "a row not written": ({"verify_qmm"}, "verify_qmm.metal", "first + m >= own", "first + m >= own + 1"),
}


@pytest.mark.parametrize("mistake", sampled(["a row not written"], MISTAKES))
def test_a_wrong_kernel_is_off_although_requested(
    checkpoint, monkeypatch, only_products, tmp_path, mistake, quick_trials
):
    (ops, file, right, wrong), rows = MISTAKES[mistake], sampled([3], [3, 7])
    for kind in (Stack, GLU):
        monkeypatch.setattr(kind, "candidates", rows)
    broken(monkeypatch, tmp_path, file, right, wrong)
    model = load(checkpoint)
    for layers in (model.layers, model.mtp):
        del layers[1:]
    options = emulator.Options(traffic=False, allow={"unwritten"})
    with emulator.emulated(options), stock_ops(), pytest.warns(UserWarning, match="stays off") as warned:
        kernels, not_exact = kernel_switch.switch_on(model, "exact")
    named = {re.match(r"kernel (\w+) is wrong with mlx [\d.]+ and stays off", str(w.message))[1] for w in warned}
    assert named == ops
    for line in kernels:
        op = line.partition(" ")[0]
        assert (op in ops) == all(f"M={m} off" in line for m in rows), line
    assert ("verify_qmm" in ops) == any("layers' verify_qmm at M=2, 3, 4, 5, 6, 7, 8" in line for line in not_exact)


def test_rows_of_a_glu_kernel_are_exact_without_the_kernel_of_its_stack(checkpoint):
    model = load(checkpoint)
    found = kernel_switch.place(model)
    for site in found:
        site.rows = frozenset(site.candidates)
    mlp = model.layers[0].mlp
    mlp.gate_proj.site.rows = frozenset({2, 3})
    assert kernel_switch.rows_not_exact(found) == ()
    mlp.glu.rows = frozenset({2, 4, 5, 6})
    assert kernel_switch.rows_not_exact(found) == ("1 layers' verify_qmm at M=7, 8",)


def test_slower_kernels_are_off_and_listed(checkpoint, monkeypatch, only_products, own_cache):
    """With injected timings: a load decides up to four rows, the others later, and the next load repeats nothing."""
    monkeypatch.setattr("mlx_mtp.tuning.kernel_trials.check", lambda trial: None)
    decide, timed = kernel_switch.decide, []

    def timer(trial):
        timed.append((*trial.key, bool(trial.split)))
        return 1.5 if trial.rows <= 4 else 0.9

    monkeypatch.setattr(
        kernel_switch, "decide", lambda trials, **more: decide(trials, **more, timer=timer, budget=1e9)
    )
    reports, before = [], []
    for _ in range(2):
        model = load(checkpoint)
        for layers in (model.layers, model.mtp):
            del layers[1:]
        with emulator.emulated(emulator.Options(traffic=False)), stock_ops():
            before.append(kernel_switch.switch_on(model, None))
            model.runtime.trials.try_rest(lambda: False)
            reports.append(model.runtime.trials.apply())
        assert model.lm_head.site.rows == {2, 3, 4}
        assert model.layers[0].self_attn.q_proj.site.rows == {1, 2, 3, 4}
    assert reports[0] == reports[1] == before[1] != before[0]
    assert len(timed) == len(set(timed))
    later = [rows > 4 for *_, rows, _ in timed]
    assert later == sorted(later)  # those of the first cycles come first
    (of_heads,) = {shape for _, shape, rows, _ in timed if rows == 8 and shape.startswith("5x64")}
    lines = [next(line for line in found[0] if of_heads in line) for found in (before[0], reports[0])]
    assert lines[0] == f"verify_qmm {of_heads}: M=2-4 on (1.50x), M=5-8 off (not tried yet)"
    assert lines[1] == f"verify_qmm {of_heads}: M=2-4 on (1.50x), M=5-8 MLX's own (faster)"
    assert reports[0][1] == ("11 layers' verify_qmm at M=5, 6, 7, 8",)
    (file,) = own_cache.glob("*.json")
    found = json.loads(file.read_text())["found"]
    assert sum(ratio is not None for *_, ratio, _ in found) == len({tuple(key) for *key, _ in timed}) < len(found)


def test_lazy_weights_are_not_read_for_a_trial(checkpoint):
    model = load(checkpoint)
    with emulator.emulated() as launches:
        kernels, not_exact = kernel_switch.switch_on(model, None, lazy=True)
    assert kernels == ("none: a trial would read all of the lazy weights",)
    assert not_exact == ("all products", "attention")
    assert not launches


def test_formats_without_a_kernel_are_named(checkpoint):
    model = load(checkpoint)
    one_bit = nn.QuantizedLinear(64, 8, bias=False, group_size=32, bits=4)
    one_bit.bits = 1
    model.lm_head = one_bit
    scaled = model.layers[0].self_attn.o_proj
    scaled.global_scale = mx.array([1.0])
    kernel_switch.place(model)
    assert type(one_bit) is type(scaled) is nn.QuantizedLinear
    assert kernel_switch.others_not_exact(model) == ("products in a format without a kernel",)
    model.layers[3].mlp.switch_mlp.up_proj = SwitchLinear(64, 32, 4)
    assert kernel_switch.others_not_exact(model)[-1] == "unquantized experts"


def test_the_check_of_a_load_finds_another_order_of_sums(monkeypatch):
    """As if a new MLX sums in another order."""
    x, weights = draw("affine", 4, 32, (8, 320), 3, mx.float32)
    with emulator.emulated():
        module = nn.QuantizedLinear(320, 8, bias=False, group_size=32, bits=4)
        module.weight, module.scales, module.biases = weights.w, weights.scales, weights.biases
        site = Stack([module])
        same, other = (site.ours, lambda x: [one_row(x, weights)]), (site.ours, site.stock)
        assert ab_test.check(ab_test.KernelTrial("verify_qmm", "8x320", 3, [same], 320, x.dtype)) is None
        wrong = ab_test.check(ab_test.KernelTrial("verify_qmm", "8x320", 3, [other], 320, x.dtype))
        assert "differs from one row alone" in wrong


def test_kernels_of_other_cache_formats_are_tried_once_one_is_used(checkpoint, monkeypatch):
    monkeypatch.setattr(kernel_switch, "decide", lambda trials, **_: {})

    def needed(trials):
        return {
            trial.op.partition("verify_attention")[2] for trial in trials.needed() if "verify_attention" in trial.op
        }

    model = load(checkpoint)
    trials = kernel_switch.ModelTrials(model, kernel_switch.place(model), {8})
    assert needed(trials) == {"", " of 8-bit caches"}
    assert needed(kernel_switch.ModelTrials(model, trials.sites)) == {"", " of 8-bit caches"}
    model.layers[0].self_attn.attention.of(make_cache(None, bits=4, group_size=32))
    assert needed(trials) == {"", " of 8-bit caches", " of 4-bit caches"}
    assert trials.has_untried(trials.needed())


MATRIX_OPS = {"matrix_qmm", "matrix_glu", "matrix_head"}


@pytest.mark.parametrize("lane", [None, "exact", "matrix"])
def test_dense_products_are_those_of_the_lane(checkpoint, monkeypatch, lane):
    """Experts have the kernels of the exact lane in both."""
    decided = []

    def decide(trials, *, lane, **_):
        decided.append((lane, {trial.op for trial in trials}))
        return {trial.key: KernelVerdict(True, True, reason="asked for") for trial in trials}

    monkeypatch.setattr(kernel_switch, "decide", decide)
    model = load(checkpoint)
    with emulator.emulated():
        kernel_switch.switch_on(model, lane)
    assert {asked for asked, _ in decided} == {lane}
    ops = set().union(*(found for _, found in decided))
    assert {op for op in ops if op.startswith("matrix_")} == (MATRIX_OPS if lane == "matrix" else set())
    assert {"verify_qmm", "verify_glu", "verify_head"} & ops == (
        set() if lane == "matrix" else {"verify_qmm", "verify_glu", "verify_head"}
    )
    assert "verify_moe" in ops
    assert model.runtime.lane == ("matrix" if lane == "matrix" else "exact")


@pytest.mark.parametrize("lane", ["exact", "matrix"])
def test_row_counts_of_batches_are_tried_on_request(checkpoint, monkeypatch, lane):
    """A load neither tries nor compiles these kernels."""
    decided = []

    def decide(trials, *, lane, remembered):
        decided.append((lane, {trial.rows for trial in trials}))
        return {trial.key: KernelVerdict(trial.rows != 9, True, reason="asked for") for trial in trials}

    monkeypatch.setattr(kernel_switch, "decide", decide)
    model = load(checkpoint)
    with emulator.emulated():
        kernel_switch.switch_on(model, lane)
    assert decided == [(lane, set(range(1, 9)))]
    attention, mlp, block = model.layers[0].self_attn, model.layers[0].mlp, model.layers[3].mlp
    sites = [attention.q_proj.site, mlp.glu, block.mixture, model.lm_head.choice, model.layers[0].middle]
    assert all(max(site.rows) == 8 for site in sites)
    kernel_switch.switch_on_for_batches(model)
    kernel_switch.switch_on_for_batches(model)
    assert decided[1:] == [(lane, set(range(9, 17)))]
    assert all(site.rows >= set(range(10, 17)) and 9 not in site.rows for site in sites)
    assert max(attention.attention.rows) == 16  # the drafts of one sequence may be more than seven
    assert any("M=9 off (asked for), M=10-16 on" in line for line in model.report.kernels)


def test_a_check_spoils_any_two_of_sixteen_rows_differently():
    for rows, draws in ((8, 6), (16, 8)):
        spoiled = [ab_test._spoiled(rows, draw) for draw in range(draws)]
        assert all(any(s[a] != s[b] for s in spoiled) for a in range(rows) for b in range(a))
        trial = ab_test.KernelTrial("op", "shape", rows, [(lambda x: [x], lambda x: [x])], 4, mx.float32)
        seeds = []
        object.__setattr__(trial, "x", lambda seed, seeds=seeds, rows=rows: seeds.append(seed) or mx.ones((rows, 4)))
        assert ab_test.check(trial) is None
        assert max(seeds) == draws - 1
