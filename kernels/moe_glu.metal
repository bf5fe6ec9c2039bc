// h = swiglu(x . gate, x . up) of each (row, expert) pair, both weights quantized: an expert's weights are requested once
// for ROWS rows, and x once for gate and up.
//
// Inputs   gate, up [EXPERTS, N, K * BITS / 32] uint32; their _scales, _biases [EXPERTS, N, K / GROUP] (no
//          biases: scales twice); x [M, K]; limit [1] of T: infinity where nothing is clamped; from moe_route: tokens [P], experts
//          [P], starts [P + 1]
// Output   h [P, N], in the order of tokens
// Template T (x, limit, h), S (scales), BITS, GROUP, KIND, VALUES, ROWS (1, 2, 4 or 8: of one expert, processed together)
// Grid     x: 32; y: 2 per 8 values of N; z: P, one for each distinct expert;  threadgroup (32, 2, 1)

#include "experts.h"
#include "activations.h"

const int slot = threadgroup_position_in_grid.z, lane = thread_index_in_simdgroup;
const int N = gate_shape[1], K = x_shape[1];
const int start = starts[slot], end = starts[slot + 1];
const int begin = (threadgroup_position_in_grid.y * 2 + simdgroup_index_in_threadgroup) * COLUMNS;
if (start == end) {
  return;
}

Visit<T, S, 2> visit = {
    {of_expert<BITS, KIND, GROUP>(gate, gate_scales, gate_biases, experts[slot], N, K),
     of_expert<BITS, KIND, GROUP>(up, up_scales, up_biases, experts[slot], N, K)},
    x, N, K, 0};
for (int first = start; first < end; first += ROWS) {
  visit.count = min(end - first, ROWS);
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    visit.rows[m] = tokens[min(first + m, end - 1)] * K;
  }
  float products[2] = {};
  visit_product<T, S, BITS, KIND, GROUP, VALUES, ROWS>(visit, begin, lane, products);
  const int own = first + lane / COLUMNS, column = begin + lane % COLUMNS;
  if (lane < COLUMNS * visit.count) {
    h[size_t(own) * N + column] = swiglu<T>(static_cast<T>(products[0]), static_cast<T>(products[1]), limit[0]);
  }
}
