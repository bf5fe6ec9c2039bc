"""Check `bench kernels`: every op has cases, stock is timed in turn with ours, traffic is the emulator's count."""

import json
from itertools import pairwise

import command_line
import mlx.core as mx
import pytest
from metal_cases import linux_only
from product_clock import ProductClock
from sweep import sampled

from mlx_mtp import kernels as bindings
from mlx_mtp.bench import kernels, timing
from mlx_mtp.bench.kernels import OPS, compared, speed_table, speedup, stock_traffic, traffic, traffic_table
from mlx_mtp.bench.kernels_cases import CASES, SMALL, block_glu
from mlx_mtp.layers.experts import Mixture
from mlx_mtp.layers.lm_head import OwnHead
from mlx_mtp.layers.mla import OwnPerHead
from mlx_mtp.layers.products import OwnGLU, OwnStack
from mlx_mtp.tuning.ab_test import KernelTrial


def test_every_op_with_a_site_has_cases():
    assert set(SMALL) == set(OPS) == {op for op, _ in CASES.values()}
    public = {name for name in bindings.__all__ if name.islower() and name + "_ref" in bindings.__all__}
    parts = {
        "delta_inputs",
        "gated_norm",
        "verify_head_draw",
        "verify_head_top",
    }  # further launches of an op, or variants
    parts |= {"change_logits", "choose_rows"}  # without a site
    matrices = {op for op in OPS if op.startswith("matrix_")}  # their references are those of the exact lane
    assert public - parts == set(OPS) - matrices
    assert matrices == {"matrix_qmm", "matrix_glu", "matrix_gemv", "matrix_heads", "matrix_head"}


def test_sites_of_block_formats_have_cases():
    """`doctor` and `bench kernels` then check and time them on a GPU."""
    found = {}
    for name, (op, make) in CASES.items():
        if name.endswith(("IQ4_XS", "IQ4_NL", "Q6_K")):
            site = make()
            assert site.op == op
            assert name.rpartition(" ")[2].lower() in site.shape
            found[op] = type(site)
    assert found == {
        "verify_moe": Mixture,
        "verify_qmm": OwnStack,
        "verify_glu": OwnGLU,
        "verify_qmm_heads": OwnPerHead,
        "verify_head": OwnHead,
    }
    site = block_glu("q6_k", 64, 256)
    (y,) = site.stock(mx.random.normal((4, 256)))
    assert 0.1 < mx.abs(y).mean() < 1  # outputs like those of a layer


def by_rows(op: str, rows: int) -> dict[tuple[str, int], dict]:
    return {(line["op"], line["rows"]): line for line in (*traffic(op, rows), *stock_traffic(op, rows))}


@linux_only
@pytest.mark.parametrize(
    ("op", "stock"),
    sampled(
        [("verify_qmm", "qmv_wide")],
        [
            *((op, name) for op in ("verify_qmm", "verify_glu") for name in ("qmv_fast", "qmv_wide")),
            *(("verify_gemv", "gemv"), ("verify_head", "qmv_wide")),
            *(("verify_moe", "gather_qmv"), ("verify_attention", "sdpa_vector")),
        ],
    ),
)
def test_more_rows_request_less_than_of_mlx(op, stock):
    """Weights, keys and values are requested once by ours, and by MLX again for further rows or query heads."""
    lines = by_rows(op, 8)
    assert {name for name, _ in lines} >= {op, f"MLX {stock}"}
    assert lines[op, 4]["reread"] == 1.0 < lines[f"MLX {stock}", 8]["reread"]
    assert all(lines[op, m]["requested"] < lines[f"MLX {stock}", m]["requested"] for m in (2, 4, 8))
    if op == "verify_head":  # no logits are written
        assert lines[op, 8]["written"] < lines["MLX qmv_wide", 8]["written"] / 20 == 8 * 1024 * 2 / 20


@linux_only
def test_the_command_prints_mlx_below_an_op_up_to_its_rows():
    done = command_line.call("bench", "kernels", "--emulate", "--op", "verify_qmm", "--rows", 2)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "MLX qmv_wide" in line and " 2 " in line]
    assert " ms" not in done.stdout
    assert not [*stock_traffic(None, 2)]


@pytest.mark.parametrize("op", OPS)
def test_a_small_case_launches_its_op_and_is_correct(op):
    site = SMALL[op]()
    assert site.op == op
    rows = max(site.candidates)
    x = mx.random.normal((rows, site.width), mx.bfloat16)
    for ours, stock in zip(site.ours(x), site.stock(x), strict=True):
        assert ours.shape == stock.shape
        error = mx.abs(ours.astype(mx.float32) - stock.astype(mx.float32)).max()
        assert error <= 0.1 * mx.abs(stock.astype(mx.float32)).max()


def work(times: int, clock: ProductClock | None = None):
    w = mx.random.normal((512, 512)) / 32

    def op(x):
        for _ in range(times):
            x = x @ w
        if clock:
            clock.built += times
        return [x]

    return op


def trial(ours, stock, rows: int = 2) -> KernelTrial:
    return KernelTrial("op", "shape", rows, [(ours, stock)] * 2, 512, mx.float32)


@pytest.mark.parametrize(("ours", "stock"), [(1, 6), (6, 1), (2, 2)])
def test_a_speedup_is_the_ratio_of_the_computed_seconds(monkeypatch, ours, stock):
    clock = ProductClock(monkeypatch, timing)
    found = compared("case", trial(work(ours, clock), work(stock, clock)), 3)
    assert found["seconds"] == {"ours": [ours] * 3, "stock": [stock] * 3}
    assert speedup(found).median == stock / ours


@pytest.mark.timing
def test_faster_and_slower_kernels_are_measured_as_such():
    for ours, stock, low, high in ((work(1), work(6), 3, 12), (work(6), work(1), 1 / 12, 1 / 3)):
        assert low < speedup(compared("case", trial(ours, stock), 3)).median < high


def test_a_wrong_kernel_is_wrong_at_any_speed():
    found = compared("case", trial(lambda x: [x], work(1)), 1)
    assert "differs from one row alone" in found["wrong"]
    assert "WRONG" in cells(speed_table([found]))
    assert found["seconds"]["ours"]


def test_a_kernel_that_fails_has_no_times():
    def failing(x):
        raise RuntimeError("no such buffer")

    found = compared("case", trial(failing, work(1)), 1)
    assert found["seconds"] == {}
    assert "fails with RuntimeError: no such buffer" in found["wrong"]
    assert "WRONG" in cells(speed_table([found]))


def cells(table) -> list[str]:
    return [str(cell) for column in table.columns for cell in column.cells]


def test_a_table_has_a_line_per_case_and_a_column_per_number_of_rows():
    fast, slow = {"ours": [1.0] * 3, "stock": [2.0] * 3}, {"ours": [1.0] * 3, "stock": [0.5, 0.4, 0.6]}
    names = "name", "op", "shape", "rows", "wrong", "seconds"
    lines = ("a", "op", "s", 2, None, fast), ("b", "op", "s", 2, None, slow), ("b", "op", "s", 4, None, fast)
    found = [dict(zip(names, line, strict=True)) for line in lines]
    columns = [list(column.cells) for column in speed_table(found).columns]
    assert columns == [["op", "op"], ["a", "b"], ["2.00", "0.50 inconclusive"], ["", "2.00"]]


def test_all_cases_of_one_op_are_tried(monkeypatch):
    seen = []
    monkeypatch.setattr(
        kernels, "compared", lambda name, trial, *_: seen.append((name, trial.op, trial.rows, len(trial.pairs)))
    )
    monkeypatch.setattr(kernels, "CASES", dict.fromkeys(("a", "b"), ("add_norm", SMALL["add_norm"])))
    assert len(list(kernels.timed("add_norm", 2, 1))) == 4
    assert seen == [(name, "add_norm", rows, 4) for name in ("a", "b") for rows in (1, 2)]
    assert not list(kernels.timed("norm_rope", 2, 1))


@linux_only
def test_traffic_is_that_of_one_call():
    found = list(traffic("add_norm", 2))
    row = 512 * 2  # bytes of a row
    assert [(a["rows"], a["launches"], a["written"]) for a in found] == [(1, 1, 2 * row), (2, 1, 4 * row)]
    assert all(a["reread"] == 1 and a["requested"] >= 3 * row for a in found)
    with pytest.raises(ValueError, match="rows=1: verify_gemv needs at least 2 rows"):
        list(traffic("verify_gemv", 1))


@linux_only
def test_a_matrix_is_read_once_for_all_rows():
    found = list(traffic("verify_qmm", 4))
    assert [(a["rows"], a["largest"], a["reread"]) for a in found] == [(m, "w", 1.0) for m in (2, 3, 4)]
    assert all(a["requested"] <= b["requested"] for a, b in pairwise(found))


def test_the_tables_show_each_op_once():
    names = "op", "rows", "launches", "requested", "written", "largest", "reread"
    lines = ("a", 1, 1, 1024, 2048, "w", 1.0), ("a", 2, 1, 1024, 2048, "w", 2.0), ("b", 1, 3, 1536, 0, "x", 1.5)
    found = [dict(zip(names, line, strict=True)) for line in lines]
    columns = [list(column.cells) for column in traffic_table(found).columns]
    assert columns[0] == ["a", "", "b"]
    assert columns[3] == ["1.0", "1.0", "1.5"]
    assert columns[-1] == ["1.00x", "2.00x", "1.50x"]


# The command


@pytest.mark.skipif(mx.metal.is_available(), reason="off Metal")
def test_without_metal_the_error_names_the_flag_that_works():
    done = command_line.call("bench", "kernels", "--op", "add_norm")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs" in done.stderr or "need a Metal GPU" in done.stderr
    assert "--emulate" in done.stderr


def test_an_unknown_op_is_refused_with_the_known_ones():
    done = command_line.call("bench", "kernels", "--emulate", "--op", "verify_nothing")
    assert done.returncode == 2
    assert all(op in done.stderr for op in OPS)


@linux_only
def test_the_emulated_command_writes_its_result(tmp_path):
    done = command_line.call(
        "bench", "kernels", "--emulate", "--op", "add_norm", "--rows", 2, "--out", tmp_path / "k.json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "k.json").read_text())
    assert [line["rows"] for line in found["found"]] == [1, 2]
    assert "counts, not times" in done.stdout
