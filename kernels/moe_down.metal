// y[m] = sum over m's experts, in ascending order, of weight * (h . down), down quantized; then the shared part is added.
//
// Inputs   w [EXPERTS, N, K * BITS / 32] uint32; scales, biases [EXPERTS, N, K / GROUP] (no biases: scales
//          twice); h [P, K]; from moe_route: weights [P] float32, experts [P], starts [P + 1], places [P]; sizes [4] int32,
//          the first is top_k; shared [M, N] of T; shared_gate [M] of T; kind [1] int32: the
//          shared part is 0: absent, 1: added, 2: added times sigmoid(shared_gate)
// Output   y [M, N]
// Template T (h, shared, shared_gate, y), S (scales), BITS, GROUP, KIND, VALUES, ROWS (1, 2, 4 or 8: of one expert, processed together),
//          SIMDGROUPS, PAIRS (at least P)
// Grid     x: 32; y: SIMDGROUPS per 4 values of N;  threadgroup (32, SIMDGROUPS, 1)

#include "experts.h"
#include "activations.h"

const int lane = thread_index_in_simdgroup, worker = simdgroup_index_in_threadgroup;
const int P = h_shape[0], K = h_shape[1], N = w_shape[1], top_k = sizes[0];
const int begin = threadgroup_position_in_grid.y * COLUMNS;

// Each simdgroup processes every SIMDGROUPS-th expert; their sums are added in the experts' order.
threadgroup float products[PAIRS * COLUMNS];
for (int slot = worker; slot < P && starts[slot] < P; slot += SIMDGROUPS) {
  const int start = starts[slot], end = starts[slot + 1];
  Visit<T, S, 1> visit = {{of_expert<BITS, KIND, GROUP>(w, scales, biases, experts[slot], N, K)}, h, N, K, 0};
  for (int first = start; first < end; first += ROWS) {
    visit.count = min(end - first, ROWS);
    UNROLL
    for (int m = 0; m < ROWS; m++) {
      visit.rows[m] = min(first + m, end - 1) * K;
    }
    float product[1] = {};
    visit_product<T, S, BITS, KIND, GROUP, VALUES, ROWS>(visit, begin, lane, product);
    if (lane < COLUMNS * visit.count) {
      products[first * COLUMNS + lane] = float(static_cast<T>(product[0]));
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int row = (32 * worker + lane) / COLUMNS, column = begin + lane % COLUMNS;
if (row < P / top_k) {
  float sum = 0;
  for (int i = 0; i < top_k; i++) {
    const int place = places[row * top_k + i];
    sum = MULTIPLY_ADD(weights[place], products[place * COLUMNS + lane % COLUMNS], sum);
  }
  T total = static_cast<T>(sum);
  if (kind[0] == 1) {
    total = total + shared[row * N + column];
  } else if (kind[0] == 2) {
    const T part = sigmoid(static_cast<T>(shared_gate[row])) * shared[row * N + column];
    total = total + part;
  }
  y[row * N + column] = total;
}
