// Each row of x times the one row of w, in the bits of MLX's dot product of that row alone, for K <= 16384.
// Inputs: x (M, K), w (1, K) of type T; K, M (int). Output: y (M, 1). Template: T; ROWS of x per threadgroup (<= 16).
// Grid in threadgroups: (ceil(M / ROWS), 1, 1). Threadgroup: (256, 1, 1): MLX's has 512 threads, each simdgroup of which sums
// a span of 1024 values of K; here each sums two. A thread has many registers, and a GPU may refuse 512 such threads.

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

for (int span = simd_id; span < 16; span += 8) {
  float4 sum[ROWS];
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    sum[m] = 0.0f;
  }
  for (int step = 0; step < 32; step += SPAN) {
    const int k = 1024 * span + 32 * step + lane * SPAN;
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
      partial[16 * m + span] = in_lanes;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
// A simdgroup adds what a row got in the 16 spans, with 16 lanes as in MLX's kernel.
for (int m = simd_id; m < ROWS && lane < 16; m += 8) {
  const float total = simd_sum(partial[16 * m + lane]);
  if (lane == 0 && first_m + m >= own_m && first_m + m < M) {
    y[first_m + m] = static_cast<T>(total);
  }
}
