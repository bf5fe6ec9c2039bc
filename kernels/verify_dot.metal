// Each row of x times the one row of w, in the bits of MLX's dot product of that row alone, for K <= 16384.
// Inputs: x (M, K), w (1, K) of type T; K, M (int). Output: y (M, 1). Template: T; ROWS of x per threadgroup (<= 16).
// Grid in threadgroups: (ceil(M / ROWS), 1, 1). Threadgroup: (512, 1, 1); each simdgroup sums 1024 values of K.

#include "contraction.h"
#include "unroll.h"

constexpr int SPAN = 16 / sizeof(T);  // values that a lane takes at a time
threadgroup float partial[ROWS * 16];
const int lane = thread_index_in_simdgroup, simd_id = simdgroup_index_in_threadgroup;
const int own_m = threadgroup_position_in_grid.x * ROWS, first_m = max(min(own_m, M - ROWS), 0);
const auto rows_x = x + size_t(first_m) * K;
int rows[ROWS];
UNROLL
for (int m = 0; m < ROWS; m++) {
  rows[m] = min(m, M - 1 - first_m) * K;
}

float4 sum[ROWS];
UNROLL
for (int m = 0; m < ROWS; m++) {
  sum[m] = 0.0f;
}
for (int step = 0; step < 32; step += SPAN) {
  const int k = 1024 * simd_id + 32 * step + lane * SPAN;
  if (k + SPAN <= K) {
    UNROLL
    for (int j = 0; j < SPAN; j += 4) {
      const int i = k + j;
      float4 weight = 0.0f, values = 0.0f;
      UNROLL
      for (int e = 0; e < 4; e++) {
        weight[e] = float(w[i + e]);
      }
      UNROLL
      for (int m = 0; m < ROWS; m++) {
        UNROLL
        for (int e = 0; e < 4; e++) {
          values[e] = float(rows_x[rows[m] + i + e]);
        }
        sum[m] = MULTIPLY_ADD(values, weight, sum[m]);
      }
    }
  } else {
    UNROLL
    for (int j = 0; j < SPAN; j++) {
      if (k + j < K) {
        const float weight = float(w[k + j]);
        UNROLL
        for (int m = 0; m < ROWS; m++) {
          sum[m][j & 3] = MULTIPLY_ADD(float(rows_x[rows[m] + k + j]), weight, float(sum[m][j & 3]));
        }
      }
    }
  }
}

UNROLL
for (int m = 0; m < ROWS; m++) {
  const float in_lanes = simd_sum(sum[m][0] + sum[m][1] + sum[m][2] + sum[m][3]);
  if (lane == 0) {
    partial[16 * m + simd_id] = in_lanes;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
// Simdgroup m adds what row m got in the 16 simdgroups, with 16 lanes as in MLX's kernel.
if (simd_id < ROWS && lane < 16) {
  const float total = simd_sum(partial[16 * simd_id + lane]);
  if (lane == 0 && first_m + simd_id >= own_m && first_m + simd_id < M) {
    y[first_m + simd_id] = static_cast<T>(total);
  }
}
