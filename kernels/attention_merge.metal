// The output of an attention over chunks of keys: the chunks in ascending order, then the sink, then the gate.
//
// Inputs   partials [N * Hkv, chunks, R, Dv] float, each chunk's sum of p v; ml [N * Hkv, chunks, R, 2] float, its largest
//          score and its sum of p = exp(score - largest). R = G * L: row g * L + i is head g of the KV head's G at query i
//          of any strides: sinks [Hq], read with SINKS; gate of T, logits: [N, L, Hq, 1] where shares[1] is 1,
//          [N, L, Hq, Dv] where it is 2, not read where it is 0; Hq = Hkv * G. shares [2] int32, the first is N
// Output   y [N, L, Hq * Dv] of T
// Template T, SINKS
// Grid     (Dv, N * Hq, L), any threadgroup
//
// A chunk in which a row attends to nothing (sum 0) is skipped, so that bits do not depend on the number of chunks.

#include "activations.h"

const int Hq = threads_per_grid.y / shares[0], chunks = partials_shape[1], R = partials_shape[2], Dv = partials_shape[3];
const int L = threads_per_grid.z, G = R / L;
const int d = thread_position_in_grid.x, i = thread_position_in_grid.z;
const int asking = thread_position_in_grid.y, text = asking / Hq, head = asking % Hq;
const size_t first = size_t(asking / G) * chunks * R + asking % G * L + i;

float largest = SINKS ? float(sinks[head * sinks_strides[0]]) : -INFINITY;
for (int c = 0; c < chunks; c++) {
  const size_t row = first + size_t(c) * R;
  const float m = ml[2 * row];
  largest = ml[2 * row + 1] != 0.0f && m > largest ? m : largest;
}
float sum = 0.0f, out = 0.0f;
for (int c = 0; c < chunks; c++) {
  const size_t row = first + size_t(c) * R;
  const float l = ml[2 * row + 1];
  if (l != 0.0f) {
    const float factor = metal::fast::exp(ml[2 * row] - largest);
    sum = fma(l, factor, sum);
    out = fma(partials[row * Dv + d], factor, out);
  }
}
if constexpr (SINKS) {
  sum += metal::fast::exp(float(sinks[head * sinks_strides[0]]) - largest);
}

// The sign of a zero may come from rows that this one does not attend to; + 0 makes it positive.
T value = static_cast<T>(out / sum + 0.0f);
if (shares[1]) {
  const int64_t at = text * gate_strides[0] + i * gate_strides[1] + head * gate_strides[2] +
      (shares[1] == 2 ? d * gate_strides[3] : 0);
  value = value * sigmoid(static_cast<T>(gate[at]));
}
y[((size_t(text) * L + i) * Hq + head) * Dv + d] = value;
