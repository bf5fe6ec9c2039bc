// The first n of each row, from those of its tiles; with SUM the logarithm of the row's sum of exponentials, too.
//
// Inputs   values [M, tiles, n (+ 1 with SUM)] float, indices [M, tiles, n] int32, of verify_head; n at most 64
// Output   best [M, n (+ 1 with SUM)] float, tokens [M, n] int32
// Template SUM
// Grid     x: 256 per row;  threadgroup (256, 1, 1)
//
// Each simdgroup puts the first n of its tiles in order; then all place theirs among those of the others.

#include "head.h"

constexpr int SIMDS = 8, MOST = 64;
threadgroup float value_of[SIMDS * MOST];
threadgroup int index_of[SIMDS * MOST];
threadgroup float sums[SIMDS];
const int tiles = indices_shape[1], n = indices_shape[2];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int thread_id = thread_index_in_threadgroup;
const size_t row = threadgroup_position_in_grid.x;
const auto row_values = values + row * tiles * (n + SUM);
const auto row_indices = indices + row * tiles * n;

Choice last = before_all(), next = after_all();
bool taken = true; // this lane's candidate
for (int j = 0; j < n; j++) {
  if (taken) {
    next = after_all();
    for (int t = thread_id; t < tiles; t += 32 * SIMDS) {
      // A tile's are in order: the first of them that comes after the last one chosen is all there is to compare.
      int from = 0, to = n;
      while (from < to) {
        const int i = (from + to) / 2;
        const bool later = precedes(last, {row_values[t * (n + SUM) + i], row_indices[t * n + i]});
        to = later ? i : to;
        from = later ? from : i + 1;
      }
      if (from < n) {
        const Choice candidate = {row_values[t * (n + SUM) + from], row_indices[t * n + from]};
        next = precedes(candidate, next) ? candidate : next;
      }
    }
  }
  last = simd_first(next);
  taken = next.index == last.index;
  if (lane == 0) {
    value_of[simd * MOST + j] = last.value;
    index_of[simd * MOST + j] = last.index;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float greatest = value_of[0];
for (int s = 1; s < SIMDS; s++) {
  greatest = metal::max(greatest, value_of[s * MOST]);
}
for (int own = thread_id; own < SIMDS * n; own += 32 * SIMDS) {
  const int list = own / n;
  const Choice candidate = {value_of[list * MOST + own % n], index_of[list * MOST + own % n]};
  int place = own % n;
  for (int s = 0; s < SIMDS && place < n; s++) {
    int from = 0, to = s == list ? 0 : n;
    while (from < to) {
      const int i = (from + to) / 2;
      const bool before = precedes({value_of[s * MOST + i], index_of[s * MOST + i]}, candidate);
      from = before ? i + 1 : from;
      to = before ? to : i;
    }
    place += from;
  }
  if (place < n) {
    best[row * (n + SUM) + place] = candidate.value;
    tokens[row * n + place] = candidate.index;
  }
}

if constexpr (SUM) {
  float sum = 0.0f;
  for (int t = thread_id; t < tiles; t += 32 * SIMDS) {
    sum += row_values[t * (n + SUM) + n] * metal::precise::exp(row_values[t * (n + SUM)] - greatest);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    sums[simd] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id == 0) {
    float total = 0.0f;
    for (int s = 0; s < SIMDS; s++) {
      total += sums[s];
    }
    best[row * (n + SUM) + n] = isinf(greatest) ? greatest : metal::precise::log(total) + greatest;
  }
}
