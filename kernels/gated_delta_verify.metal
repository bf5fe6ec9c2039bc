// The gated delta rule: the first n rows of a tape, then new rows; the state is read once and written once.
//
// Inputs:  state [B, Hv, Dv, Dk] float
//          tape_k [B, P, Hk, Dk], tape_v [B, P, Hv, Dv], tape_g [B, P, Hv] or [B, P, Hv, Dk], tape_beta [B, P, Hv]
//          accepted [B], or [1] for all, int: n, from 0 to P; last [1] int
//          q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g and beta as on the tape
// Outputs: y [B, T, Hv, Dv] of the new rows
//          state_out [B, Hv, Dv, Dk] float: after the n rows, or, where last is not 0, after all
// Template: InT: the type of y. Dk. LANES that share a row of the state: 32 or 4. GATES: 1: a gate per value, else 0.
// Grid (32, Dv * LANES / 32, B * Hv), threadgroup (32, any, 1).
//
// Rows beyond n are not read: they may hold anything. An array of few elements arrives in another address space, so
// only arrays with a head's Dk values are passed on as device pointers.

#include "gated_delta.h"

constexpr int N = Dk / LANES;
constexpr int CHAINS = LANES == 32 ? 1 : N / 4;

int P = tape_k_shape[1], T = k_shape[1];
int Hk = k_shape[2], Hv = v_shape[2], Dv = v_shape[3];

int head = thread_position_in_grid.z;
int b = head / Hv, hv = head % Hv, hk = hv / (Hv / Hk);
int n = clamp(int(accepted[accepted_shape[0] > 1 ? b : 0]), 0, P);
int lane = thread_index_in_simdgroup % LANES, first = lane * N;
int dv = thread_position_in_grid.y * (32 / LANES) + thread_index_in_simdgroup / LANES;

size_t own = (size_t(head) * Dv + dv) * Dk + first;
float values[N];
for (int i = 0; i < N; ++i) {
  values[i] = state[own + i];
}

for (int t = 0; t < n; ++t) {
  size_t key = size_t(b * P + t) * Hk + hk, value = size_t(b * P + t) * Hv + hv;
  delta_row<CHAINS, GATES>(
      values,
      tape_g + (GATES ? value * Dk + first : value),
      tape_k + key * Dk + first,
      static_cast<float>(tape_v[value * Dv + dv]),
      static_cast<float>(tape_beta[value]));
}
if (!last[0]) {
  store_row(state_out + own, values);
}
for (int t = 0; t < T; ++t) {
  size_t key = size_t(b * T + t) * Hk + hk, value = size_t(b * T + t) * Hv + hv;
  delta_row<CHAINS, GATES>(
      values,
      g + (GATES ? value * Dk + first : value),
      k + key * Dk + first,
      static_cast<float>(v[value * Dv + dv]),
      static_cast<float>(beta[value]));
  float out = row_dot<CHAINS>(values, q + key * Dk + first);
  if (lane == 0) {
    y[value * Dv + dv] = static_cast<InT>(out);
  }
}
if (last[0]) {
  store_row(state_out + own, values);
}
