"""Launch MLX's own kernels for one row of an unquantized product, as MLX launches them.

The choice of kernel follows MLX 0.32's `matmul.cpp`. M rows are M launches of one row, along the grid's last axis.
"""

from dataclasses import replace

import mlx.core as mx

from .launch import Traffic
from .options import EmulatorOptions
from .stock import include, launched

# In gemv.h lanes that are done are missing at the barrier, and lanes read from ones without a row, whose value no one
# uses. The emulator objects to both: here the others come to the barrier later, and such a lane reads itself.
LENIENT = """
__attribute__((noinline)) inline void meet(mem_flags flags) { threadgroup_barrier(flags); }
inline float shuffle_down(float value, ushort delta, uint lane) {
    bool there = simd_vote::vote_t(simd_active_threads_mask()) >> (lane + delta) & 1;
    return simd_shuffle(value, there ? lane + delta : lane);
}
#define threadgroup_barrier meet
#define simd_shuffle_down(value, delta) shuffle_down(value, delta, simd_lid)
"""
STRICT = "#undef threadgroup_barrier\n#undef simd_shuffle_down\n"
GEMV = """
    using Kernel = GEMVKernel<T, BM, BN, SM, SN, TM, 4, AXPBY>;
    threadgroup float memory[1024];
    size_t row = threadgroup_position_in_grid.z;
    Kernel::run(w, x + row * K, bias, y + row * N, K, N, K, 1.0f, 1.0f, 1, memory, threadgroup_position_in_grid,
        thread_position_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    if (BN > 1 && thread_index_in_simdgroup > 0) {
        meet(mem_flags::mem_none);
    }
"""
DOT = """
    size_t row = threadgroup_position_in_grid.y;
    dot_product<T, 32, 512, 16>(x + row * STRIDE, w, partials + row, K, thread_index_in_threadgroup,
        thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threadgroup_position_in_grid.x);
"""
DOT_BLOCK = 512 * 32  # elements that one threadgroup sums


def tile(k: int, n: int) -> dict[str, int]:
    """Choose the tile that MLX picks for one row and an (n, k) matrix: the template arguments of GEMVKernel."""
    tm = 1 if n < 4 else 4
    if k <= 64:
        return {"BM": 1, "BN": 1, "SM": 8, "SN": 4, "TM": tm}
    if k >= 16 * n:
        return {"BM": 1, "BN": 8, "SM": 1, "SN": 32, "TM": tm}
    return {"BM": 8 if n >= 4096 else 4, "BN": 1, "SM": 1, "SN": 32, "TM": tm}


def gemv(
    x: mx.array, w: mx.array, bias: mx.array | None = None, options: EmulatorOptions | None = None
) -> tuple[mx.array, Traffic]:
    """Multiply each row of x (M, K) with the transpose of w (N, K), and add bias (N,) as addmm does.

    Returns (M, N) and the traffic. "mem_none" is allowed: MLX's kernel counts on it where K >= 16 N. For N = 1 MLX
    runs it with a bias only, and with matrix and vector in exchanged roles, which leaves the products as they are. A
    shuffle counts as two collectives.
    """
    (m, k), n = x.shape, w.shape[0]
    chosen = tile(k, n)
    header = include("utils", "steel/utils") + LENIENT + include("gemv") + STRICT
    options = options or EmulatorOptions()
    return launched(
        "gemv",
        {"x": x, "w": w, "bias": x if bias is None else bias, "K": k, "N": n},
        {"y": ((m, n), x.dtype)},
        GEMV,
        header,
        groups=(-(-n // (chosen["BM"] * chosen["SM"] * chosen["TM"])), 1, m),
        threadgroup=(32, chosen["BN"], chosen["BM"]),
        template=[("T", x.dtype), ("AXPBY", bias is not None), *chosen.items()],
        options=replace(options, allow={*options.allow, "mem_none"}),
    )


def dot(x: mx.array, w: mx.array, options: EmulatorOptions | None = None) -> tuple[mx.array, Traffic]:
    """Multiply each row of x (M, K) with the one of w (1, K): (M, 1), and the traffic.

    Raises ValueError past 16384 values, where MLX adds several partial sums.
    """
    m, k = x.shape
    if k > DOT_BLOCK:
        raise ValueError(f"x has rows of {k}; one threadgroup sums at most {DOT_BLOCK}")
    stride = -(-k // 8) * 8  # its vectors are aligned in every row
    inputs = {"x": mx.pad(x, [(0, 0), (0, stride - k)]), "w": w, "K": k, "STRIDE": stride}
    outputs, header = {"partials": ((m, 1), mx.float32)}, include("utils", "dot")
    more = {"groups": (1, m, 1), "threadgroup": (512, 1, 1), "template": [("T", x.dtype)], "options": options}
    partials, traffic = launched("dot", inputs, outputs, DOT, header, **more)
    return partials.astype(x.dtype), traffic
