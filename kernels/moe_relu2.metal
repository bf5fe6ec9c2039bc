// h = relu(x . up)^2 of each (row, expert) pair, up quantized: an expert's weights are requested once for 8 rows.
//
// Inputs   up [EXPERTS, N, K * BITS / 32] uint32; its _scales, _biases [EXPERTS, N, K / GROUP] (no biases:
//          scales twice); x [M, K]; from moe_route: tokens [P], experts [P], starts [P + 1]
// Output   h [P, N], in the order of tokens
// Template T (x, h), S (scales), BITS, GROUP, KIND, VALUES, ROWS (1, 2, 4 or 8: of one expert, processed together)
// Grid     x: 32; y: 2 per 8 values of N; z: P, one for each distinct expert;  threadgroup (32, 2, 1)

#include "experts.h"
#include "activations.h"

const int slot = threadgroup_position_in_grid.z, lane = thread_index_in_simdgroup;
const int N = up_shape[1], K = x_shape[1];
const int start = starts[slot], end = starts[slot + 1];
const int begin = (threadgroup_position_in_grid.y * 2 + simdgroup_index_in_threadgroup) * COLUMNS;
if (start == end) {
  return;
}

Visit<T, S, 1> visit = {{of_expert<BITS, KIND, GROUP>(up, up_scales, up_biases, experts[slot], N, K)}, x, N, K, 0};
for (int first = start; first < end; first += ROWS) {
  visit.count = min(end - first, ROWS);
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    visit.rows[m] = tokens[min(first + m, end - 1)] * K;
  }
  float product[1] = {};
  visit_product<T, S, BITS, KIND, GROUP, VALUES, ROWS>(visit, begin, lane, product);
  const int own = first + lane / COLUMNS, column = begin + lane % COLUMNS;
  if (lane < COLUMNS * visit.count) {
    const T open = at_least(static_cast<T>(product[0]), T(0));
    h[size_t(own) * N + column] = open * open;
  }
}
