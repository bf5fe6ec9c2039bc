#include "contraction.h"
#include "unroll.h"

// Four products to each of a thread's sums: sum[m * TM + t] += w[t][k + i] * x[rows[m] + k + i] for i = 0, 1, 2, 3 in turn.
// x, and w with rows of K values, lie in device or constant space. TAIL: what lies past K counts as zero.
template <int ROWS, int TM, bool TAIL, typename X, typename W>
inline void add_four(thread float* sum, X x, const thread int* rows, W w, int k, int K) {
  float weight[TM * 4]; // kept while the rows of x, which are more, come one by one
  UNROLL
  for (int t = 0; t < TM; t++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      weight[4 * t + i] = !TAIL || k + i < K ? float(w[t * K + k + i]) : 0.0f;
    }
  }
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    float value[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
      value[i] = !TAIL || k + i < K ? float(x[rows[m] + k + i]) : 0.0f;
    }
    UNROLL
    for (int t = 0; t < TM; t++) {
      UNROLL
      for (int i = 0; i < 4; i++) {
        sum[m * TM + t] = MULTIPLY_ADD(weight[4 * t + i], value[i], sum[m * TM + t]);
      }
    }
  }
}
