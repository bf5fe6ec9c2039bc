// Each row of x times the transpose of w, plus bias, in the bits of MLX's gemv (with a bias, addmm) on that row alone.
// Inputs: x (M, K), w (N, K), bias (N,) of type T (not read without BIAS); K, N, M (int). Output: y (M, N).
// Template: T; ROWS of x and TM of w whose sums a thread holds; LANES of a simdgroup and SIMDS simdgroups along K; BIAS.
// Grid in threadgroups: (ceil(M / ROWS), ceil(N / rows of w in one), 1). Threadgroup: (32, SIMDS, simdgroups along N),
// of which each has 32 / LANES * TM rows of w. Groups of rows of x lie side by side, so that the second finds w cached.

#include "gemv_rows.h"

constexpr int STRIDE = 4 * LANES * SIMDS, SUMS = ROWS * TM, PARTIALS = SIMDS > 1 ? SIMDS * SUMS : 1;
threadgroup float partial[PARTIALS];
const int lane = thread_index_in_simdgroup;
const uint3 place = thread_position_in_threadgroup;  // y along K, z along N

// The last rows of x and of w are reached by blocks that begin earlier; each stores from its own first one on.
const int own_m = threadgroup_position_in_grid.x * ROWS, first_m = max(min(own_m, M - ROWS), 0);
const int block = threadgroup_position_in_grid.y * threads_per_threadgroup.z + place.z;
const int own_n = (block * (32 / LANES) + lane / LANES) * TM, first_n = min(own_n, N - TM);

float sum[SUMS] = {0};
int rows[ROWS];
UNROLL
for (int m = 0; m < ROWS; m++) {
  rows[m] = min(m, M - 1 - first_m) * K;
}
if (own_n < N) {
  const auto rows_x = x + size_t(first_m) * K;
  const auto rows_w = w + size_t(first_n) * K;
  const int whole = K - K % STRIDE;
  int k = 4 * (place.y * LANES + lane % LANES);
  for (; k < whole; k += STRIDE) {
    add_four<ROWS, TM, false>(sum, rows_x, rows, rows_w, k, K);
  }
  if (whole < K) {
    add_four<ROWS, TM, true>(sum, rows_x, rows, rows_w, k, K);
  }
}

UNROLL
for (int i = 0; i < SUMS; i++) {
  UNROLL
  for (ushort apart = LANES / 2; apart >= 1; apart /= 2) {
    sum[i] += simd_shuffle_down(sum[i], apart);
  }
}

float total = 0.0f;  // lane i's of simdgroup 0, of sum i
if (SIMDS > 1) {
  if (lane == 0) {
    UNROLL
    for (int i = 0; i < SUMS; i++) {
      partial[place.y * SUMS + i] = sum[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (place.y == 0 && lane < SUMS) {
    total = partial[lane];
    for (int s = 1; s < SIMDS; s++) {
      total += partial[s * SUMS + lane];
    }
  }
}

UNROLL
for (int i = 0; i < SUMS; i++) {
  const int m = first_m + i / TM, n = first_n + i % TM;
  const bool holds = SIMDS > 1 ? place.y == 0 && lane == i : lane % LANES == 0;
  if (holds && m >= own_m && m < M && n >= own_n) {
    const T value = static_cast<T>(SIMDS > 1 ? total : sum[i]);
    y[size_t(m) * N + n] = BIAS ? static_cast<T>(value + bias[n]) : value;
  }
}
