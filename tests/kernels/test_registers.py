"""Bound registers, threadgroups and their memory by a proxy: another GPU's back end, with 128 words per thread."""

import functools
import re
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import pytest
from metal_cases import linux_only
from metal_texts import FEW, GROUPS, collected, texts
from registers import Registers, registers
from sweep import SWEEP, sampled

from mlx_mtp import kernels
from mlx_mtp.bench.kernel_launches import cached, can_split, rows, spread, weights
from mlx_mtp.emulator.options import CompileError
from mlx_mtp.emulator.texts import LaunchText, recorded, text_kernel

pytestmark = linux_only

SPILLED = 64  # maximum words if rows are split or cannot be: mostly 0, up to 31 for nvfp4, 40 for 5 bits
THREADGROUP = 32768  # bytes of threadgroup memory
REGISTERS = 208 * 1024  # bytes per threadgroup
counted = functools.cache(lambda text: registers(text.text, text.kernel))


class Grouped(NamedTuple):
    """A launch's text, and its number of threads per threadgroup."""

    text: LaunchText
    threads: int


def launched(launch):
    with recorded() as found:
        launch()
    return [Grouped(each.text, each.threads) for each in found]


def pairs(launch):
    """Return the texts of a launch, each with the text that splits rows, or with itself."""
    whole = launched(launch)
    return zip(whole, launched(partial(launch, split=True)) if can_split(launch.func) else whole, strict=True)


@pytest.mark.parametrize("group", sampled([*FEW][:1], GROUPS))
def test_kernels_have_registers_or_can_split_rows(group):
    """Threadgroups also fit with the registers of their threads."""
    launches = [launch for launch in GROUPS[group]() if "split" not in launch.keywords]
    chosen = launches if SWEEP else spread(launches, 2)
    for whole, split in dict.fromkeys(pair for launch in chosen for pair in pairs(launch)):
        found = counted(split.text)
        assert found.spilled <= SPILLED, (split.text.text[-300:], found)
        for text, threads in (whole, split):
            found = counted(text)
            assert threads * found.words * 4 <= REGISTERS, (text.text[-300:], threads, found)
            assert found.threadgroup < THREADGROUP, text.text[-300:]


PRODUCTS = [group for group in GROUPS if "matrices" in group]


@pytest.mark.parametrize("group", sampled(["matrices affine-4-64"], PRODUCTS))
def test_products_by_matrices_spill_nothing(group):
    """At any tile."""
    found = [text for text in texts(GROUPS[group](), None if SWEEP else 4) if text.kernel.startswith("matrix_")]
    for text in found:
        count = counted(text)
        assert count.spilled == 0, (text.text[-300:], count)
        assert count.threadgroup <= THREADGROUP


BF16 = mx.bfloat16
FORMS = [("affine", 4, 64), ("nvfp4", 4, 16)]


def product(m, of):
    return partial(kernels.verify_qmm, rows(m, 4096, BF16), weights(of, 64, 4096, BF16))


def head(m, of):
    return partial(kernels.verify_head, rows(m, 4096, BF16), weights(of, 1024, 4096, BF16))


def visits(m, of):
    up, down = weights(of, 128, 512, BF16, 16), weights(of, 512, 128, BF16, 16)
    logits, routing = mx.zeros((m, 16), BF16), kernels.Routing("sigmoid", 4)
    return partial(kernels.verify_moe, rows(m, 512, BF16), logits, kernels.Experts(up, up, down), routing)


def queries(m, width, bits=None):
    q = mx.zeros((1, 8, m // 8, width), BF16)
    k, v = (cached((1, 1, 64, width), BF16, bits, 64) for _ in range(2))
    return partial(kernels.verify_attention, q, k, v, mx.array([8]), scale=1.0, limit=64, bits=bits)


SPILLING = {
    **{f"qmm {m} {of[0]}": ("verify_qmm", product(m, of)) for m in (6, 12) for of in FORMS},
    **{f"head {m} {of[0]}": ("verify_head", head(m, of)) for m in (6, 12) for of in FORMS},
    **{f"moe {m} {of[0]}": ("moe_glu", visits(m, of)) for m in (4, 8) for of in FORMS},
    **{
        f"attention {m} x {width} {bits}": ("verify_attention", queries(m, width, bits))
        for m in (64, 96, 128) for width in (64, 128, 192, 256) for bits in (None, 8)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(["qmm 6 nvfp4"], SPILLING))
def test_rows_that_spill_are_those_that_can_be_split(name):
    kernel, launch = SPILLING[name]
    ((whole, split),) = [pair for pair in pairs(launch) if pair[0].text.kernel == kernel]
    assert 0 <= counted(split.text).spilled < counted(whole.text).spilled


# Launches, and the threads of a threadgroup: fewer where a thread needs more registers.
LARGE = {
    "16 rows of a router": (partial(kernels.verify_gemv, rows(16, 8192, BF16), mx.zeros((1, 8192), BF16)), 256),
    "512 columns of attention": (queries(32, 512), 256),
    "16384 columns of a norm": (
        partial(kernels.add_norm, *[rows(1, 16384, BF16)] * 2, mx.zeros((16384,), BF16), 1e-6),
        512,
    ),
    "12288 columns of a norm": (
        partial(kernels.add_norm, *[rows(1, 12288, BF16)] * 2, mx.zeros((12288,), BF16), 1e-6),
        1024,
    ),
}


def test_groups_of_many_registers_are_small():
    assert {name: launched(launch)[0].threads for name, (launch, _) in LARGE.items()} == {
        name: threads for name, (_, threads) in LARGE.items()
    }


@pytest.mark.parametrize("name", sampled(["12288 columns of a norm"], LARGE))
def test_registers_of_small_groups_are_enough(name):
    launch, threads = LARGE[name]
    text, _ = launched(launch)[0]
    assert counted(text) < Registers(words=129 if threads < 512 else 65, spilled=0, threadgroup=THREADGROUP)


FULL = """
threadgroup float all[256];
threadgroup half more[N];
all[thread_index_in_threadgroup] = x[thread_index_in_threadgroup];
more[0] = half(all[0]);
float kept[N];
for (int i = 0; i < N; i++) { kept[i] = x[i * thread_index_in_threadgroup]; }
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = 0; i < N; i++) { y[i] = kept[i] * kept[N - 1 - i] + float(more[0]); }
"""


@pytest.mark.parametrize("n", [20, 160])
def test_the_proxy_counts_what_a_kernel_keeps(n):
    """Values that are loaded before a barrier and used after it fill registers, then spill."""
    source = "#define UNROLL\n" + FULL.replace("for (", '_Pragma("clang loop unroll(full)") for (')
    kernel = text_kernel("full", ["x"], ["y"], source)
    with collected() as found:
        kernel(inputs=[mx.zeros(9999)], output_shapes=[(n,)], output_dtypes=[mx.float32], template=[("N", n)])
    count = registers(found[0].text, "full")
    assert count.threadgroup == 1024 + -(-2 * n // 16) * 16
    assert n <= count.words + count.spilled
    assert (count.spilled >= n - 128 > 0) if n > 128 else count.spilled == 0


def test_a_compile_error_names_the_line():
    text = launched(SPILLING["moe 4 affine"][1])[0].text
    broken = re.sub(r'(#line (\d+) "kernels/moe_route.metal"\n)', r"\1nothing();", text.text, count=1)
    with pytest.raises(CompileError, match=r"kernels/moe_route.metal:\d+: use of undeclared identifier 'nothing'"):
        registers(broken, text.kernel)
    undefined = broken.replace("nothing()", "starts[0] = int(tanh(float(logits[0])))")
    with pytest.raises(CompileError, match=r"calls .*tanh.*, which registers\.h must define"):
        registers(undefined, text.kernel)
