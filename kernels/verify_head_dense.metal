// The best of each tile of x w^T (+ bias): rows of x together, each logit in the bits of MLX's gemv on its row alone.
//
// Inputs   w [N, K] and x [M, K] of T, N >= 4; bias [N] of T (not read without BIAS); key [2] uint32, position [1] uint32,
//          inverse [1] float: 1 / temperature of a draw, 0 for none; n [1] int32, at most TILE;
//          mask [M, words] int32: bit t % 32 of word t / 32 allows token t (not read without MASK)
// Output   values [M, tiles, n (+ 1 with SUM)] float, indices [M, tiles, n] int32; see keep_first
// Template T, LANES of a simdgroup along K, ROWS, TILE, BIAS, MASK, SUM
// Grid     x: 32 per ROWS rows of x (the last group may begin earlier; each stores what rows are there and its own)
//          y: 8 per tile of TILE rows of w;  threadgroup (32, 8, 1)

#include "gemv_rows.h"
#include "random.h"
#include "head.h"

constexpr int SIMDS = 8, TM = ROWS > 6 ? 2 : 4, SUMS = ROWS * TM, STRIDE = 4 * LANES;
constexpr int WIDTH = 32 / LANES * TM; // rows of w of a simdgroup at a time
threadgroup float logits[ROWS * TILE];
const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;

const int own = threadgroup_position_in_grid.x * ROWS, first = max(min(own, M - ROWS), 0);
const int tile = threadgroup_position_in_grid.y, begin = tile * TILE, end = min(begin + TILE, N);
for (int i = thread_index_in_threadgroup; i < ROWS * TILE; i += 32 * SIMDS) {
  logits[i] = -INFINITY;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

int rows[ROWS];
UNROLL
for (int m = 0; m < ROWS; m++) {
  rows[m] = min(m, M - 1 - first) * K;
}
for (int block = begin + simd * WIDTH; block < end; block += SIMDS * WIDTH) {
  const int own_n = block + lane / LANES * TM, first_n = min(own_n, N - TM);
  float sum[SUMS] = {0};
  if (own_n < N) {
    const auto rows_x = x + size_t(first) * K;
    const auto rows_w = w + size_t(first_n) * K;
    const int whole = K - K % STRIDE;
    int k = 4 * (lane % LANES);
    for (; k < whole; k += STRIDE) {
      add_four<ROWS, TM, false>(sum, rows_x, rows, rows_w, k, K);
    }
    if (whole < K) {
      add_four<ROWS, TM, true>(sum, rows_x, rows, rows_w, k, K);
    }
  }
  UNROLL
  for (int i = 0; i < SUMS; i++) {
    UNROLL
    for (ushort apart = LANES / 2; apart >= 1; apart /= 2) {
      sum[i] += simd_shuffle_down(sum[i], apart);
    }
    const int row = first_n + i % TM;
    if (lane % LANES == 0 && row >= own_n && own_n < end) {
      const T value = static_cast<T>(sum[i]);
      logits[i / TM * TILE + row - begin] = float(BIAS ? static_cast<T>(value + bias[row]) : value);
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int m = simd; m < ROWS; m += SIMDS) {
  if (first + m >= own && first + m < M) {
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
