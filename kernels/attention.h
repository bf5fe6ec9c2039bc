// Attention over a KV cache by 8x8 matrices of a simdgroup: visible positions, loads of keys and values, products.

#include "unroll.h"

typedef simdgroup_matrix<float, 8, 8> Fragment;

// Where lane l of a simdgroup is in a Fragment: its row, and the first of its two neighbouring columns.
METAL_FUNC int fragment_row(int lane) {
  return lane / 16 * 4 + lane / 2 % 4;
}
METAL_FUNC int fragment_column(int lane) {
  return lane / 8 % 2 * 4 + lane % 2 * 2;
}

// The queries of rows from `row` on: row r of a KV head is position first + r % L, and attends to `oldest` up to itself.
struct Sight {
  int row, first, L, start, window; // window 0: all

  METAL_FUNC int last() const thread { return first + L - 1; }
  METAL_FUNC int position(int r) const thread { return first + (row + r) % L; }
  METAL_FUNC int oldest(int position) const thread {
    const int begin = start < position ? start : position;
    const int reach = window > 0 ? position - window + 1 : 0;
    return reach > begin ? reach : begin;
  }
  METAL_FUNC bool sees(int r, int key) const thread { return key <= position(r) && key >= oldest(position(r)); }
  // Of N neighbouring positions: whether any query attends to any of them, and whether all attend to all.
  METAL_FUNC bool any(int begin, int N) const thread { return begin <= last() && begin + N > oldest(first); }
  METAL_FUNC bool all(int begin, int N) const thread { return begin + N - 1 <= first && begin >= oldest(last()); }
};

// N neighbouring values of a row from column `at` on, N | at, as floats. BITS 0: they are of type W, and loaded one by one,
// as a slice of a larger array may begin at any of them; else quantized.
template <int N, int BITS, int GROUP, typename W, typename S>
METAL_FUNC void load_values(
    const device W* w,
    const device S* scales,
    const device S* biases,
    size_t row,
    int width,
    int at,
    thread float* values) {
  if constexpr (BITS == 0) {
    UNROLL
    for (int i = 0; i < N; i++) {
      values[i] = float(w[row * width + at + i]);
    }
  } else {
    using Word = conditional_t<(N * BITS < 32), ushort, uint>;
    constexpr int PACK = 8 * sizeof(Word) / BITS;
    const size_t group = row * (width / GROUP) + at / GROUP;
    const float scale = float(scales[group]), bias = float(biases[group]);
    const device Word* words = reinterpret_cast<const device Word*>(w) + (row * width + at) / PACK;
    UNROLL
    for (int i = 0; i < N; i += PACK) {
      const uint word = words[i / PACK];
      UNROLL
      for (int j = 0; j < PACK; j++) {
        values[i + j] = fma(scale, float(word >> (j * BITS) & ((1u << BITS) - 1)), bias);
      }
    }
  }
}

// Adds to scores[b] 8 keys (rows) times the queries of row block b (columns), over 32 dimensions. Fragment t takes
// dimensions 4 c + t at index c, so that a lane's values are neighbours: 8 of its key, 4 of each of its two queries.
template <int BLOCKS, typename T>
METAL_FUNC void add_scores(
    const thread float* key, const device T* q, int rows, int D, int lane, thread Fragment (&scores)[BLOCKS]) {
  Fragment keys[4];
  UNROLL
  for (int t = 0; t < 4; t++) {
    keys[t].thread_elements()[0] = key[t];
    keys[t].thread_elements()[1] = key[4 + t];
  }
  UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    const int row = 8 * b + fragment_column(lane);
    const device T* from = q + 4 * fragment_row(lane);
    const device T* even = from + min(row, rows - 1) * D;
    const device T* odd = from + min(row + 1, rows - 1) * D;
    UNROLL
    for (int t = 0; t < 4; t++) {
      Fragment queries;
      queries.thread_elements()[0] = float(even[t]);
      queries.thread_elements()[1] = float(odd[t]);
      simdgroup_multiply_accumulate(scores[b], keys[t], queries, scores[b]);
    }
  }
}

// The part of `out` from values that are not finite, for the queries that attend to their keys: products with p.
template <int BLOCKS, int PARTS>
METAL_FUNC void add_wild(
    const thread float* wild,
    const threadgroup float* p,
    int stride,
    int begin,
    Sight sight,
    int lane,
    thread Fragment (&out)[BLOCKS][PARTS]) {
  for (int k = 0; k < 8; k++) {
    // The lane that holds key k in this one's columns.
    const ushort from = k / 4 * 16 + k % 4 * 2 + (lane & 9);
    UNROLL
    for (int i = 0; i < 2 * PARTS; i++) {
      const float value = simd_shuffle(wild[i], from);
      UNROLL
      for (int b = 0; b < BLOCKS; b++) {
        const int row = 8 * b + fragment_row(lane);
        if (value != 0.0f && sight.sees(row, begin + k)) {
          out[b][i / 2].thread_elements()[i % 2] += p[row * stride + k] * value;
        }
      }
    }
  }
}

// Adds to out[b] the p of row block b (from `p`, 8 keys of each row) times the values of 8 keys from position `begin` on.
// Part t has columns 2 t and 2 t + 1 of a lane's. Where some queries do not attend to some keys, 0 times infinity
// must not reach them: values that are not finite are removed, and added for the queries that attend to them.
template <int BLOCKS, int PARTS>
METAL_FUNC void add_values(
    thread float* values,
    const threadgroup float* p,
    int stride,
    int begin,
    Sight sight,
    int lane,
    thread Fragment (&out)[BLOCKS][PARTS]) {
  if (!sight.all(begin, 8)) {
    float wild[2 * PARTS];
    bool found = false;
    UNROLL
    for (int i = 0; i < 2 * PARTS; i++) {
      const bool tame = metal::isfinite(values[i]);
      wild[i] = tame ? 0.0f : values[i];
      values[i] = tame ? values[i] : 0.0f;
      found = found || !tame;
    }
    if (simd_any(found)) {
      add_wild(wild, p, stride, begin, sight, lane, out);
    }
  }
  UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    const threadgroup float* at = p + (8 * b + fragment_row(lane)) * stride + fragment_column(lane);
    Fragment rates;
    rates.thread_elements()[0] = at[0];
    rates.thread_elements()[1] = at[1];
    UNROLL
    for (int t = 0; t < PARTS; t++) {
      Fragment part;
      part.thread_elements()[0] = values[2 * t];
      part.thread_elements()[1] = values[2 * t + 1];
      simdgroup_multiply_accumulate(out[b][t], rates, part, out[b][t]);
    }
  }
}
