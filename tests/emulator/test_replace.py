"""Check the context manager that replaces Metal and the compile cache."""

import subprocess
import sys

import mlx.core as mx
import pytest
from metal_cases import launch, linux_only
from mlx_lm.models import gated_delta, ssm

from mlx_mtp import emulator
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


def test_the_command_line_starts_without_the_emulator():
    code = "import mlx_mtp.cli, sys; assert 'mlx_mtp.emulator' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
