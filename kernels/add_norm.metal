// h = x + r, rounded to T, and its RMS norm times a weight, for each row on its own.
//
// Inputs   x, r [M, H] of T; weight [H]; eps [1] float
// Outputs  h [M, H] of T; normed [M, H] of O
// Template T, O (the type that T and the weight's promote to), CHUNKS (of four values that a thread of MLX's keeps), SHARE (of
//          MLX's threads that one does the work of: with a large CHUNKS a GPU may refuse a group of 1,024)
// Grid     M groups of as many threads as cover H with SHARE * CHUNKS * 4 values each, whole simdgroups

#include "rms.h"

const int H = x_shape[1], threads = threads_per_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const size_t row = size_t(threadgroup_position_in_grid.x) * H;
threadgroup float partial[32];

float kept[SHARE][CHUNKS][READS] = {};
UNROLL
for (int of = 0; of < SHARE; of++) {
  float squares = 0.0f;
  UNROLL
  for (int c = 0; c < CHUNKS; c++) {
    const int first = ((c * SHARE + of) * threads + int(thread_position_in_threadgroup.x)) * READS;
    thread float* own = kept[of][c];
    if (first + READS <= H) {
      UNROLL
      for (int i = 0; i < READS; i++) {
        const T sum = x[row + first + i] + r[row + first + i];
        h[row + first + i] = sum;
        own[i] = static_cast<float>(sum);
      }
    } else {
      UNROLL
      for (int i = 0; i < READS; i++) {
        if (first + i < H) {
          const T sum = x[row + first + i] + r[row + first + i];
          h[row + first + i] = sum;
          own[i] = static_cast<float>(sum);
        }
      }
    }
    squares = plus_squares(squares, own);
  }
  squares = simd_sum(squares);
  if (lane == 0) {
    partial[of * (threads / 32) + simdgroup_index_in_threadgroup] = squares;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const float inverse = inverse_rms(simd_sum(lane < SHARE * threads / 32 ? partial[lane] : 0.0f), H, eps[0]);

UNROLL
for (int of = 0; of < SHARE; of++) {
  UNROLL
  for (int c = 0; c < CHUNKS; c++) {
    const int first = ((c * SHARE + of) * threads + int(thread_position_in_threadgroup.x)) * READS;
    UNROLL
    for (int i = 0; i < READS; i++) {
      if (first + i < H) {
        normed[row + first + i] = normalized<O>(kept[of][c][i], inverse, static_cast<O>(weight[first + i]));
      }
    }
  }
}
