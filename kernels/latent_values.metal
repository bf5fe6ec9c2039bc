// Of a chunk of keys and a slice of the values: exp(scores - their largest) times values, for every row.
//
// Inputs   scores [blocks of 8 keys, R, 8] float, -infinity where a row does not attend to a key; peaks [tiles, R] float, the
//          largest of each tile of KEYS keys; latent [1, 1, S, DV]; offset [1] int; sizes [2] int: rows (slots from offset +
//          rows on are not read), and keys of the smallest chunk, a multiple of 32; chosen: as in latent_scores
// Outputs  out [1, chunks, R, DV] float, not divided by the sum; ml [1, chunks, R, 2] float: largest score and sum of
//          the weights, -infinity and 0 where a row attends to nothing
// Template T (latent), DV, KEYS, CHUNK (keys of the largest), SLICE (values), CHOSEN
// Grid     x: 32 per slice; y: simdgroups per chunk; z: 1, with CHOSEN sizes[0];  threadgroup (32, simdgroups, 1)
//
// Values that are not finite count as 0: a row that attends to one has a score that is not finite either, and another
// row must not depend on it.

#include "chunks.h"
#include "latent_attention.h"

constexpr int FRAGMENTS = 2, ROWS = 8 * FRAGMENTS, COLUMNS = SLICE / 8, PIECE = CHUNK / 16;
threadgroup T values[8 * PIECE * SLICE]; // half a chunk: PIECE blocks of 8 keys
const int L = sizes[0], i = threadgroup_position_in_grid.z, R = scores_shape[1], own_rows = CHOSEN ? R / L : R;
const int simdgroups = threads_per_threadgroup.y, thread_index = thread_index_in_threadgroup;
const int chunk = threadgroup_position_in_grid.y, slice = threadgroup_position_in_grid.x * SLICE;
const int3 alike = chunks_like(chunk, NONE, sizes[1], CHUNK);
const int first = alike.y + (chunk - alike.x) * alike.z;
const int end = CHOSEN ? chosen_shape[1] : min(offset[0] + L, min(latent_shape[2], 8 * scores_shape[0]));
const auto keys = keys_of<CHOSEN>(chosen + (CHOSEN ? i * end : 0), end, offset[0] + i);
const int blocks = clamp((end - first + 7) / 8, 0, alike.z / 8), tiles = (8 * blocks + KEYS - 1) / KEYS;

const Place at = place_of(thread_index_in_simdgroup);
for (int block = 0; block < own_rows; block += simdgroups * ROWS) {
  const int begin = block + simdgroup_index_in_threadgroup * ROWS;
  int row[FRAGMENTS];
  float largest[FRAGMENTS], base[FRAGMENTS], total[FRAGMENTS];
  Fragment sums[FRAGMENTS][COLUMNS];
  UNROLL
  for (int f = 0; f < FRAGMENTS; ++f) {
    row[f] = min(begin + 8 * f + at.row, own_rows - 1) * (CHOSEN ? L : 1) + i;
    largest[f] = -INFINITY;
    for (int t = at.column / 2; t < tiles; t += 4) {
      largest[f] = max(largest[f], peaks[size_t(first / KEYS + t) * R + row[f]]);
    }
    largest[f] = row_max(largest[f]);
    base[f] = largest[f] == -INFINITY ? 0.0f : largest[f];
    total[f] = 0.0f;
    UNROLL
    for (int n = 0; n < COLUMNS; ++n) {
      set(sums[f][n], float2(0.0f));
    }
  }
  for (int piece = 0; piece < blocks; piece += PIECE) {
    const int stop = min(piece + PIECE, blocks);
    if (block == 0 || blocks > PIECE) { // else the values are those of the rows before
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int n = 4 * thread_index; n < 8 * (stop - piece) * SLICE; n += 4 * 32 * simdgroups) {
        const int key = n / SLICE, column = n % SLICE;
        const vec<T, 4> quad = row_quad(latent, DV, keys.slot(first + 8 * piece + key), slice + column);
        UNROLL
        for (int j = 0; j < 4; ++j) {
          values[value_place<SLICE>(key, column + j)] = isfinite(static_cast<float>(quad[j])) ? quad[j] : T(0);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int b = piece; b < stop && begin < own_rows; ++b) {
      Fragment weights[FRAGMENTS];
      UNROLL
      for (int f = 0; f < FRAGMENTS; ++f) {
        const float2 pair = device_pair(scores + (size_t(first / 8 + b) * R + row[f]) * 8 + at.column);
        const float2 weight = float2(fast::exp(pair.x - base[f]), fast::exp(pair.y - base[f]));
        total[f] += weight.x + weight.y;
        set(weights[f], weight);
      }
      UNROLL
      for (int n = 0; n < COLUMNS; ++n) {
        Fragment value;
        set(value, staged_pair(values + value_place<SLICE>(8 * (b - piece) + at.row, 8 * n + at.column)));
        UNROLL
        for (int f = 0; f < FRAGMENTS; ++f) {
          simdgroup_multiply_accumulate(sums[f][n], weights[f], value, sums[f][n]);
        }
      }
    }
  }
  UNROLL
  for (int f = 0; f < FRAGMENTS; ++f) {
    const float sum = row_sum(total[f]);
    if (begin + 8 * f + at.row < own_rows) {
      const size_t own = size_t(chunk) * R + row[f];
      UNROLL
      for (int n = 0; n < COLUMNS; ++n) {
        device float* to = out + own * DV + slice + 8 * n + at.column;
        to[0] = sums[f][n].thread_elements()[0];
        to[1] = sums[f][n].thread_elements()[1];
      }
      if (slice == 0 && at.column == 0) {
        ml[2 * own] = largest[f];
        ml[2 * own + 1] = sum;
      }
    }
  }
}
