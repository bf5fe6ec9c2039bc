"""Check the tables that compare the emulated traffic of our kernels with that of MLX's own."""

import command_line
from metal_cases import linux_only
from rich.table import Table
from sweep import sweep

from mlx_mtp.bench.stock_tables import TABLES

pytestmark = linux_only


def rows_of(table: Table) -> dict[tuple[str, ...], list[str]]:
    """Return a table's cells by its first two columns; only a kernel's first row has its name."""
    found, kernel = {}, ""
    for first, m, *cells in zip(*(column.cells for column in table.columns), strict=True):
        kernel = first or kernel
        found[kernel, m] = cells
    return found


def test_a_matrix_is_requested_once_and_x_a_quarter_as_often_as_by_mlx():
    rows = rows_of(TABLES["verify_qmm"](2))
    assert rows["MLX qmv_fast", "1"][:3] == ["1.00x", "4.00x", "16.00x"]
    ours = {"verify_qmm", "verify_glu", "verify_gemv", "verify_qmm_mma"}
    stock = {f"MLX {name}" for name in ("qmv_fast", "qmv", "qmv_wide", "gather_qmv", "sdpa_vector")}
    assert rows.keys() == {(kernel, m) for kernel in ours | stock for m in ("1", "2")}
    for m in ("1", "2"):
        quarter = float(rows["MLX qmv_wide", m][2][:-1]) / 4 + 0.005  # printed with two digits
        for kernel in ours:
            weights, _, x, *_ = rows[kernel, m]
            assert weights == "1.00x"
            assert float(x[:-1]) <= quarter


def test_the_command_prints_the_table_of_an_op_up_to_its_rows():
    done = command_line.call("bench", "kernels", "--emulate", "--op", "verify_qmm", "--rows", 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "MLX qmv_wide" in line]
    assert len(lines) == 1
    assert " ms" not in done.stdout


@sweep
def test_keys_and_values_are_requested_once_for_all_queries_and_heads():
    table = TABLES["verify_attention"](8)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    ours = [row for row in rows if row[0] == "verify_attention"]
    assert {(q, group) for _, q, group, *_ in ours} >= {("1", "4"), ("8", "12")}
    assert all(keys == values == "1.00x" for _, _, _, keys, values, _ in ours)
    stock = {(q, group): keys for name, q, group, keys, *_ in rows if name == "MLX sdpa_vector"}
    assert stock["1", "4"] == "4.00x"
    assert float(stock["2", "12"][:-1]) > 23
    assert stock["8", "12"] == "not fused"


@sweep
def test_experts_are_requested_once_and_no_logits_are_written():
    experts, heads = rows_of(TABLES["verify_moe"](8)), rows_of(TABLES["verify_head"](8))
    assert {cells[2] for (name, _), cells in experts.items() if name == "verify_moe"} == {"1.00x"}
    assert float(experts["MLX gather_qmv", "8"][2][:-1]) > 2
    written = {name: int(cells[1]) for (name, m), cells in heads.items() if m == "8"}
    assert written["MLX qmv_wide + argmax"] >= 8 * 1024 * 2
    assert written["verify_head"] < written["MLX qmv_wide + argmax"] / 20
