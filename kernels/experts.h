// Products of the rows that visit one expert with four rows of its weights, which are requested once.

#include "quantized.h"

constant constexpr int COLUMNS = 4; // weight rows per simdgroup
constant constexpr int VISITORS = 8; // maximum rows of x processed together

// One expert's matrices [N, K], N a multiple of COLUMNS, and where rows of x begin that visit it: `count` of them, then the
// last again.
template <typename T, typename S, int SOURCES>
struct Visit {
  Source<S> sources[SOURCES];
  const device T* x;
  int N, K, count;
  int rows[VISITORS];
};

// The matrix of `expert` among all of them.
template <int BITS, int KIND, int GROUP, typename S>
METAL_FUNC Source<S> of_expert(
    const device uint32_t* w, const device S* scales, const device S* biases, int expert, int N, int K) {
  const size_t row = size_t(expert) * N, of_row = scales_of_row<KIND, GROUP>(K);
  return {(const device uint8_t*)w + row * (K / 8 * BITS), scales + row * of_row, biases + row * of_row};
}

// Lane COLUMNS * m + c gets the products of row m with row begin + c of each source; x is requested once for all.
// No more than 16 sums are in registers: of more than 4 rows (of two sources 2) fewer weight rows go at a time.
template <typename T, typename S, int BITS, int KIND, int GROUP, int VALUES, int ROWS, int SOURCES>
METAL_FUNC void rows_product(
    const thread Visit<T, S, SOURCES>& visit, int begin, int lane, thread float (&own)[SOURCES]) {
  constexpr int EACH = ROWS * SOURCES > 8 ? 1 : ROWS * SOURCES > 4 ? 2 : 4;
  for (int column = 0; column < COLUMNS; column += EACH) {
    int outputs[SOURCES * EACH];
    UNROLL
    for (int r = 0; r < SOURCES * EACH; r++) {
      outputs[r] = begin + column + r % EACH;
    }
    float result[ROWS][SOURCES * EACH] = {};
    gathered_products<T, S, BITS, KIND, GROUP, VALUES, 32>(
        visit.sources, visit.x, visit.rows, outputs, visit.K, lane, result);
    UNROLL
    for (int r = 0; r < SOURCES * EACH; r++) {
      UNROLL
      for (int m = 0; m < ROWS; m++) {
        const float sum = simd_sum(result[m][r]);
        own[r / EACH] = lane == m * COLUMNS + column + r % EACH ? sum : own[r / EACH];
      }
    }
  }
}

// The same, by the fewest of 1, 2, 4, ... ROWS rows that hold those of the visit.
template <typename T, typename S, int BITS, int KIND, int GROUP, int VALUES, int ROWS, int SOURCES>
METAL_FUNC void visit_product(
    const thread Visit<T, S, SOURCES>& visit, int begin, int lane, thread float (&own)[SOURCES]) {
  if constexpr (ROWS > 1) {
    if (visit.count <= ROWS / 2) {
      visit_product<T, S, BITS, KIND, GROUP, VALUES, ROWS / 2>(visit, begin, lane, own);
      return;
    }
  }
  rows_product<T, S, BITS, KIND, GROUP, VALUES, ROWS>(visit, begin, lane, own);
}
