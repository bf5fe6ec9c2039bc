"""Check that the emulator generates MLX's signature, binds MLX's buffers and makes MLX's checks."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import launch, linux_only
from sweep import sampled

from mlx_mtp import emulator

pytestmark = linux_only

BODY = """
    // a_shape, a_strides and b_ndim are named here, thread_index_in_simdgroup too
    uint i = thread_position_in_grid.x;
    out[i] = static_cast<T>(a[i]) + b[0] + c + N + FLAG;
"""
ARGUMENTS = {
    "template": [("T", mx.float16), ("N", 3), ("FLAG", True)],
    "grid": (32, 1, 1),
    "threadgroup": (32, 1, 1),
    "output_shapes": [(32,)],
    "output_dtypes": [mx.float16],
}


def text_from_mlx(atomic: bool) -> str:
    """Return the output of mx.fast.metal_kernel with verbose=True, from a process because C++ prints it."""
    code = f"""
import mlx.core as mx
k = mx.fast.metal_kernel("probe", ["a", "b", "c"], ["out"], {BODY!r}, atomic_outputs={atomic})
def f(a, b, c):
    return k(inputs=[a, b, c], template=[("T", mx.{"float32" if atomic else "float16"}), ("N", 3), ("FLAG", True)],
        grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)],
        output_dtypes=[mx.{"float32" if atomic else "float16"}], verbose=True)
mx.export_function(lambda *_: None, f, mx.zeros((4, 8), mx.bfloat16), mx.zeros(7, mx.int8), mx.array(1.0))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("atomic", [False, True])
def test_generated_source_equals_that_of_mlx(atomic, capsys):
    kernel = emulator.metal_kernel("probe", ["a", "b", "c"], ["out"], BODY, atomic_outputs=atomic)
    inputs = [mx.zeros((4, 8), mx.bfloat16), mx.zeros(7, mx.int8), mx.array(1.0)]
    dtype = mx.float32 if atomic else mx.float16
    template = [("T", dtype), ("N", 3), ("FLAG", True)]
    signature = kernel._signature(inputs, [dtype], template)
    ours = kernel.generated_source(signature)
    assert "".join(ours.split()) == "".join(text_from_mlx(atomic).split())


def test_constant_and_reference_inputs():
    y = launch("out[thread_position_in_grid.x] = a[7] + b[6] + c;", mx.arange(8.0), mx.arange(7.0), 5, out=(4,))
    assert y.tolist() == [18.0] * 4


WHOLE = [mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64]
DTYPES = [*WHOLE, mx.float16, mx.bfloat16, mx.float32, mx.complex64]


@pytest.mark.parametrize("dtype", sampled([mx.bool_, mx.int8, mx.uint64, mx.bfloat16, mx.complex64], DTYPES))
def test_every_dtype_is_returned(dtype):
    x = mx.array([0, 1, 3, 100, 7, 1, 0, 5, 9]).astype(dtype)
    y = launch("out[thread_position_in_grid.x] = a[thread_position_in_grid.x];", x, dtype=dtype)
    assert y.dtype == dtype
    assert y.tolist() == x.tolist()


def test_float64_has_no_metal_type():
    with mx.stream(mx.cpu), pytest.raises(ValueError, match="float64"):
        launch("out[0] = a[0];", mx.zeros(1, mx.float64))


def test_shape_strides_ndim_of_a_view():
    view = mx.arange(60.0).reshape(3, 4, 5)[:, 1:3, ::2].transpose(2, 0, 1)
    body = """
        uint i = thread_position_in_grid.x;
        size_t at = elem_to_loc(i, a_shape, a_strides, a_ndim);
        out[i] = a[at];
    """
    kernel = emulator.metal_kernel("strided", ["a"], ["out"], body, ensure_row_contiguous=False)
    call = {"grid": (view.size, 1, 1), "threadgroup": (8, 1, 1), "output_dtypes": [mx.float32]}
    (y,) = kernel(inputs=[view], output_shapes=[view.shape], **call)
    assert mx.array_equal(y, view)
    assert kernel.traffic["a_strides"].size == 3 * 8
    contiguous = emulator.metal_kernel("strided", ["a"], ["out"], body)
    (y,) = contiguous(inputs=[view], output_shapes=[view.shape], **call)
    assert mx.array_equal(y, view)


def test_broadcast_input_without_a_copy():
    view = mx.broadcast_to(mx.array([1.0, 2.0]), (3, 2))
    kernel = emulator.metal_kernel(
        "broadcast", ["a"], ["out"],
        "uint i = thread_position_in_grid.x; out[i] = a[i / 2 * a_strides[0] + i % 2 * a_strides[1]];",
        ensure_row_contiguous=False,
    )  # fmt: skip
    (y,) = kernel(inputs=[view], grid=(6, 1, 1), threadgroup=(6, 1, 1), output_shapes=[(3, 2)],
                  output_dtypes=[mx.float32])  # fmt: skip
    assert mx.array_equal(y, view)
    assert kernel.traffic["a"].size == 8


def test_partial_threadgroups_at_the_edge_of_the_grid():
    body = """
        uint3 g = thread_position_in_grid, n = threads_per_grid;
        uint i = g.x + n.x * (g.y + n.y * g.z);
        out[i * 4] = threads_per_threadgroup.x;
        out[i * 4 + 1] = dispatch_threads_per_threadgroup.x * 100 + threadgroups_per_grid.y;
        out[i * 4 + 2] = thread_index_in_threadgroup;
        out[i * 4 + 3] = simdgroups_per_threadgroup * 100 + threadgroup_position_in_grid.x;
    """
    kernel = emulator.metal_kernel("edge", [], ["out"], body)
    (y,) = kernel(inputs=[], grid=(10, 3, 2), threadgroup=(4, 2, 1), output_shapes=[(2, 3, 10, 4)],
                  output_dtypes=[mx.uint32])  # fmt: skip
    _, row, x = np.indices((2, 3, 10))
    width = np.where(x < 8, 4, 2)
    want = np.stack([width, np.full_like(x, 402), x % 4 + width * (row % 2), 100 + x // 4], -1)
    assert np.array_equal(np.array(y), want)


def test_grid_smaller_than_the_threadgroup_shrinks_it():
    y = launch("out[thread_position_in_grid.x] = threads_per_threadgroup.x;", out=(5,), threadgroup=(64, 1, 1))
    assert y.tolist() == [5.0] * 5


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32])
def test_init_value(dtype):
    y = launch("if (thread_position_in_grid.x == 1) out[1] = 5;", out=(4,), dtype=dtype, init_value=2)
    assert y.tolist() == [2, 5, 2, 2]


def test_header_functions_and_template_arguments():
    header = "template <typename T> T twice(T x) { return x + x; }\n"
    y = launch(
        "out[thread_position_in_grid.x] = FLAG ? twice<T>(a[thread_position_in_grid.x]) + N : 0;",
        mx.arange(4.0), header=header, template=[("T", mx.bfloat16), ("N", 2), ("FLAG", True)],
    )  # fmt: skip
    assert y.tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "grid is"),
        ({"threadgroup": (1025, 1, 1)}, "1024"),
        ({"inputs": []}, "inputs has 0"),
        ({"output_shapes": []}, "output_shapes has 0"),
        ({"template": [("T", 1.5)]}, "template argument T"),
        ({"template": [("N", -1)]}, "template argument N"),
        ({"stream": mx.cpu}, "stream"),
    ],
)
def test_wrong_arguments(change, message):
    kernel = emulator.metal_kernel("wrong", ["a"], ["out"], "out[0] = a[0];")
    call = {"inputs": [mx.zeros(1)], "grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)]}
    with pytest.raises(ValueError, match=message):
        kernel(**{**call, "output_dtypes": [mx.float32], **change})


def test_a_metal_function_has_31_buffers():
    names = [f"a{i}" for i in range(16)]
    body = " ".join(f"// {name}_shape" for name in names[:14]) + "\nout[0] = a0[0];"

    def run(count):
        return launch(body, *[mx.zeros(8)] * count, out=(1,), names=names)

    assert run(16).shape == (1,)  # 16 inputs, 14 shapes, 1 output
    names.append("a16")
    with pytest.raises(emulator.CompileError, match="32 buffers"):
        run(17)


def test_wrong_kernels():
    with pytest.raises(ValueError, match="output_names"):
        emulator.metal_kernel("none", [], [], "")
    with pytest.raises(ValueError, match="math_mode"):
        emulator.metal_kernel("mode", [], ["out"], "", compile_options={"math_mode": "sloppy"})


@pytest.mark.parametrize(
    ("body", "line"),
    [("int x = 1;\nout[0] = y;", "probe.metal:2"), ("double x = 1;", "probe.metal:1"),
     ("out[0] = a[0];\natomic_thread_fence(mem_flags::mem_device);", "probe.metal:2")],
)  # fmt: skip
def test_compile_errors_name_the_line(body, line):
    with pytest.raises(emulator.CompileError, match=line):
        launch(body, mx.zeros(1))


def test_errors_in_the_header_have_its_lines():
    with pytest.raises(emulator.CompileError, match=r"probe\.h:2"):
        launch("out[0] = a[0];", mx.zeros(1), header="\nfloat f() { return nothing; }\n")
