// y[m, n] = sum over k of x[m, k] * W[n, k], W quantized: rows of x together, each with the bits that it has alone.
//
// Inputs   w [>= N, K * BITS / 32] uint32; scales, biases [>= N, K / GROUP] (no biases: scales twice);
//          x [M, K]; ends [P] int32, where each of the P weights that w stacks along N ends; bias [N] of T, where BIAS:
//          added to the rounded sum
// Output   y [M * N]: for each weight in turn its [M, N_p]
// Template T (x, y), S (scales), BITS, GROUP, KIND, VALUES, LANES, ROWS, RESULTS, BIAS
// Grid     x: 32 per ROWS rows of x (the last group may begin earlier; each stores what rows are there and its own)
//          y: 2 per 2 * (32 / LANES) * RESULTS weight rows;  threadgroup (32, 2, 1)

#include "quantized.h"

const int M = x_shape[0], K = x_shape[1], N = ends[ends_shape[0] - 1];
const int lane = thread_index_in_simdgroup;

const int own = threadgroup_position_in_grid.x * ROWS;
const int first = max(min(own, M - ROWS), 0);
const int tile = threadgroup_position_in_grid.y * 2 + simdgroup_index_in_threadgroup;
const int begin = (tile * (32 / LANES) + lane / LANES) * RESULTS;
if (begin >= N) {
  return;
}

int outputs[RESULTS], rows[ROWS];
UNROLL
for (int r = 0; r < RESULTS; r++) {
  outputs[r] = min(begin + r, N - 1);
}
UNROLL
for (int m = 0; m < ROWS; m++) {
  rows[m] = min(m, M - 1 - first) * K; // the last row stands in for missing ones
}
const Source<S> sources[1] = {{(const device uint8_t*)w, scales, biases}};
float result[ROWS][RESULTS] = {};
gathered_products<T, S, BITS, KIND, GROUP, VALUES, LANES>(
    sources, x + size_t(first) * K, rows, outputs, K, lane % LANES, result);

UNROLL
for (int r = 0; r < RESULTS; r++) {
  const int n = begin + r;
  const int2 at = place_of(ends, ends_shape[0], n);
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    const float sum = lanes_sum<LANES>(result[m][r]);
    if (lane % LANES == 0 && n < N && first + m >= own && first + m < M) {
      T value = static_cast<T>(sum);
      if constexpr (BIAS) {
        value = value + bias[n];
      }
      y[size_t(M) * at.x + size_t(first + m) * (at.y - at.x) + n - at.x] = value;
    }
  }
}
