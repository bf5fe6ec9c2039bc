// y[m, n] = sum over k of x[m, k] * W[n, k] in the arithmetic of units.h; W quantized or not, one or several stacked along N.
//
// Inputs   w [>= N, K * BITS / 32] uint32 or [>= N, K] of T; scales, biases [>= N, K / GROUP] (none: w or scales again);
//          x [M, K]; ends [P] int32, where each of the P weights that w stacks along N ends; bias [N] of T, where BIAS:
//          added to the rounded sum
// Output   y [M * N]: for each weight in turn its [M, N_p]
// Template T (x, y), S (scales), BITS, GROUP, KIND, ROWS, HEIGHT, BIAS
// Grid     x: 32 per ROWS rows of x;  y: 8 per HEIGHT weight rows;  threadgroup (32, 8, 1)

#include "matrix.h"

threadgroup float sums[sums_of<ROWS, HEIGHT>()];
const int M = x_shape[0], K = x_shape[1], N = ends[ends_shape[0] - 1];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int first_m = threadgroup_position_in_grid.x * ROWS, first_n = threadgroup_position_in_grid.y * HEIGHT;

const Tile<T, S> tile = {{(const device uint8_t*)w, scales, biases}, x, K, first_m, M, K, first_n, N};
tile_products<T, S, BITS, KIND, GROUP, ROWS, HEIGHT, 1>(tile, simd, lane, sums);
for (int i = simd * 32 + lane; i < ROWS * HEIGHT; i += 32 * SLICES) {
  const int m = first_m + i / HEIGHT, n = first_n + i % HEIGHT;
  if (m < M && n < N) {
    T value = static_cast<T>(product_of<ROWS, HEIGHT>(sums, i));
    if constexpr (BIAS) {
      value = value + bias[n];
    }
    const int2 at = place_of(ends, ends_shape[0], n);
    y[size_t(M) * at.x + size_t(m) * (at.y - at.x) + n - at.x] = value;
  }
}
