// RMS norm (or none) and rotary positions of queries and keys, heads first; one simdgroup per row and head.
//
// Inputs   of any strides: q [B, L, Hq, >= D], k [B, L, Hk, >= D] of T; q_weight, k_weight [D], where NORM
//          freqs float: [dims / 2] where FREQS, else [1], the base's log2; offset [B] int: the position of row 0
//          layout [4] int: D, dims, and elements from pair to pair and within one. eps [1] float
//          factors [2] float: of positions, of rotated values
// Outputs  queries [B, Hq, L, D], keys [B, Hk, L, D] of O
// Template T, O (the type that T and the weights' promote to), NORM, FREQS, BLOCKS (of 128 values of a head)
// Grid     (32, Hq + Hk, B * L), threadgroup (32, 1, 1)

#include "rms.h"

const int L = q_shape[1], Hq = q_shape[2];
const int D = layout[0], pairs = layout[1] / 2;
const uint3 at = threadgroup_position_in_grid;
const int head = at.y, row = at.z % L, text = at.z / L;
const int lane = thread_index_in_simdgroup;
const bool query = head < Hq;
const int own = query ? head : head - Hq;
const constant int64_t* steps = query ? q_strides : k_strides;
const int64_t from = text * steps[0] + row * steps[1] + own * steps[2];
device O* out = (query ? queries : keys) + (size_t(text * (query ? Hq : k_shape[2]) + own) * L + row) * D;
threadgroup O values[BLOCKS * 128];

if constexpr (NORM) {
  float kept[BLOCKS][READS] = {};
  float squares = 0.0f;
  UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    UNROLL
    for (int i = 0; i < READS; i++) {
      const int d = (b * 32 + lane) * READS + i;
      if (d < D) {
        kept[b][i] = static_cast<float>(
            query ? static_cast<T>(q[from + d * steps[3]]) : static_cast<T>(k[from + d * steps[3]]));
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
    values[d] = query ? static_cast<O>(q[from + d * steps[3]]) : static_cast<O>(k[from + d * steps[3]]);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const float position = factors[0] * static_cast<float>(offset[text] + row);
for (int p = lane; p < pairs; p += 32) {
  const float share = static_cast<float>(p) / static_cast<float>(pairs);
  const float rate = FREQS ? 1.0f / freqs[p * freqs_strides[0]] : metal::precise::exp2(-share * freqs[0]);
  const float angle = position * rate;
  const float cosine = metal::fast::cos(angle), sine = metal::fast::sin(angle);
  const int one = p * layout[2], two = one + layout[3];
  const O factor = static_cast<O>(factors[1]);
  const float a = static_cast<float>(values[one] * factor), b = static_cast<float>(values[two] * factor);
  out[one] = static_cast<O>(MULTIPLY_ADD(a, cosine, -PRODUCT(b, sine)));
  out[two] = static_cast<O>(MULTIPLY_ADD(a, sine, PRODUCT(b, cosine)));
}
for (int d = 2 * pairs + lane; d < D; d += 32) {
  out[d] = values[d];
}
