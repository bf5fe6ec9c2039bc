// RMS norm (or none) and rotary positions of queries and keys, heads first; one simdgroup for each row of each head.
//
// Inputs   of any strides: q [1, L, Hq, >= D], k [1, L, Hk, >= D] of T; q_weight, k_weight [D], where NORM
//          freqs float: [dims / 2] where FREQS, else [1], the base's log2; offset [1] int: the position of row 0
//          layout [4] int: D, dims, and elements from pair to pair and within one. eps [1] float
//          factors [2] float: of positions, of what is rotated
// Outputs  queries [1, Hq, L, D], keys [1, Hk, L, D] of O
// Template T, O (the type that T and the weights' promote to), NORM, FREQS, BLOCKS (of 128 values of a head)
// Grid     (32, Hq + Hk, L), group of threads (32, 1, 1)

#include "rms.h"

const int L = q_shape[1], Hq = q_shape[2];
const int D = layout[0], pairs = layout[1] / 2;
const int head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const int lane = thread_index_in_simdgroup;
const bool query = head < Hq;
const int64_t from =
    query ? row * q_strides[1] + head * q_strides[2] : row * k_strides[1] + (head - Hq) * k_strides[2];
device O* out = query ? queries + (size_t(head) * L + row) * D : keys + (size_t(head - Hq) * L + row) * D;
threadgroup O values[BLOCKS * 128];

if (NORM) {
  float kept[BLOCKS][READS] = {};
  float squares = 0.0f;
  UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    UNROLL
    for (int i = 0; i < READS; i++) {
      const int d = (b * 32 + lane) * READS + i;
      if (d < D) {
        kept[b][i] = static_cast<float>(
            query ? static_cast<T>(q[from + d * q_strides[3]]) : static_cast<T>(k[from + d * k_strides[3]]));
      }
    }
    squares += simd_sum(plus_squares(0.0f, kept[b]));
  }
  const float inverse = inverse_rms(squares, D, eps[0]);
  UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    UNROLL
    for (int i = 0; i < READS; i++) {
      const int d = (b * 32 + lane) * READS + i;
      if (d < D) {
        const O weight = query ? static_cast<O>(q_weight[d * q_weight_strides[0]])
                               : static_cast<O>(k_weight[d * k_weight_strides[0]]);
        values[d] = normalized<O>(kept[b][i], inverse, weight);
      }
    }
  }
} else {
  for (int d = lane; d < D; d += 32) {
    values[d] = query ? static_cast<O>(q[from + d * q_strides[3]]) : static_cast<O>(k[from + d * k_strides[3]]);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const float position = factors[0] * static_cast<float>(offset[0] + row);
for (int p = lane; p < pairs; p += 32) {
  float rate;
  if (FREQS) {
    rate = 1.0f / freqs[p * freqs_strides[0]];
  } else {
    const float share = static_cast<float>(p) / static_cast<float>(pairs);
    rate = metal::precise::exp2(-share * freqs[0]);
  }
  const float angle = position * rate;
  const float cosine = metal::fast::cos(angle), sine = metal::fast::sin(angle);
  const int one = p * layout[2], two = one + layout[3];
  const O factor = static_cast<O>(factors[1]);
  const float a = static_cast<float>(values[one] * factor), b = static_cast<float>(values[two] * factor);
  out[one] = static_cast<O>(a * cosine - b * sine);
  out[two] = static_cast<O>(a * sine + b * cosine);
}
for (int d = 2 * pairs + lane; d < D; d += 32) {
  out[d] = values[d];
}
