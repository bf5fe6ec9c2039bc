// scores = scale * (q . latent + q_pe . k_pe) of every row and key; a tile of keys is read once, for all rows.
//
// Inputs   q [1, H, L, DV], q_pe [1, H, L, DR]; latent [1, 1, S, DV], k_pe [1, 1, S, DR]; scale [1] float;
//          offset [1] int: row i of L is at position offset + i, and later slots are not read
//          start [1] int: the first position with contents; a row before it attends to itself
//          chosen [L, C] of integers, with CHOSEN: the slots that each of L rows attends to, in ascending order; keys
//          are numbered in this order
// Outputs  scores [blocks of 8 keys, R, 8] float, R = H * L: -infinity where a row does not attend to a key
//          peaks [tiles, R] float: the largest score of each tile
// Template T (inputs), DV, DR, KEYS (of a tile: 8 or 16), FRAGMENTS (of 8 rows that a simdgroup has in registers), CHOSEN
// Grid     x: 32 per tile; y: simdgroups; z: 1, with CHOSEN L;  threadgroup (32, simdgroups, 1)

#include "latent_attention.h"

constexpr int BLOCKS = KEYS / 8, ROWS = 8 * FRAGMENTS;
threadgroup T tile[(DV + DR) * KEYS];
const int L = q_shape[2], R = q_shape[1] * L, i = threadgroup_position_in_grid.z;
const int own_rows = CHOSEN ? q_shape[1] : R; // with CHOSEN those of i, one of each head
const int simdgroups = threads_per_threadgroup.y, thread_index = thread_index_in_threadgroup;
const int first = threadgroup_position_in_grid.x * KEYS;
const int end = CHOSEN ? chosen_shape[1] : min(offset[0] + L, latent_shape[2]);
const auto keys = keys_of<CHOSEN>(chosen + (CHOSEN ? i * end : 0), end, offset[0] + i);
device float* own_scores = scores + size_t(first) * R;
device float* own_peaks = peaks + size_t(first / KEYS) * R;

if (first >= end) {
  for (int j = thread_index; j < KEYS * R; j += 32 * simdgroups) {
    own_scores[j] = -INFINITY;
    own_peaks[j / KEYS] = -INFINITY;
  }
  return;
}
stage_keys<T, DV, KEYS>(tile, latent, first, keys, thread_index, 32 * simdgroups);
stage_keys<T, DR, KEYS>(tile + DV * KEYS, k_pe, first, keys, thread_index, 32 * simdgroups);
threadgroup_barrier(mem_flags::mem_threadgroup);

const Place at = place_of(thread_index_in_simdgroup);
for (int begin = simdgroup_index_in_threadgroup * ROWS; begin < own_rows; begin += simdgroups * ROWS) {
  int rows[FRAGMENTS];
  Fragment sums[FRAGMENTS][BLOCKS];
  UNROLL
  for (int f = 0; f < FRAGMENTS; ++f) {
    rows[f] = min(begin + 8 * f + at.row, own_rows - 1) * (CHOSEN ? L : 1) + i;
    UNROLL
    for (int k = 0; k < BLOCKS; ++k) {
      set(sums[f][k], float2(0.0f));
    }
  }
  add_scores<T, DV, KEYS>(sums, q, rows, tile, at);
  add_scores<T, DR, KEYS>(sums, q_pe, rows, tile + DV * KEYS, at);
  UNROLL
  for (int f = 0; f < FRAGMENTS; ++f) {
    const int last = offset[0] + rows[f] % L, from = min(start[0], last);
    const bool own = begin + 8 * f + at.row < own_rows;
    float peak = -INFINITY;
    UNROLL
    for (int k = 0; k < BLOCKS; ++k) {
      UNROLL
      for (int j = 0; j < 2; ++j) {
        const int column = at.column + j, position = keys.slot(first + 8 * k + column);
        const bool seen = position >= from && position <= last;
        const float score = seen ? scale[0] * sums[f][k].thread_elements()[j] : -INFINITY;
        peak = max(peak, score);
        if (own) {
          own_scores[(size_t(k) * R + rows[f]) * 8 + column] = score;
        }
      }
    }
    peak = row_max(peak);
    if (own && at.column == 0) {
      own_peaks[rows[f]] = peak;
    }
  }
}
