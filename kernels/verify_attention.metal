// Attention of a few consecutive queries of each of N sequences to the positions of its KV cache, in chunks, which
// `attention_merge` combines. A threadgroup serves all R = G * L rows of a KV head, or the number whose sums fit in its
// registers, and requests keys and values once for all of them.
//
// Inputs   q [N, Hq, L, D] of T, Hq = G * Hkv; keys [.., Hkv, S, D], values [.., Hkv, S, DV] of T, or with BITS as
//          from mx.quantize, with scales and biases (BITS 0: anything); of each sequence [N] int32: offset, the first
//          query's position; text_start, before which no query attends (but to itself); cache_row, the index of its keys and
//          values. sight [3] int32: the window in positions (0: all); positions of the smallest and largest chunk,
//          multiples of 32. scale [1] float. Position p is in slot p % S
// Outputs  partials [N * Hkv, chunks, R, DV] float, the sums of p v; ml [N * Hkv, chunks, R, 2] float, the largest score and
//          the sum of p = exp(score - largest); row g * L + i is head g of the KV head's G at query i
// Template T, D, DV, BITS, GROUP; TILE: keys whose scores are kept; BLOCKS of 8 rows; PARTS: 8 PARTS columns of the values
//          to a simdgroup
// Grid     (chunks, N * Hkv, R / (8 BLOCKS)) groups of DV / (8 PARTS) simdgroups; a sequence's first chunk has the
//          oldest visible position
//
// A row's largest score is updated, and its sums scaled, every 32 positions, whatever TILE is. All sums are in float,
// in an order that depends on positions alone; exponentials are fast ones, as in MLX's attention, of arguments up to 0.
// Positions that no row attends to are not read.

#include "chunks.h"
#include "attention.h"

constexpr int SIMDGROUPS = DV / (8 * PARTS), QUADS = 8 * SIMDGROUPS, ROWS = 8 * BLOCKS;
constexpr int PASSES = (ROWS + QUADS - 1) / QUADS, UNITS = TILE / 32;
constexpr int STRIDE = TILE + 4; // 8 rows in 8 different banks
threadgroup float scores[ROWS * STRIDE];
threadgroup float alphas[ROWS * UNITS];

const int L = q_shape[2], Hkv = keys_shape[1], S = keys_shape[2];
const int R = q_shape[1] / Hkv * L;
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int row = fragment_row(lane), column = fragment_column(lane);
const int quad = thread_index_in_threadgroup / 4;
const int asking = threadgroup_position_in_grid.y, text = asking / Hkv;
const size_t kv = size_t(cache_row[text]) * Hkv + asking % Hkv;
const int own = threadgroup_position_in_grid.z * ROWS, rows = R - own;
const device T* queries = q + (size_t(asking) * R + own) * D;

const Sight sees{own, int(offset[text]), L, int(text_start[text]), int(sight[0])};
const int oldest = sees.oldest(sees.first), last = sees.last();
const int3 first = chunks_like(NONE, oldest, sight[1], sight[2]);
const int chunk = first.x + (oldest - first.y) / first.z + threadgroup_position_in_grid.x;
const int3 alike = chunks_like(chunk, NONE, sight[1], sight[2]);
const int start = alike.y + (chunk - alike.x) * alike.z, stop = start + alike.z;
const int begin = max(start, oldest / 32 * 32), end = min(stop, last + 1);

Fragment out[BLOCKS][PARTS];
UNROLL
for (int b = 0; b < BLOCKS; b++) {
  UNROLL
  for (int t = 0; t < PARTS; t++) {
    out[b][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}
float largest[PASSES], sum[PASSES];
UNROLL
for (int pass = 0; pass < PASSES; pass++) {
  largest[pass] = -INFINITY;
  sum[pass] = 0.0f;
}

for (int tile = begin; tile < end; tile += TILE) {
  const int units = min(UNITS, (stop - tile) / 32); // the chunk may end within the tile

  // Scores: 8 keys to a simdgroup.
  for (int k = 8 * simd; k < 32 * units; k += 8 * SIMDGROUPS) {
    Fragment products[BLOCKS];
    UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      products[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    if (sees.any(tile + k, 8)) {
      const int position = tile + k + row;
      const bool there = position >= oldest && position <= last;
      const size_t slot = kv * S + (position < S ? position : position % S);
      for (int d = 0; d < D; d += 32) {
        float key[8] = {};
        if (there) {
          load_values<8, BITS, GROUP>(keys, key_scales, key_biases, slot, D, d + 4 * column, key);
        }
        add_scores(key, queries + d, rows, D, lane, products);
      }
    }
    UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      threadgroup float* to = scores + (8 * b + column) * STRIDE + k + row;
      to[0] = products[b].thread_elements()[0] * scale[0];
      to[STRIDE] = products[b].thread_elements()[1] * scale[0];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Scores become p: four lanes to a row, each with every fourth key.
  UNROLL
  for (int pass = 0; pass < PASSES; pass++) {
    const int r = pass * QUADS + quad;
    if (r < ROWS) {
      const int position = sees.position(r), from = sees.oldest(position);
      UNROLL
      for (int u = 0; u < UNITS; u++) {
        if (u >= units) {
          break;
        }
        threadgroup float* p = scores + r * STRIDE + 32 * u + lane % 4;
        float score[8], top = largest[pass], unit = 0.0f;
        UNROLL
        for (int j = 0; j < 8; j++) {
          const int key = tile + 32 * u + 4 * j + lane % 4;
          score[j] = key >= from && key <= position ? p[4 * j] : -INFINITY;
          top = score[j] > top ? score[j] : top;
        }
        top = quad_max(top);
        UNROLL
        for (int j = 0; j < 8; j++) {
          const float rate = score[j] == -INFINITY ? 0.0f : metal::fast::exp(score[j] - top);
          p[4 * j] = rate;
          unit += rate;
        }
        // A row without new or without earlier positions stays exactly as it is.
        const bool same = largest[pass] == top || largest[pass] == -INFINITY;
        const float alpha = same ? 1.0f : metal::fast::exp(largest[pass] - top);
        sum[pass] = fma(sum[pass], alpha, quad_sum(unit));
        largest[pass] = top;
        if (lane % 4 == 0) {
          alphas[r * UNITS + u] = alpha;
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Values: 8 PARTS columns to a simdgroup.
  for (int u = 0; u < units; u++) {
    if (!sees.any(tile + 32 * u, 32)) {
      continue;
    }
    UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      const float alpha = alphas[(8 * b + row) * UNITS + u];
      UNROLL
      for (int t = 0; t < PARTS; t++) {
        out[b][t].thread_elements()[0] *= alpha;
        out[b][t].thread_elements()[1] *= alpha;
      }
    }
    for (int k = 32 * u; k < 32 * u + 32; k += 8) {
      if (sees.any(tile + k, 8)) {
        const int position = tile + k + row;
        float value[2 * PARTS] = {};
        if (position >= oldest && position <= last) {
          const size_t slot = kv * S + (position < S ? position : position % S);
          const int at = 8 * PARTS * simd + PARTS * column;
          load_values<2 * PARTS, BITS, GROUP>(values, value_scales, value_biases, slot, DV, at, value);
        }
        add_values(value, scores + k, STRIDE, tile + k, sees, lane, out);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const size_t base = (size_t(asking) * threadgroups_per_grid.x + threadgroup_position_in_grid.x) * R + own;
UNROLL
for (int b = 0; b < BLOCKS; b++) {
  if (8 * b + row < rows) {
    device float* to = partials + (base + 8 * b + row) * DV + 8 * PARTS * simd + PARTS * column;
    UNROLL
    for (int t = 0; t < PARTS; t++) {
      to[2 * t] = out[b][t].thread_elements()[0];
      to[2 * t + 1] = out[b][t].thread_elements()[1];
    }
  }
}
UNROLL
for (int pass = 0; pass < PASSES; pass++) {
  const int r = pass * QUADS + quad;
  if (r < min(rows, ROWS) && lane % 4 == 0) {
    ml[2 * (base + r)] = largest[pass];
    ml[2 * (base + r) + 1] = sum[pass];
  }
}
