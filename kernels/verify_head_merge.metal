// The first n of each row, from those of its tiles; with SUM the logarithm of the row's sum of exponentials, too.
//
// Inputs   values [M, tiles, n (+ 1 with SUM)] float, indices [M, tiles, n] int32, of verify_head
// Output   best [M, n (+ 1 with SUM)] float, tokens [M, n] int32
// Template SUM
// Grid     x: 256 per row;  group of threads (256, 1, 1)

#include "head.h"

constexpr int SIMDS = 8;
threadgroup float value_of[SIMDS];
threadgroup int index_of[SIMDS];
const int tiles = indices_shape[1], n = indices_shape[2];
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int thread_id = thread_index_in_threadgroup;
const size_t row = threadgroup_position_in_grid.x;
const auto row_values = values + row * tiles * (n + SUM);
const auto row_indices = indices + row * tiles * n;

float greatest = 0.0f;
Choice last = before_all();
for (int j = 0; j < n; j++) {
  Choice next = after_all();
  for (int t = thread_id; t < tiles; t += 32 * SIMDS) {
    // A tile's are in order: the first of them that comes after the last one chosen is all there is to compare.
    for (int i = 0; i < n; i++) {
      const Choice candidate = {row_values[t * (n + SUM) + i], row_indices[t * n + i]};
      if (precedes(last, candidate)) {
        if (precedes(candidate, next)) {
          next = candidate;
        }
        break;
      }
    }
  }
  next = simd_first(next);
  if (lane == 0) {
    value_of[simd] = next.value;
    index_of[simd] = next.index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  last = after_all();
  for (int s = 0; s < SIMDS; s++) {
    const Choice candidate = {value_of[s], index_of[s]};
    if (precedes(candidate, last)) {
      last = candidate;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  greatest = j == 0 ? last.value : greatest;
  if (thread_id == 0) {
    best[row * (n + SUM) + j] = last.value;
    tokens[row * n + j] = last.index;
  }
}

if (SUM) {
  float sum = 0.0f;
  for (int t = thread_id; t < tiles; t += 32 * SIMDS) {
    sum += row_values[t * (n + SUM) + n] * metal::precise::exp(row_values[t * (n + SUM)] - greatest);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    value_of[simd] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id == 0) {
    float total = 0.0f;
    for (int s = 0; s < SIMDS; s++) {
      total += value_of[s];
    }
    best[row * (n + SUM) + n] = isinf(greatest) ? greatest : metal::precise::log(total) + greatest;
  }
}
