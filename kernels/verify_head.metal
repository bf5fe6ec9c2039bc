// The best of each tile of x W^T (+ bias), W quantized: rows of x together, each logit with the bits it has alone.
//
// Inputs   w [N, K * BITS / 32] uint32; scales, biases [N, K / GROUP] (no biases: scales twice); x [M, K];
//          bias [N] (not read without BIAS); key [2] uint32, position [1] uint32, inverse [1] float: 1 / temperature of a draw, 0 for none;
//          n [1] int32, at most TILE;
//          mask [M, words] int32: bit t % 32 of word t / 32 allows token t (not read without MASK)
// Output   values [M, tiles, n (+ 1 with SUM)] float, indices [M, tiles, n] int32; see keep_first
// Template T (x, bias), S (scales), BITS, GROUP, KIND, VALUES, LANES, ROWS, TILE, BIAS, MASK, SUM
// Grid     x: 32 per ROWS rows of x (the last group may begin earlier; each stores what rows are there and its own)
//          y: 8 per tile of TILE weight rows;  threadgroup (32, 8, 1)

#include "quantized.h"
#include "random.h"
#include "head.h"

constexpr int SIMDS = 8, RESULTS = ROWS > 6 ? 2 : 4;
constexpr int WIDTH = 32 / LANES * RESULTS; // weight rows of a simdgroup at a time
threadgroup float logits[ROWS * TILE];
const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;

const int own = threadgroup_position_in_grid.x * ROWS, first = max(min(own, M - ROWS), 0);
const int tile = threadgroup_position_in_grid.y, begin = tile * TILE;
for (int i = thread_index_in_threadgroup; i < ROWS * TILE; i += 32 * SIMDS) {
  logits[i] = -INFINITY;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const Source<S> sources[1] = {{(const device uint8_t*)w, scales, biases}};
int rows[ROWS];
UNROLL
for (int m = 0; m < ROWS; m++) {
  rows[m] = min(m, M - 1 - first) * K;
}
for (int at = simd * WIDTH + lane / LANES * RESULTS; at < min(TILE, N - begin); at += SIMDS * WIDTH) {
  int outputs[RESULTS];
  UNROLL
  for (int r = 0; r < RESULTS; r++) {
    outputs[r] = min(begin + at + r, N - 1);
  }
  float result[ROWS][RESULTS] = {};
  gathered_products<T, S, BITS, KIND, GROUP, VALUES, LANES>(
      sources, x + size_t(first) * K, rows, outputs, K, lane % LANES, result);
  UNROLL
  for (int r = 0; r < RESULTS; r++) {
    UNROLL
    for (int m = 0; m < ROWS; m++) {
      const T value = static_cast<T>(lanes_sum<LANES>(result[m][r]));
      if (lane % LANES == 0 && begin + at + r < N) {
        logits[m * TILE + at + r] = float(BIAS ? static_cast<T>(value + bias[outputs[r]]) : value);
      }
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
