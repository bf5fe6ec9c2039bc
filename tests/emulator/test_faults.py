"""Plant bugs in copies of real kernels: each is caught, and the message names the place."""

import re

import mlx.core as mx
import pytest
from metal_cases import fault_of, launch, linux_only
from mlx_lm.kernels import post_expert_norm_combine, qk_norm
from mlx_lm.models import deepseek_v41, ssm
from mlx_lm.models import gated_delta as gated
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.emulator.compile import MLX_INCLUDE
from mlx_mtp.emulator.launch import run

pytestmark = linux_only
THREAD = r"thread \(\d+, \d+, \d+\) of threadgroup \(\d+, \d+, \d+\)"


@pytest.fixture
def plant(monkeypatch):
    """Run emulated, with a function that replaces text in the source of an mlx-lm kernel."""

    def replace(kernel: emulator.MetalKernel, old: str, new: str) -> None:
        assert old in kernel.source
        monkeypatch.setattr(kernel, "source", kernel.source.replace(old, new))

    mx.random.seed(0)
    with emulator.emulated():
        yield replace


def run_gated_delta(dv=8):
    q, k = (mx.random.normal((1, 2, 1, 64)) * 0.1 for _ in range(2))
    more = mx.random.normal((1, 2, 2, dv)), mx.random.uniform(shape=(1, 2, 2)), mx.random.uniform(shape=(1, 2, 2))
    data = (q, k, *more, mx.random.normal((1, 2, dv, 64)))
    return data, gated.gated_delta_kernel_unpacked(*data)


def run_ssm():
    b, h, d, s = 1, 2, 8, 64
    x, dt = mx.random.normal((b, 1, h, d)), mx.random.normal((b, 1, h))
    bc = [mx.random.normal((b, 1, 1, s)) for _ in range(2)]
    head = [mx.random.normal((h,)) for _ in range(3)]
    return ssm.ssm_update(x, head[0], *bc, head[1], dt, head[2], mx.random.normal((b, h, d, s)), (0.001, 100.0))


def run_qk_norm():
    return qk_norm(mx.ones((3, 400)), n_heads=3, n_kv_heads=2, head_dim=40, eps=1e-5, query_scale=1.0)


def run_combine():
    return post_expert_norm_combine(mx.ones((1, 2, 512)), mx.ones((1, 2)), norm_weight=mx.ones(512), eps=1e-5)


def kernel_of(function, name):
    return function.__globals__[name]


PLANTED = {
    "missing barrier": (
        run_combine, lambda: kernel_of(post_expert_norm_combine, "_expert_combine_kernel"),
        "threadgroup_barrier(mem_flags::mem_threadgroup);", "",
        r"race: \w+ threadgroup array buf\[\d+\]",
    ),
    "off-by-one read": (
        run_gated_delta, lambda: gated._gated_delta_kernel, "q_[s_idx]", "q_[s_idx + 1]",
        r"out of bounds: reads q\[128\] \(bytes 512 to 515; q has 128 elements, 512 bytes\)",
    ),
    "read before the start": (
        run_qk_norm, lambda: kernel_of(qk_norm, "_qk_norm_kernel"), "x[d]", "x[d - 1]",
        r"out of bounds: reads qkvg\[-1\]",
    ),
    "write past the end": (
        run_ssm, lambda: ssm._ssm_kernel, "o_state[idx] =", "o_state[idx + 1] =",
        r"out of bounds: writes state_out\[1024\]|race: writes state_out",
    ),
    "race": (
        run_ssm, lambda: ssm._ssm_kernel, "if (thread_index_in_simdgroup == 0) {", "{ acc += ds_idx;",
        r"race: writes out\[0\] .* which thread \(0, 0, 0\) of threadgroup \(0, 0, 0\) wrote",
    ),
    "unwritten element": (
        run_gated_delta, lambda: gated._gated_delta_kernel,
        "if (thread_index_in_simdgroup == 0) {", "if (thread_index_in_simdgroup == 0 && dv_idx != 3) {",
        r"unwritten: 4 of 32 elements of y that no thread wrote: 3, 11, 19, 27",
    ),
    "wrong shuffle mask": (
        lambda: gated.gated_delta_kernel_xtree(*recurrent_128()), lambda: gated._gated_delta_kernel_xtree,
        "16", "32", r"simd_shuffle_xor reads lane 3[2-9], but there is no such lane",
    ),
    "wrong stride": (
        run_gated_delta, lambda: gated._gated_delta_kernel,
        "state_in + (n * Dv + dv_idx) * Dk", "state_in + (n * Dv + dv_idx) * (Dk + 32)",
        r"out of bounds: reads state_in\[\d+\]",
    ),
    "endless loop": (
        lambda: deepseek_v41._sinkhorn(mx.ones((2, 4, 4)), iters=3, eps=mx.array([1e-6])),
        lambda: deepseek_v41._sinkhorn_kernel, "t < 2 * ITERS - 1; t++", "t < 2 * ITERS - 1; t += ITERS - 3",
        r"does not end: one thread has run \d+ blocks of code",
    ),
    "write to an input": (
        run_ssm, lambda: ssm._ssm_kernel, "auto dt_ =", "((device float*)dt)[n] = 0; auto dt_ =",
        r"writes the input dt\[0\]",
    ),
}  # fmt: skip


def recurrent_128():
    q, k = (mx.random.normal((1, 1, 1, 128)) for _ in range(2))
    return q, k, mx.ones((1, 1, 1, 8)), mx.ones((1, 1, 1)), mx.ones((1, 1, 1)), mx.ones((1, 1, 8, 128))


SIMILAR = ("read before the start", "write past the end", "wrong stride")  # similar to the off-by-one read


@pytest.mark.parametrize("bug", sampled((bug for bug in PLANTED if bug not in SIMILAR), PLANTED))
def test_planted_in_mlx_lm(bug, plant):
    run, kernel, old, new, message = PLANTED[bug]
    run()  # the published kernel has no fault
    plant(kernel(), old, new)
    with pytest.raises(emulator.KernelFault) as error:
        run()
    text = str(error.value)
    assert re.search(message, text), text
    assert kernel().name in text
    if bug != "unwritten element":
        assert re.search(THREAD, text)
        assert re.search(rf"{kernel().name}\.metal:\d+ `", text)


def test_a_wrong_mask_within_bounds_changes_the_result(plant):
    data = recurrent_128()
    right = gated.gated_delta_kernel_xtree(*data)
    plant(gated._gated_delta_kernel_xtree, "simd_shuffle_xor(kv_mem, 16)", "simd_shuffle_xor(kv_mem, 8)")
    assert not mx.array_equal(gated.gated_delta_kernel_xtree(*data)[1], right[1])


SOFTMAX = (MLX_INCLUDE / "mlx/backend/metal/kernels/softmax.h").read_text()
SOFTMAX_BODY = """
    softmax_single_row<float>(a, out, N, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
                              thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def softmax_with(header: str, **more):
    return {"out": (2, 300), "grid": 192, "group": 96, "template": [("N", 300)], "header": header, **more}


@pytest.mark.parametrize("nth", sampled([1, 4], range(1, 5)))
def test_every_barrier_of_mlx_s_softmax_is_needed(nth):
    function = SOFTMAX.index("softmax_single_row(")
    places = [m.start() for m in re.finditer(re.escape(BARRIER), SOFTMAX) if m.start() > function]
    at = places[nth]
    text = fault_of(SOFTMAX_BODY, mx.ones((2, 300)), **softmax_with(SOFTMAX[:at] + SOFTMAX[at + len(BARRIER) :]))
    assert re.search(r"race: (reads|writes) threadgroup array local_(max|normalizer)\[", text), text
    assert "without a barrier that orders them" in text
    assert "probe.h:" in text


def test_divergent_barrier():
    header = SOFTMAX.replace(BARRIER, "if (simd_group_id == 0) { " + BARRIER + " }", 1)
    text = fault_of(SOFTMAX_BODY, mx.ones((2, 300)), **softmax_with(header))
    assert "divergent barrier: threads 0-31 wait at threadgroup_barrier (probe.h:" in text
    assert "threads 32-95 wait at threadgroup_barrier" in text


def test_a_thread_that_returns_before_the_barrier():
    body = "if (thread_position_in_grid.x == 5) return;\nthreadgroup_barrier(mem_flags::mem_none);\nout[0] = 1;"
    text = fault_of(body, out=(1,), grid=32)
    assert "threads 0-4 wait at threadgroup_barrier (probe.metal:2" in text
    assert "thread 5 ended, threads 6-31 wait" in text


def test_uninitialised_threadgroup_read():
    header = SOFTMAX.replace("local_max[simd_lane_id] = Limits<AccT>::min;", "", 1)
    text = fault_of(SOFTMAX_BODY, mx.ones((2, 300)), **softmax_with(header))
    assert "uninitialised: reads threadgroup array local_max[3] (bytes 12 to 15; local_max has 32" in text
    assert re.search(THREAD, text)


def test_threadgroup_memory_out_of_bounds_and_too_large():
    body = "threadgroup float s[32]; threadgroup float t[32];\nuint i = thread_index_in_threadgroup;\n"
    text = fault_of(body + "s[i] = t[i] = 0; s[i + 1] = 1;\nout[i] = s[i];", out=(32,))
    assert "out of bounds: writes threadgroup array s[32] (bytes 128 to 131" in text or "race: writes" in text
    text = fault_of("\nthreadgroup float s[8193]; s[0] = 1; out[0] = s[0];", out=(1,))
    assert "32768 bytes" in text
    assert "probe.metal:2" in text


@pytest.mark.parametrize("loop", ["while (true) {}", "for (int i = 0; i < 2; i *= 2) out[0] = i;"])
def test_endless_loops_are_refused(loop):
    options = emulator.Options(max_steps=100_000)
    text = fault_of(f"int x = 1;\n{loop}\nout[0] = x;", out=(1,), options=options)
    assert "does not end: one thread has run 100000 blocks of code" in text
    assert "probe.metal:2" in text


def test_a_fault_in_the_last_statement_has_its_line():
    text = fault_of("int zero = a[0];\nout[0] = 7 / zero;", mx.zeros(2), out=(2,), grid=1)
    assert "probe.metal:2 `out[0] = 7 / zero;`: an integer is divided by zero" in text
    body = "device int* p = out + 2;\n*reinterpret_cast<device atomic<int>*>(p) = {1};"
    assert "probe.metal:2" in fault_of(body, out=(2,), dtype=mx.int32, grid=1)
    body = (
        "auto p = reinterpret_cast<device atomic<int>*>(out + 2);\natomic_store_explicit(p, 1, memory_order_relaxed);"
    )
    assert "probe.metal:2 `atomic_store_explicit" in fault_of(body, out=(2,), dtype=mx.int32, grid=1)


def test_a_race_between_threadgroups():
    text = fault_of("out[0] = threadgroup_position_in_grid.x;", out=(1,), grid=64)
    assert "which a thread of another threadgroup wrote" in text
    assert launch("out[0] = 7;", out=(1,), grid=64).item() == 7  # equal bytes from all threads are not a race
    assert "uninitialised: reads out[0]" in fault_of("if (out[0] == 3) out[1] = 0; out[0] = 1;", out=(2,), grid=1)


def test_faults_that_a_caller_allows():
    racy = "out[0] = thread_position_in_grid.x;"
    assert launch(racy, out=(1,), grid=32, options=emulator.Options(allow={"races"})).item() == 31
    partial = launch(
        "if (thread_position_in_grid.x == 1) out[1] = 4;", out=(2,), options=emulator.Options(allow={"unwritten"})
    )
    assert partial[1].item() == 4
    assert mx.isnan(partial[0]).item()
    unread = "threadgroup float s[2]; out[0] = s[1] * 0;"
    launch(unread, out=(1,), grid=1, options=emulator.Options(allow={"uninitialised"}))
    none = """
        threadgroup float s[32];
        uint i = thread_index_in_threadgroup;
        s[i] = i;
        threadgroup_barrier(mem_flags::mem_none);
        out[i] = s[31 - i];
    """
    assert "race" in fault_of(none, out=(32,))
    assert launch(none, out=(32,), options=emulator.Options(allow={"mem_none"})).tolist() == list(range(31, -1, -1))


def test_barriers_order_only_the_memory_they_name():
    body = """
        uint i = thread_position_in_grid.x;
        out[i] = i;
        threadgroup_barrier(mem_flags::FLAG);
        float other = out[(i + 1) % 64];
        threadgroup_barrier(mem_flags::FLAG);
        out[i] = other;
    """
    ordered = launch(body.replace("FLAG", "mem_device"), out=(64,), group=64)
    assert ordered.tolist() == [(i + 1) % 64 for i in range(64)]
    assert "race: reads out[1]" in fault_of(body.replace("FLAG", "mem_threadgroup"), out=(64,), group=64)
    text = fault_of(body.replace("FLAG", "mem_device"), out=(64,), group=32, init_value=0)
    assert "race: writes out[32]" in text
    assert "which a thread of another threadgroup read" in text


def test_invalid_options_list_the_allowed_values():
    for wrong in ({"allow": {"all"}}, {"order": "random"}, {"order": 1}, {"optimize": 4}, {"fp_contract": "no"},
                  {"max_steps": 0}, {"matrix_order": "reverse"}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            emulator.Options(**wrong)


def test_a_function_constant_needs_a_value():
    header = "constant int width [[function_constant(3)]];\nconstant bool unused [[function_constant(4)]];\n"
    body = "out[thread_position_in_grid.x] = width;"
    options = emulator.Options(function_constants={"width": 7})
    assert launch(body, out=(2,), header=header, options=options).tolist() == [7, 7]
    with pytest.raises(emulator.CompileError, match="width"):
        launch(body, out=(2,), header=header)


def test_a_damaged_library_is_not_called_a_missing_constant(tmp_path):
    (tmp_path / "kernel.so").write_bytes(b"damaged")
    with pytest.raises(emulator.CompileError, match=r"^cannot load a kernel: .*kernel\.so"):
        run(tmp_path / "kernel.so", [], (1, 1, 1), (1, 1, 1), emulator.Options())


ORDERS = ["forward", "reverse", 2, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_gives_the_same_bits(order):
    mx.random.seed(0)
    w = mx.quantize(mx.random.normal((24, 512)), 64, 4)
    x = mx.random.normal((3, 512))
    call = {"group_size": 64, "bits": 4, "kernel": "qmv_wide"}
    first, traffic = stock.quantized_matvec(x, *w, **call)
    for _ in range(2):
        again, same = stock.quantized_matvec(x, *w, **call, options=emulator.Options(order=order))
        assert mx.array_equal(first, again)
        assert same.buffers == traffic.buffers
    a = mx.random.normal((2, 300))
    softmax = softmax_with(SOFTMAX, options=emulator.Options(order=order))
    assert mx.array_equal(launch(SOFTMAX_BODY, a, **softmax), launch(SOFTMAX_BODY, a, **softmax_with(SOFTMAX)))


@pytest.mark.parametrize("order", ORDERS)
def test_races_are_found_in_any_order(order):
    body = "threadgroup float s[64];\nuint i = thread_index_in_threadgroup;\ns[i] = i;\nout[i] = s[63 - i];"
    assert "race" in fault_of(body, out=(64,), group=64, options=emulator.Options(order=order))
