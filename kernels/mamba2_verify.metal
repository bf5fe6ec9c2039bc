// Mamba2's recurrence: the first n rows of a tape, then new rows; the state is read once and written once.
//
// Inputs:  of any strides: state [1, H, Dh, Ds] float
//          tape_x [1, P, H, Dh], tape_B [1, P, G, Ds], tape_dt [1, P, H] float
//          accepted [1] int: n, from 0 to P; last [1] int
//          x [1, R, H, Dh], B and C [1, R, G, Ds], dt [1, R, H] float; A_log, D [H]
// Outputs: y [1, R, H, Dh] of the new rows
//          state_out [1, H, Dh, Ds] float: after the n rows, or, where last is not 0, after all
// Template: InT: the type of y. Ds.
// Grid (32, Dh, H), threadgroup (32, any, 1): 32 lanes for a row of the state.
//
// Rows beyond n are not read: they may hold anything. Every operation is that of mlx-lm's kernel for one row.

#include "mamba2.h"

constexpr int N = Ds / 32;
const int R = x_shape[1], H = x_shape[2], Dh = x_shape[3], P = tape_x_shape[1];
const int n = clamp(int(accepted[0]), 0, P);
const int head = thread_position_in_grid.z, d = thread_position_in_grid.y, group = head / (H / int(B_shape[2]));
const int first = thread_index_in_simdgroup * N;
const float A = -metal::fast::exp(static_cast<float>(A_log[head * A_log_strides[0]]));

float values[N];
for (int i = 0; i < N; i++) {
  values[i] = state[head * state_strides[1] + d * state_strides[2] + (first + i) * state_strides[3]];
}
for (int t = 0; t < n; t++) {
  const float step = tape_dt[t * tape_dt_strides[1] + head * tape_dt_strides[2]];
  const float in = static_cast<float>(tape_x[t * tape_x_strides[1] + head * tape_x_strides[2] + d * tape_x_strides[3]]);
  const size_t at = t * tape_B_strides[1] + group * tape_B_strides[2] + first * tape_B_strides[3];
  mamba2_row(values, metal::fast::exp(A * step), step, in, tape_B + at, tape_B_strides[3]);
}
const size_t own = (size_t(head) * Dh + d) * Ds + first;
if (!last[0]) {
  for (int i = 0; i < N; i++) {
    state_out[own + i] = values[i];
  }
}
for (int t = 0; t < R; t++) {
  const float step = dt[t * dt_strides[1] + head * dt_strides[2]];
  const float in = static_cast<float>(x[t * x_strides[1] + head * x_strides[2] + d * x_strides[3]]);
  const size_t at = t * B_strides[1] + group * B_strides[2] + first * B_strides[3];
  mamba2_row(values, metal::fast::exp(A * step), step, in, B + at, B_strides[3]);
  float out = 0.0f;
  for (int i = 0; i < N; i++) {
    out += values[i] * C[t * C_strides[1] + group * C_strides[2] + (first + i) * C_strides[3]];
  }
  out = simd_sum(out);
  if (thread_index_in_simdgroup == 0) {
    y[(size_t(t) * H + head) * Dh + d] = static_cast<InT>(out + in * D[head * D_strides[0]]);
  }
}
if (last[0]) {
  for (int i = 0; i < N; i++) {
    state_out[own + i] = values[i];
  }
}
