// Products of the rows that visit one expert with four rows of its weights, which are requested once.

#include "quantized.h"

constant constexpr int COLUMNS = 4; // weight rows that a simdgroup takes

// One expert's matrix [N, K], N a multiple of COLUMNS, and where the rows of x begin that visit it: `count` of them, then
// the last again.
template <typename T, typename S>
struct Visit {
  const device uint8_t* w;
  const device S* scales;
  const device S* biases;
  const device T* x;
  int N, K, count;
  int rows[8];
};

// Lane COLUMNS * m + c gets the product of row m with weight row begin + c. More than 4 rows go with 2 weight rows at a
// time, so that never more than 16 sums are in registers.
template <typename T, typename S, int BITS, bool FP, int GROUP, int VALUES, int ROWS>
METAL_FUNC float rows_product(const thread Visit<T, S>& visit, int begin, int lane) {
  constexpr int RESULTS = ROWS > 4 ? 2 : 4;
  float own = 0;
  for (int column = 0; column < COLUMNS; column += RESULTS) {
    int outputs[RESULTS];
    UNROLL
    for (int r = 0; r < RESULTS; r++) {
      outputs[r] = begin + column + r;
    }
    float result[ROWS][RESULTS] = {};
    gathered_products<T, S, BITS, FP, GROUP, VALUES, 32>(
        visit.w, visit.scales, visit.biases, visit.x, visit.rows, outputs, visit.K, lane, result);
    UNROLL
    for (int r = 0; r < RESULTS; r++) {
      UNROLL
      for (int m = 0; m < ROWS; m++) {
        const float sum = simd_sum(result[m][r]);
        own = lane == m * COLUMNS + column + r ? sum : own;
      }
    }
  }
  return own;
}

// The same, by the fewest of 1, 2, 4, ... ROWS rows that hold those of the visit.
template <typename T, typename S, int BITS, bool FP, int GROUP, int VALUES, int ROWS>
METAL_FUNC float visit_product(const thread Visit<T, S>& visit, int begin, int lane) {
  if constexpr (ROWS > 1) {
    if (visit.count <= ROWS / 2) {
      return visit_product<T, S, BITS, FP, GROUP, VALUES, ROWS / 2>(visit, begin, lane);
    }
  }
  return rows_product<T, S, BITS, FP, GROUP, VALUES, ROWS>(visit, begin, lane);
}

// The same, with `expert`'s matrix of w.
template <typename T, typename S, int BITS, bool FP, int GROUP, int VALUES, int ROWS>
METAL_FUNC float expert_product(
    const device uint32_t* w,
    const device S* scales,
    const device S* biases,
    thread Visit<T, S>& visit,
    int expert,
    int begin,
    int lane) {
  const size_t row = size_t(expert) * visit.N, groups = visit.K / GROUP;
  visit.w = (const device uint8_t*)w + row * (visit.K / 8 * BITS);
  visit.scales = scales + row * groups;
  visit.biases = biases + row * groups;
  return visit_product<T, S, BITS, FP, GROUP, VALUES, ROWS>(visit, begin, lane);
}
