"""Check the context manager that replaces Metal, the compile cache and `mlx-mtp emulate`."""

import subprocess
import sys

import mlx.core as mx
import pytest
from click.testing import CliRunner
from metal_cases import launch, linux_only
from mlx_lm.models import gated_delta, ssm
from sweep import sweep

from mlx_mtp import emulator
from mlx_mtp.cli import main
from mlx_mtp.cli.emulate_tables import head_table
from mlx_mtp.emulator import compile as compiling

pytestmark = linux_only


def test_the_context_replaces_and_restores():
    before = mx.fast.metal_kernel, mx.metal.is_available, mx.default_device, vars(ssm)["_ssm_kernel"]
    with emulator.emulated() as launches:
        assert mx.fast.metal_kernel is emulator.metal_kernel
        assert mx.metal.is_available()
        assert mx.default_device() == mx.gpu
        assert isinstance(gated_delta._gated_delta_kernel, emulator.MetalKernel)
        assert isinstance(ssm._ssm_kernel, emulator.MetalKernel)
        launch("out[0] = 1;", out=(1,))
    assert [traffic.kernel for traffic in launches] == ["probe"]
    assert (mx.fast.metal_kernel, mx.metal.is_available, mx.default_device, ssm._ssm_kernel) == before
    launch("out[0] = 1;", out=(1,))
    assert len(launches) == 1


def test_the_context_restores_after_an_error():
    before = mx.fast.metal_kernel
    with pytest.raises(KeyError), emulator.emulated():
        raise KeyError
    assert mx.fast.metal_kernel is before


def test_options_of_the_context_are_the_default():
    body = "out[0] = thread_position_in_grid.x;"
    with emulator.emulated(emulator.Options(allow={"races"}, order="reverse")):
        assert launch(body, out=(1,), grid=8).item() == 0
    with pytest.raises(emulator.KernelFault, match="race"):
        launch(body, out=(1,), grid=8)


def test_inside_compile_the_error_names_the_remedy():
    kernel = emulator.metal_kernel("traced", ["a"], ["out"], "out[0] = a[0];")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}

    def f(x):
        return kernel(inputs=[x], **call)[0]

    with pytest.raises(ValueError, match="disable_compile"):
        mx.compile(f)(mx.zeros(1))
    with emulator.emulated():
        assert mx.compile(f)(mx.ones(1)).item() == 1


def test_compiled_kernels_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MTP_EMULATOR_CACHE", str(tmp_path))
    launch("out[0] = 0;", out=(1,))  # builds the runtime unless it is cached
    runs = []
    run = compiling._run
    monkeypatch.setattr(compiling, "_run", lambda command, what: (runs.append(what), run(command, what)))
    for body in ("out[0] = 1;", "out[0] = 1;", "out[0] = 2;"):
        launch(body, out=(1,))
    assert runs == ["kernel probe"] * 6  # preprocess, compile and link, twice
    launch("out[0] = 1;", out=(1,), options=emulator.Options(optimize=1))
    assert len(runs) == 9
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_the_choice_of_clang(monkeypatch):
    compiling.find_clang.cache_clear()
    monkeypatch.setenv("MLX_MTP_CLANG", sys.executable)
    with pytest.raises(ValueError, match="16 or newer"):
        compiling.find_clang()
    monkeypatch.delenv("MLX_MTP_CLANG")
    assert "clang version" in compiling.find_clang()[2]


def test_emulate_prints_the_table():
    result = CliRunner().invoke(main, ["emulate", "--stock", "--rows", "2"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    table = {(row[0] or None, row[1]): row[2:] for row in rows}
    assert table["MLX qmv_fast", "1"][:3] == ["1.00x", "4.00x", "16.00x"]
    assert table["MLX qmv_wide", "1"][0] == "1.00x"
    stock = {"MLX qmv_fast", "MLX qmv", "MLX qmv_wide", "MLX gather_qmv", "MLX sdpa_vector"}
    assert {name for name, _ in table if name} == stock
    assert " ms" not in result.output


def test_emulate_compares_our_kernels_with_mlx():
    result = CliRunner().invoke(main, ["emulate", "--of", "products", "--rows", "2"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    table, name = {}, ""
    for line in (line for line in result.output.splitlines() if "│" in line):
        kernel, _, weights, _, x, *_ = (cell.strip() for cell in line.split("│")[1:-1])
        name = kernel or name
        table.setdefault(name, []).append((float(weights[:-1]), float(x[:-1])))
    for kernel in ("verify_qmm", "verify_glu", "verify_gemv", "verify_qmm_mma"):
        assert [weights for weights, _ in table[kernel]] == [1.0, 1.0]
        quarters = [x / 4 + 0.005 for _, x in table["MLX qmv_wide"]]  # printed with two digits
        assert all(x <= quarter for (_, x), quarter in zip(table[kernel], quarters, strict=True))


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of each row; only a kernel's first row has its name."""
    found, kernel = [], ""
    result = CliRunner().invoke(main, ["emulate", f"--of={table}"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for line in (line for line in result.output.splitlines() if "│" in line):
        first, *cells = (cell.strip() for cell in line.split("│")[1:-1])
        kernel = first or kernel
        found.append([kernel, *cells])
    return found


@sweep
def test_keys_and_values_are_requested_once_for_all_queries_and_heads():
    rows = rows_of("attention")
    ours = [row for row in rows if row[0] == "verify_attention"]
    assert {(q, group) for _, q, group, *_ in ours} >= {("1", "4"), ("8", "12")}
    assert all(keys == values == "1.00x" for _, _, _, keys, values, _ in ours)
    stock = {(q, group): keys for name, q, group, keys, *_ in rows if name == "MLX sdpa_vector"}
    assert stock["1", "4"] == "4.00x"
    assert float(stock["2", "12"][:-1]) > 23
    assert stock["8", "12"] == "not fused"


@sweep
def test_experts_are_requested_once_and_no_logits_are_written():
    weights = {(name, m): again for name, m, _, _, again, _ in rows_of("experts")}
    assert {again for (name, _), again in weights.items() if name == "verify_moe"} == {"1.00x"}
    assert float(weights["MLX gather_qmv", "8"][:-1]) > 2
    columns = (column.cells for column in head_table(rows=(8,)).columns)
    heads = {name: int(written) for name, _, _, written, _ in zip(*columns, strict=True)}
    assert heads["MLX qmv_wide + argmax"] >= 8 * 1024 * 2
    assert heads["verify_head"] < heads["MLX qmv_wide + argmax"] / 20


def test_emulate_reports_invalid_arguments():
    result = CliRunner().invoke(main, ["emulate", "--stock", "--shape", "64", "100"])
    assert result.exit_code == 2
    assert "64" in result.output


def test_the_command_line_starts_without_the_emulator():
    code = "import mlx_mtp.cli, sys; assert 'mlx_mtp.emulator' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
