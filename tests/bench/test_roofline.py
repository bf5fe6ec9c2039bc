"""Compare the roofline's bytes with real modules and its experts with an enumeration; check the validation's rows."""

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from launches import models as launched
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from sweep import sweep

from bench.cost_model import fit, validate
from bench.cost_model.published import read_rows, read_unused
from mlx_mtp.bench.roofline import chips, cost, models, ops, phases
from mlx_mtp.bench.roofline.chips import CHIPS
from mlx_mtp.bench.roofline.cost import PassShape
from mlx_mtp.layers.blocks import to_blocks

M3_ULTRA = CHIPS["M3 Ultra"]


@pytest.mark.parametrize(("total", "top", "rows"), [(5, 2, 2), (5, 2, 3), (6, 3, 2), (4, 1, 4), (3, 3, 2)])
def test_independent_experts_are_the_mean_of_all_choices(total, top, rows):
    choices = list(combinations(range(total), top))
    union = [len(set().union(*chosen)) for chosen in product(choices, repeat=rows)]
    assert ops.distinct(total, top, rows) == pytest.approx(np.mean(union))


def test_published_routing_matches_the_published_counts():
    assert ops.distinct(256, 8, 8, "published") == pytest.approx(39, abs=0.1)
    assert ops.distinct(64, 4, 2, "published") / 4 == pytest.approx(1.74, rel=0.05)  # GLM-4.7-Flash, not fitted
    assert ops.distinct(256, 8, 1, "published") == pytest.approx(8)
    assert ops.distinct(8, 4, 3, "published") == 4  # the pool has at least one token's experts
    assert all(ops.distinct(256, 8, m, "shared") == 8 for m in range(1, 9))


@pytest.mark.parametrize(("bits", "group"), [(2, 128), (4, 32), (4, 64), (8, 64), (3, 64)])
def test_bytes_of_a_linear_are_those_of_the_module(bits, group):
    made = nn.QuantizedLinear(256, 96, bias=False, group_size=group, bits=bits)
    made.set_dtype(mx.bfloat16)
    assert ops.LinearOp("", 96, 256, bits, group).nbytes == sum(x.nbytes for _, x in tree_flatten(made.parameters()))


def test_bytes_of_experts_are_those_of_the_modules():
    op, shapes = ops.ExpertsOp(128, 64, 6, 2), ((128, 64), (128, 64), (64, 128))
    made = [SwitchLinear(*shape, 6, bias=False).to_quantized(group_size=64, bits=4) for shape in shapes]
    for layer in made:
        layer.set_dtype(mx.bfloat16)
    assert op.total * op.nbytes == sum(x.nbytes for layer in made for _, x in tree_flatten(layer.parameters()))
    at = PassShape(3)
    assert cost.cost(op, at, M3_ULTRA).nbytes == 3 * op.top * op.nbytes
    visited = ops.distinct(6, 2, 3)
    assert cost.cost(op, replace(at, on=cost.ALL), M3_ULTRA).nbytes == pytest.approx(visited * op.nbytes)


@pytest.mark.parametrize("name", [name for name, form in phases.FORMATS.items() if form[2]])
def test_packed_formats_are_read_once_by_our_kernels_only(name):
    """The bytes are the module's; without a kernel a dequantization moves more."""
    made = to_blocks(nn.Linear(512, 96, bias=False), name)
    op, (bits, group, _) = models._linear("", made, 2), phases.FORMATS[name]
    assert op.packed
    assert ops.LinearOp("", 96, 512, bits, group, packed=True).nbytes == pytest.approx(op.nbytes)
    assert op.nbytes == pytest.approx(made.weight.nbytes + made.scales.nbytes)
    ours, eight, stock = (
        cost.cost(op, at, M3_ULTRA) for at in (PassShape(1, cost.ALL), PassShape(8, cost.ALL), PassShape(1))
    )
    assert ours.nbytes == eight.nbytes == op.nbytes < stock.nbytes
    assert ours.instructions < eight.instructions < 4 * ours.instructions
    experts = ops.ExpertsOp(512, 96, 6, 2, bits=bits, group=group, packed=True)
    visited = cost.cost(experts, PassShape(3, cost.ALL), M3_ULTRA)
    assert visited.nbytes == pytest.approx(ops.distinct(6, 2, 3) * experts.nbytes)


def test_formats_are_predicted_next_to_each_other():
    model = models.MODELS["Qwen3.6-27B"]
    lines = phases.formats(model, M3_ULTRA, 4096)
    assert {(line["format"], line["rows"]) for line in lines} == set(product(phases.FORMATS, (1, 2, 4, 8)))
    affine = [line["seconds"] for line in lines if line["format"] == "affine 4-bit g64"]
    at = [PassShape(m, cost.ALL, 4096, "published") for m in (1, 2, 4, 8)]
    assert affine == [
        cost.seconds(cost.of_model(model.with_fields(bits=4, group=64, packed=False), a, M3_ULTRA), M3_ULTRA)
        for a in at
    ]
    sizes = {line["format"]: line["bytes"] for line in lines}
    assert sizes["iq4_xs"] < sizes["iq4_nl"] < sizes["affine 6-bit g64"] < sizes["q6_k"]


WIDTH = launched.WIDTH
EXPERTS, FFN = models.moe(WIDTH, 64, 8, 2), models.mlp(WIDTH, 128)
LAYERS = {
    "step dense": (launched.step, 1, (*models.gqa(WIDTH, 4, 2, 32, gate=4), *FFN)),
    "step experts": (launched.step, 5, (*models.gqa(WIDTH, 4, 2, 32, gate=4), *EXPERTS)),
    "glm experts": (launched.glm, 4, (*models.gqa(WIDTH, 4, 2, 32), *EXPERTS)),
    "qwen delta": (launched.qwen, 1, (*models.delta(WIDTH, 2, 4, 32), *FFN)),
    "qwen attention": (launched.qwen, 3, (*models.gqa(WIDTH, 4, 2, 32, gate=128), *FFN)),
    "qwen attention experts": (launched.qwen_moe, 3, (*models.gqa(WIDTH, 4, 2, 32, gate=128), *EXPERTS)),
    "deepseek experts": (launched.deepseek, 4, (*models.mla(WIDTH, 4, 64, 64, 32, 32, 32), *EXPERTS)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_weights_of_the_ports(name):
    make, index, made = LAYERS[name]
    parameters = tree_flatten(make().layers[index].parameters())
    small = ("conv1d", "shared_expert_gate")
    real = sum(x.size for path, x in parameters if x.ndim > 1 and not any(part in path for part in small))
    products = [op for op in made if isinstance(op, ops.LinearOp | ops.ExpertsOp)]
    counted = sum(op.weights * getattr(op, "total", 1) for op in products)
    assert counted == real


# Sizes in GB; those from rounded sources have a larger tolerance.
SIZES = [
    ("Qwen3.6-35B-A3B", "routed_bytes", 0.57, 0.02),
    ("Qwen3.6-35B-A3B", "shared_bytes", 1.05, 0.06),
    ("Step-3.5-Flash", "routed_bytes", 3.0, 0.02),
    ("Step-3.5-Flash", "shared_bytes", 3.0, 0.18),  # "about 3"; 11 B active are 3.0 + 3.5 at 4.5 bits
    ("GLM-4.5", "routed_bytes", 9.5, 0.02),
    ("GLM-4.5", "shared_bytes", 8.6, 0.06),
    ("Qwen3.6-27B", "total_bytes", 15.2, 0.02),
    # Parameters by the models' cards, at 4.5 bits.
    ("Qwen3.6-35B-A3B", "total_bytes", 35 * 0.5625, 0.03),
    ("Step-3.5-Flash", "total_bytes", 196 * 0.5625, 0.03),
    ("GLM-4.5", "total_bytes", 355 * 0.5625, 0.03),
    ("DeepSeek-V3", "total_bytes", 671 * 0.5625, 0.03),
]


@pytest.mark.parametrize(("name", "size", "gb", "within"), SIZES)
def test_sizes_of_released_models(name, size, gb, within):
    assert getattr(models.MODELS[name], size) / 1e9 == pytest.approx(gb, rel=within)


# Shared and routed GB, total and chosen experts, and floors of T(2) and T(4), from hand calculations.
FLOORS = [
    (15.2, 0, 1, 1, 1.00, 1.00),
    (1.05, 0.57, 256, 8, 1.34, 1.99),
    (3.0, 3.0, 288, 8, 1.49, 2.42),
    (8.6, 9.5, 160, 8, 1.50, 2.42),
]


@pytest.mark.parametrize(("shared", "routed", "total", "top", "two", "four"), FLOORS)
def test_floors_against_hand_calculations(shared, routed, total, top, two, four):
    floors = [(shared + routed * ops.distinct(total, top, m) / top) / (shared + routed) for m in (2, 4)]
    assert floors == pytest.approx([two, four], abs=0.006)


def test_cache_bytes():
    keys = mx.zeros((2, 4, 100, 256), mx.bfloat16)  # K and V of Qwen3.6-27B's layer
    op = ops.AttentionOp(24, 4, 256)
    assert cost.cost(op, PassShape(1, context=100), M3_ULTRA).nbytes == keys.nbytes
    windowed = replace(op, window=10)
    assert cost.cost(windowed, PassShape(1, context=100), M3_ULTRA).nbytes == keys.nbytes / 10
    per_token = 16 * cost.cost(op, PassShape(1, context=1), M3_ULTRA).nbytes
    assert per_token == pytest.approx(65.5e3, rel=0.01)
    latent = cost.cost(ops.LatentOp(128, 512, 64, 128, 128), PassShape(1, cost.ALL, context=100), M3_ULTRA)
    assert latent.nbytes == 100 * (576 * 2 + 128 * cost.SCORES)


def requests(chip, m, ours=False, **more):
    on = cost.ALL if ours else frozenset()
    return cost.cost(ops.LinearOp("", 17408, 5120), PassShape(m, on, **more), CHIPS[chip]).requests


def test_requests_of_the_kernels_that_are_chosen():
    assert [requests("M4 Pro", m) for m in range(1, 9)] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert [requests("M4 Pro", m, mlx=0.31) for m in (1, 4, 8)] == [1, 4, 8]
    assert [requests("M2 Max", m) for m in (1, 5, 6, 8)] == [1, 5, 1, 1]  # padded tiles from 6 rows on
    assert [requests("M1 Ultra", m) for m in (1, 6, 8)] == [1, 6, 8]
    assert [requests("M1 Max", m, ours=True) for m in (1, 5, 8, 9)] == [1, 1, 1, 2]
    op, at = ops.AttentionOp(24, 4, 256), PassShape(5)
    assert cost.cost(op, at, M3_ULTRA).requests == 30
    assert cost.cost(op, at, M3_ULTRA).launches == 0
    assert cost.cost(op, PassShape(6), M3_ULTRA).launches == cost.UNFUSED_LAUNCHES
    assert cost.cost(op, replace(at, on=cost.ALL), M3_ULTRA).requests == 1


def test_launches_of_latent_attention_are_those_of_its_layer():
    op = ops.LatentOp(128, 512, 64, 128, 128)
    shapes = PassShape(1), PassShape(1, cost.ALL), PassShape(4, cost.ALL), PassShape(4)
    assert [cost.cost(op, at, M3_ULTRA).launches for at in shapes] == [0, 0, 0, cost.EXPANDED_LAUNCHES]


def test_a_launch_costs_what_was_measured_on_the_chip():
    measured = {"M3 Ultra": 5.5e-6, "M5 Max 40c": 2.75e-6}
    assert {name: CHIPS[name].launch for name in measured} == pytest.approx(measured)
    assert all(2.5e-6 <= chip.launch <= 9e-6 for chip in CHIPS.values())
    assert all(chip.independent == 1.2e-6 and chip.launch_source for chip in CHIPS.values())
    costs = cost.of_model(models.MODELS["Qwen3.6-35B-A3B"], PassShape(1), M3_ULTRA)
    assert 0.2 * costs.launches < costs.independent < 0.4 * costs.launches
    waiting = costs.launches - costs.independent
    assert costs.launch_seconds(M3_ULTRA) == pytest.approx(5.5e-6 * waiting + 1.2e-6 * costs.independent)


def test_more_rows_cost_more_and_ours_at_most_stock():
    fitted = chips.fitted_chips()
    for name in ("M2 Max", "M3 Ultra", "M5 Max 40c"):
        for model in models.MODELS.values():
            stock, free, near = validate.sides(model, fitted[name], 4096).values()
            for side in (free, near):
                assert sorted(side.values()) == list(side.values())
                assert all(side[m] <= stock[m] for m in range(1, 7))  # from 7 rows on M2's padded tiles may be ahead
            assert all(near[m] <= free[m] for m in near)


def test_seconds_of_one_operation_by_hand():
    chip = replace(M3_ULTRA, gbps=1000, tflops=2, launch=2e-6, usable=0.5, issue=0.25)  # 500 GB/s, 250 G/s
    costs = cost.of_op(ops.LinearOp("", 1000, 1000), PassShape(2), chip)
    memory, issue = 562500 / 500e9, 1e6 * (3 + 2 * 2.125) / 250e9
    assert cost.seconds(costs, chip) == pytest.approx(issue + memory / 3 + 2e-6)
    assert cost.seconds(costs, chip, "max") == pytest.approx(issue + 2e-6)


def test_launches_of_a_pass():
    model = ops.ModelOps((ops.LayerOps("glm dense", 3, models.mlp(64, 64)),), ops.LinearOp("", 64, 64))
    passes = PassShape(4), PassShape(1, cost.ALL), PassShape(4, cost.ALL)
    counts = [cost.of_model(model, at, M3_ULTRA).launches for at in passes]
    counted = cost.LAUNCHES["glm dense"]
    assert counts == [3 + 3 * n for n in (counted["none"][1], *counted["all"])]


@pytest.mark.parametrize("kind", cost.LAUNCHES)
def test_each_kind_of_kernels_was_counted_alone(kind):
    counts = cost.LAUNCHES[kind]
    assert counts.keys() == {"none", "all", *cost.KERNELS}
    for column, rows in enumerate((1, 4)):
        assert cost.launches(kind, cost.ALL, rows)[0] == counts["all"][column] < counts["none"][column]
        assert [cost.launches(kind, {name}, rows)[0] for name in cost.KERNELS] == [
            counts[name][column] for name in cost.KERNELS
        ]
    assert cost.launches(kind, (), 1).tolist() == [counts["none"][0], counts["none"][0] - cost.WAITS[kind]["none"][0]]


def test_the_counts_state_their_command():
    command = cost.FILE.read_text().splitlines()[0].removeprefix("# python -m ").split()
    assert (Path(__file__).parents[2] / command[0].replace(".", "/") / "__main__.py").is_file()
    assert Path(command[-1]).name == cost.FILE.name


def test_the_fit_uses_at_most_two_rows():
    rows = read_rows()
    before = fit.fit(rows)
    assert fit.fit([replace(row, ratio=9 * row.ratio) if row.m > 2 else row for row in rows]) == before
    assert fit.fit([replace(row, ratio=1.5 * row.ratio) if row.m == 2 else row for row in rows]) != before


def test_published_rows_are_complete():
    rows = read_rows()
    assert len({(row.source, row.m) for row in rows}) == len(rows)
    assert all(row.base <= 2 <= row.m <= 8 and row.m > row.base for row in rows)
    assert all((row.linear is not None) == (row.kind == "projection") for row in rows)
    assert sum(bool(row.reason) for row in rows) <= 1
    assert all(line["why"] for line in read_unused())


def test_the_package_contains_the_current_fit():
    now = json.loads(json.dumps(fit.stored(read_rows())))
    assert json.loads(chips.FILE.read_text(), parse_float=lambda x: pytest.approx(float(x), rel=1e-9)) == now


@sweep
def test_a_large_error_without_a_reason_fails(capsys):
    rows = read_rows()
    dense = ["--model", "Qwen3.6-27B"]
    assert validate.main(dense, rows) == 0
    assert "FAIL" not in capsys.readouterr().out
    at = next(i for i, row in enumerate(rows) if row.chip == "M3 Max 40c" and row.m == 8)
    for factor in (0.6, 1.6):
        changed = [*rows[:at], replace(rows[at], ratio=factor * rows[at].ratio), *rows[at + 1 :]]
        assert validate.main(dense, changed) == 1
        assert "FAIL" in capsys.readouterr().out
    rows[at] = replace(rows[at], ratio=1.6 * rows[at].ratio, reason="spread")
    assert validate.main(dense, rows) == 0
    assert "unexplained" in capsys.readouterr().out


@pytest.mark.parametrize(("args", "count"), [((), 9), (("--model", "Qwen3.6-27B", "--chip", "M3 Ultra"), 7)])
def test_every_printed_table_is_labelled(args, count, capsys):
    """Every table of predictions next to the published engine's is labelled as predicted."""
    assert validate.main(args, read_rows()) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [lines[i - 1] for i, line in enumerate(lines) if line.lstrip().startswith("┏")]
    assert len(titles) == count
    assert all("predicted" in title for title in titles if "floor" not in title)
    assert sum(line.startswith("predicted") for line in lines) >= 5


def test_the_errors_in_a_result_are_those_of_its_rows():
    found = chips.read_fitted()["validation"]
    errors = [abs(row["error"]) for row in found["rows"] if not row["fitted"]]
    assert found["errors"]["all"]["greatest"] == max(errors)
    assert min(row["m"] for row in found["rows"] if not row["fitted"]) == 3
