// y[m, h, n] = sum over k of x[m, h, k] * W[h, n, k] in the arithmetic of units.h; each head's W quantized.
//
// Inputs   w [>= H, N, K * BITS / 32] uint32; scales, biases [>= H, N, K / GROUP] (no biases: scales twice);
//          x [1, M, H, D], of whose D >= K values the first K count
// Output   y [H, M, N] where HEADS_FIRST, else [M, H, N]
// Template T (x, y), S (scales), BITS, GROUP, KIND, ROWS, HEIGHT, HEADS_FIRST
// Grid     x: 32 per ROWS rows of x;  y: 8 per HEIGHT weight rows;  z: H;  threadgroup (32, 8, 1)

#include "matrix.h"

threadgroup float sums[sums_of<ROWS, HEIGHT>()];
const int M = x_shape[1], H = x_shape[2], D = x_shape[3], N = w_shape[1];
const int K = w_shape[2] * 32 / BITS, row_bytes = K / 8 * BITS, row_scales = scales_shape[2];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int first_m = threadgroup_position_in_grid.x * ROWS, first_n = threadgroup_position_in_grid.y * HEIGHT;
const int head = threadgroup_position_in_grid.z;

const size_t matrix = size_t(head) * N;
const Tile<T, S> tile = {
    {(const device uint8_t*)w + matrix * row_bytes, scales + matrix * row_scales, biases + matrix * row_scales},
    x + size_t(head) * D, H * D, first_m, M, K, first_n, N};
tile_products<T, S, BITS, KIND, GROUP, ROWS, HEIGHT, 1>(tile, simd, lane, sums);
for (int i = simd * 32 + lane; i < ROWS * HEIGHT; i += 32 * SLICES) {
  const int m = first_m + i / HEIGHT, n = first_n + i % HEIGHT;
  if (m < M && n < N) {
    const size_t row = HEADS_FIRST ? size_t(head) * M + m : size_t(m) * H + head;
    y[row * N + n] = static_cast<T>(product_of<ROWS, HEIGHT>(sums, i));
  }
}
