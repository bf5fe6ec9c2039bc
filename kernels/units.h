// The arithmetic of products of rows of weights with rows of x in which a row's bits do not depend on the other rows.
//
// One output, in float32. Blocks of 64 values of K are dealt, four in turn, to eight slices. A block is one unit of 64 values
// or, where groups of weights are smaller, units of one group. Of each unit:
//   products   codes, not scaled, times x, added eight at a time in the order of simdgroup_multiply_accumulate. The eight lie
//              apart: a unit is one part, or two of 32 values; step i of a part takes value i of each of its eight columns
//              of RUN neighbouring values. Steps and parts follow each other in one sum.
//   sum        of x, for affine formats: of each column, value by value, part by part; then of columns by two, four, eight
//   term       fma(scale, products, fma(bias, sum, term)); of other formats fma(scale, products, term); unquantized: products
// The terms of a slice's blocks are added in order, then the slices by two, four, eight.

#include "quantized.h"

constant constexpr int PLAIN = 4; // a kind of weights: numbers of type T
constant constexpr int BLOCK = 64, TURN = 4, SLICES = 8, SIDE = 8;

template <typename T, typename S, int BITS, int KIND, int GROUP>
struct Unit {
  static constant constexpr int VALUES = KIND == PLAIN || GROUP > BLOCK ? BLOCK : GROUP;
  static constant constexpr int RUN = VALUES < 32 ? 2 : 4;
  static constant constexpr int PART = SIDE * RUN;

  static METAL_FUNC int row_bytes(int K) {
    return KIND == PLAIN ? K * (BITS / 8) : K / 8 * BITS;
  }

  // The weights from a row on.
  static METAL_FUNC Source<S> from(const thread Source<S>& weights, int row, int K) {
    const size_t scales = size_t(row) * scales_of_row<KIND, GROUP>(K);
    return {weights.w + size_t(row) * row_bytes(K), weights.scales + scales, weights.biases + scales};
  }

  // COUNT neighbouring weights of a row; those from K on, which only unquantized rows have, are 0.
  template <int COUNT>
  static METAL_FUNC void load(
      const device uint8_t* row, int k, int K, bool whole, thread uint (&words)[(COUNT * BITS + 31) / 32]) {
    if constexpr (KIND != PLAIN) {
      load_bytes<BITS, COUNT * BITS / 8>(row + k * BITS / 8, words);
    } else {
      T values[COUNT];
      load_values<COUNT>((const device T*)row, k, K, whole, values);
      UNROLL
      for (int i = 0; i < COUNT; i++) {
        if constexpr (BITS == 32) {
          words[i] = as_type<uint>(values[i]);
        } else {
          const uint value = as_type<ushort>(values[i]);
          words[i / 2] = i % 2 == 0 ? value : words[i / 2] | value << 16;
        }
      }
    }
  }

  template <int COUNT, typename V>
  static METAL_FUNC void load_values(const device T* from, int k, int K, bool whole, thread V (&values)[COUNT]) {
    if (KIND != PLAIN || whole) {
      UNROLL
      for (int i = 0; i < COUNT; i++) {
        values[i] = static_cast<V>(from[k + i]);
      }
    } else {
      UNROLL
      for (int i = 0; i < COUNT; i++) {
        values[i] = k + i < K ? static_cast<V>(from[k + i]) : static_cast<V>(0.0f);
      }
    }
  }

  static METAL_FUNC float weight(const thread uint* words, int i) {
    if constexpr (KIND == PLAIN && BITS == 32) {
      return as_type<float>(words[i]);
    } else {
      const uint code = code_at<BITS>(words, i);
      if constexpr (KIND == PLAIN) {
        return float(as_type<T>(ushort(code)));
      } else if constexpr (KIND == AFFINE) {
        return float(int(code));
      } else if constexpr (KIND == CODED) {
        return BITS == 4 ? e2m1(code) : e4m3(code);
      } else {
        return BITS == 4 ? iq4(code) : float(int(code) - 32);
      }
    }
  }

  // Weights i and RUN + i. Two e2m1 codes, which lie 16 bits apart or are moved there, are decoded as one half2.
  static METAL_FUNC float2 pair(const thread uint* words, int i) {
    if constexpr (KIND == CODED && BITS == 4) {
      const uint w = RUN == 4 ? words[0] : (words[0] & 0xff) | (words[0] & 0xff00) << 8;
      const uint magnitudes = (i < 3 ? w << (9 - 4 * i) % 16 : w >> 3) & 0x0e000e00;
      const half2 values = as_type<half2>(magnitudes | (w << (12 - 4 * i) & 0x80008000)) * half2(half(16384));
      return float2(values);
    } else {
      return float2(weight(words, i), weight(words, RUN + i));
    }
  }

  // A group's scale and bias.
  static METAL_FUNC float2 scale(const device S* scales, const device S* biases, int group) {
    if constexpr (KIND == PLAIN) {
      return float2(1.0f, 0.0f);
    } else if constexpr (KIND == AFFINE) {
      return float2(float(scales[group]), float(biases[group]));
    } else if constexpr (KIND == CODED) {
      return float2(scale_of<GROUP>(scales[group]), 0.0f);
    } else {
      return float2(block_scale<KIND, GROUP>(scales, group), 0.0f);
    }
  }

  static METAL_FUNC float term(float2 scale, float products, float sum, float term) {
    if constexpr (KIND == PLAIN) {
      return products;
    } else if constexpr (KIND == AFFINE) {
      return fma(scale.x, products, fma(scale.y, sum, term));
    } else {
      return fma(scale.x, products, term);
    }
  }
};

// HEIGHT weight rows of STACKED weights with `rows` rows each, from row `first` of each on, and the rows of x from `m` on.
template <typename T, typename S>
struct Tile {
  Source<S> weights;
  const device T* x;
  int stride, m, M, K, first, rows;

  // Rows past the end are the last one again.
  template <int HEIGHT, int STACKED>
  METAL_FUNC int row(int j) const thread {
    constexpr int EACH = HEIGHT / STACKED;
    return min(first + j % EACH, rows - 1) + j / EACH * rows;
  }
};
