// y[m, h] = swiglu(x[m] . gate[h], x[m] . up[h]), both weights quantized: rows of x together, each with the bits it has alone.
//
// Inputs   w [2 * H, K * BITS / 32] uint32, gate's rows before up's; scales, biases [2 * H, K / GROUP] (no
//          biases: scales twice); x [M, K]; limit [1] of T: infinity where nothing is clamped
// Output   y [M, H]
// Template T (x, limit, y), S (scales), BITS, GROUP, KIND, VALUES, LANES, ROWS, RESULTS
// Grid     x: 32 per ROWS rows of x (the last group may begin earlier; each stores what rows are there and its own)
//          y: 2 per 2 * (32 / LANES) * RESULTS / 2 values of H;  threadgroup (32, 2, 1)

#include "quantized.h"
#include "activations.h"

constexpr int PAIRS = RESULTS / 2;
const int M = x_shape[0], K = x_shape[1], H = w_shape[0] / 2;
const int lane = thread_index_in_simdgroup;

const int own = threadgroup_position_in_grid.x * ROWS;
const int first = max(min(own, M - ROWS), 0);
const int tile = threadgroup_position_in_grid.y * 2 + simdgroup_index_in_threadgroup;
const int begin = (tile * (32 / LANES) + lane / LANES) * PAIRS;
if (begin >= H) {
  return;
}

int outputs[RESULTS], rows[ROWS];
UNROLL
for (int r = 0; r < PAIRS; r++) {
  outputs[r] = min(begin + r, H - 1);
  outputs[PAIRS + r] = H + outputs[r];
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
for (int r = 0; r < PAIRS; r++) {
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    const T gate = static_cast<T>(lanes_sum<LANES>(result[m][r]));
    const T up = static_cast<T>(lanes_sum<LANES>(result[m][PAIRS + r]));
    if (lane % LANES == 0 && begin + r < H && first + m >= own && first + m < M) {
      y[size_t(first + m) * H + begin + r] = swiglu<T>(gate, up, limit[0]);
    }
  }
}
