// y[m, h, n] = sum over k of x[m, h, k] * W[h, n, k], each head's W quantized: its rows together, each in its own bits.
//
// Inputs   w [>= H, N, K * BITS / 32] uint32; scales, biases [>= H, N, K / GROUP] (no biases: scales twice)
//          x [1, M, H, D], of whose D >= K values the first K count
// Output   y [H, M, N] where HEADS_FIRST, else [M, H, N]
// Template T (x, y), S (scales), BITS, GROUP, KIND, VALUES, LANES, ROWS, RESULTS, HEADS_FIRST
// Grid     x: 32 per ROWS rows of x (the last group may begin earlier; each stores what rows are there and its own)
//          y: 2 per 2 * (32 / LANES) * RESULTS weight rows;  z: H;  threadgroup (32, 2, 1)

#include "quantized.h"

const int M = x_shape[1], H = x_shape[2], D = x_shape[3], N = w_shape[1], K = w_shape[2] * 32 / BITS;
const int of_row = scales_shape[2];
const int lane = thread_index_in_simdgroup, head = threadgroup_position_in_grid.z;

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
  rows[m] = min(m, M - 1 - first) * H * D;
}
const size_t matrix = size_t(head) * N;
float result[ROWS][RESULTS] = {};
const Source<S> sources[1] = {
    {(const device uint8_t*)w + matrix * (K / 8 * BITS), scales + matrix * of_row, biases + matrix * of_row}};
gathered_products<T, S, BITS, KIND, GROUP, VALUES, LANES>(
    sources, x + (size_t(first) * H + head) * D, rows, outputs, K, lane % LANES, result);

UNROLL
for (int m = 0; m < ROWS; m++) {
  const size_t row = HEADS_FIRST ? size_t(head) * M + first + m : size_t(first + m) * H + head;
  UNROLL
  for (int r = 0; r < RESULTS; r++) {
    const float sum = lanes_sum<LANES>(result[m][r]);
    if (lane % LANES == 0 && begin + r < N && first + m >= own && first + m < M) {
      y[row * N + begin + r] = static_cast<T>(sum);
    }
  }
}
