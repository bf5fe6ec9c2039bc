// The inputs of a gated-delta recurrence for new rows: their causal depthwise convolution, after the first n rows
// of a tape, with SiLU; q and k normed per head; and the gates. One simdgroup per unit and row of B sequences.
//
// Inputs   of any strides: before [B, taps-1+P, C]: the rows before and on the tape; w [C, taps, 1]; both of T
//          x [B, T, G, C/G] of T, each group's share of q, k and v; accepted [B] int: n, from 0 to P
//          a, b [B, T, G', Hv/G']; A_log, dt_bias [Hv]
//          layout [2] int: key heads Hk, values D of one. scales [2] of T: of q and of k. eps [1] float
// Outputs  q, k [B, T, Hk, D], v [B, T, C - 2 Hk D], rows [B, taps-1+T, C]: those before the new ones, and these, of T
//          g [B, T, Hv] float, beta [B, T, Hv] of B
// Template T, A (what the types of a and dt_bias promote to), B (b's), BLOCKS (of 128 values of a unit)
// Grid     (32, units, B * (taps-1+T)), threadgroup (32, any, 1). Units: q's heads, k's, v in BLOCKS, gates in 32s
//
// Sums are in float, from the oldest tap on, and rounded to T; all later values are rounded as by MLX's ops.

#include "rms.h"
#include "activations.h"
#include "delta_gates.h"

const int C = w_shape[0], taps = w_shape[1], behind = taps - 1, Hv = A_log_shape[0];
const int Hk = layout[0], D = layout[1], keys = Hk * D;
const int group_keys = keys / x_shape[2], group_values = (C - 2 * keys) / x_shape[2], group_heads = a_shape[3];
const int unit = thread_position_in_grid.y, row = thread_position_in_grid.z;  // of all sequences
const int text = row / (behind + x_shape[1]), t = row % (behind + x_shape[1]) - behind;
const size_t fresh = size_t(text) * x_shape[1] + t;  // among all new rows
const int n = clamp(int(accepted[text]), 0, int(before_shape[1]) - behind);
const int lane = thread_index_in_simdgroup;

const bool normed = unit < 2 * Hk;
const int start = normed ? unit * D : 2 * keys + (unit - 2 * Hk) * BLOCKS * 128;
if (start >= C && !normed) {
  const int head = (unit - 2 * Hk - (C - 2 * keys + BLOCKS * 128 - 1) / (BLOCKS * 128)) * 32 + lane;
  if (t >= 0 && head < Hv) {
    const int group = head / group_heads, inner = head % group_heads;
    const A step = static_cast<A>(a[text * a_strides[0] + t * a_strides[1] + group * a_strides[2] + inner * a_strides[3]]) +
        static_cast<A>(dt_bias[head * dt_bias_strides[0]]);
    g[fresh * Hv + head] = decay_of(static_cast<float>(A_log[head * A_log_strides[0]]), step);
    beta[fresh * Hv + head] = sigmoid(static_cast<B>(b[text * b_strides[0] + t * b_strides[1] + group * b_strides[2] + inner * b_strides[3]]));
  }
  return;
}

const int64_t own = text * before_strides[0];
const int end = normed ? start + D : min(start + BLOCKS * 128, C);
if (t < 0) {
  for (int c = start + lane; c < end; c += 32) {
    rows[size_t(row) * C + c] = before[own + (n + t + behind) * before_strides[1] + c * before_strides[2]];
  }
  return;
}

float kept[BLOCKS][READS] = {};
float squares = 0.0f;
UNROLL
for (int block = 0; block < BLOCKS; block++) {
  UNROLL
  for (int i = 0; i < READS; i++) {
    const int c = start + (block * 32 + lane) * READS + i;
    if (c < end) {
      const int part = min(c / keys, 2), inner = c - part * keys, width = part < 2 ? group_keys : group_values;
      const int64_t place = text * x_strides[0] + inner / width * x_strides[2] + (part * group_keys + inner % width) * x_strides[3];
      T newest = T(0);
      float sum = 0.0f;
      for (int tap = 0; tap < taps; tap++) {
        const int from = t + tap;
        newest = from < behind ? before[own + (n + from) * before_strides[1] + c * before_strides[2]]
                               : x[(from - behind) * x_strides[1] + place];
        const float weight = static_cast<float>(w[c * w_strides[0] + tap * w_strides[1]]);
        sum = MULTIPLY_ADD(static_cast<float>(newest), weight, sum);
      }
      rows[size_t(row) * C + c] = newest;
      const T value = static_cast<T>(sum);
      const T rate = sigmoid(value);
      const T out = value * rate;
      kept[block][i] = static_cast<float>(out);
    }
  }
  squares += simd_sum(plus_squares(0.0f, kept[block]));
}

const float inverse = inverse_rms(squares, D, eps[0]);
UNROLL
for (int block = 0; block < BLOCKS; block++) {
  UNROLL
  for (int i = 0; i < READS; i++) {
    const int c = start + (block * 32 + lane) * READS + i;
    if (c < end) {
      if (!normed) {
        v[fresh * (C - 2 * keys) + c - 2 * keys] = static_cast<T>(kept[block][i]);
      } else if (unit < Hk) {
        q[fresh * keys + c] = normalized<T>(kept[block][i], inverse, scales[0]);
      } else {
        k[fresh * keys + c - keys] = normalized<T>(kept[block][i], inverse, scales[1]);
      }
    }
  }
}
