// The best of each tile of x W^T (+ bias) in the arithmetic of units.h; W quantized or not.
//
// Inputs   w [N, K * BITS / 32] uint32 or [N, K] of T; scales, biases [N, K / GROUP] (none: w or scales again); x [M, K];
//          the others as verify_head
// Output   values [M, tiles, n (+ 1 with SUM)] float, indices [M, tiles, n] int32; see keep_first
// Template T (x, bias), S (scales), BITS, GROUP, KIND, ROWS, HEIGHT, TILE, BIAS, MASK, SUM
// Grid     x: 32 per ROWS rows of x;  y: 8 per tile of TILE weight rows;  threadgroup (32, 8, 1)

#include "matrix.h"
#include "random.h"
#include "head.h"

threadgroup float logits[ROWS * TILE];
threadgroup float sums[sums_of<ROWS, HEIGHT>()];
const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int first = threadgroup_position_in_grid.x * ROWS;
const int tile = threadgroup_position_in_grid.y, begin = tile * TILE;

for (int at = 0; at < TILE; at += HEIGHT) {
  if (begin + at < N) {
    const Tile<T, S> part = {{(const device uint8_t*)w, scales, biases}, x, K, first, M, K, begin + at, N};
    tile_products<T, S, BITS, KIND, GROUP, ROWS, HEIGHT, 1>(part, simd, lane, sums);
  }
  for (int i = simd * 32 + lane; i < ROWS * HEIGHT; i += 32 * SLICES) {
    const int n = begin + at + i % HEIGHT;
    float logit = -INFINITY;
    if (n < N) {
      const T value = static_cast<T>(product_of<ROWS, HEIGHT>(sums, i));
      logit = float(BIAS ? static_cast<T>(value + bias[n]) : value);
    }
    logits[i / HEIGHT * TILE + at + i % HEIGHT] = logit;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

for (int m = simd; m < ROWS; m += SLICES) {
  if (first + m < M) {
    if constexpr (MASK) {
      keep_allowed(logits + m * TILE, TILE, begin, N, lane, mask + size_t(first + m) * mask_shape[1]);
    }
    if (inverse[0] > 0.0f) {
      add_noise(logits + m * TILE, TILE, begin, N, lane, uint2(key[0], key[1]), position[0] + first + m, inverse[0]);
    }
    const size_t part = size_t(first + m) * ((N - 1) / TILE + 1) + tile;
    keep_first<TILE, SUM>(
        logits + m * TILE, begin, n[0], lane, values + part * (n[0] + SUM), indices + part * n[0]);
  }
}
