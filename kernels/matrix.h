// Products of a tile of weight rows with rows of x: by 8x8 matrix products or, for few rows of x, by a twin with the same bits.
//
// One output, in float32. Blocks of 64 values of K are dealt, four in turn, to eight slices. A block is one unit of 64 values
// or, where groups of weights are smaller, units of one group. Of each unit:
//   products   codes, not scaled, times x, added eight at a time in the order of simdgroup_multiply_accumulate, in the twin by
//              `eight`, which the host puts before this text (`metal_sum`). The eight lie apart: a unit is one part, or two of 32 values; step i of a part takes value i of each of its eight
//              columns of RUN neighbouring values. Steps and parts follow each other in one sum.
//   sum        of x, for affine formats: of each column, value by value, part by part; then of columns by two, four, eight
//   term       fma(scale, products, fma(bias, sum, term)); of other formats fma(scale, products, term); unquantized: products
// The terms of a slice's blocks are added in order, then the slices by two, four, eight.

#include <metal_simdgroup_matrix>
#include "quantized.h"

constant constexpr int PLAIN = 4; // a kind of weights: numbers of type T
constant constexpr int BLOCK = 64, TURN = 4, SLICES = 8, SIDE = 8;
constant constexpr int TWIN_ROWS = 3; // the most rows of x that the twin multiplies

template <typename T, typename S, int BITS, int KIND, int GROUP>
struct Unit {
  static constant constexpr int VALUES = KIND == PLAIN || GROUP > BLOCK ? BLOCK : GROUP;
  static constant constexpr int RUN = VALUES < 32 ? 2 : 4;
  static constant constexpr int PART = SIDE * RUN;

  // COUNT neighbouring weights of a row; those from K on, which only unquantized rows have, are 0.
  template <int COUNT>
  static METAL_FUNC void load(const device uint8_t* row, int k, int K, bool whole, thread uint (&words)[(COUNT * BITS + 31) / 32]) {
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

// Writes a simdgroup's slice of the tile's products. A lane has those of weight rows 8 t + row and rows 8 b + column and
// 8 b + column + 1 of x.
template <typename T, typename S, int BITS, int KIND, int GROUP, int ROWS, int HEIGHT, int STACKED>
METAL_FUNC void matrix_products(const thread Tile<T, S>& tile, int slice, int lane, threadgroup float* sums) {
  using U = Unit<T, S, BITS, KIND, GROUP>;
  using Matrix = simdgroup_matrix<float, 8, 8>;
  constexpr int TILES = HEIGHT / SIDE, OCTETS = ROWS / SIDE, RUN = U::RUN;

  // A lane holds (row, column) and (row, column + 1) of each matrix.
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2, K = tile.K;
  const int row_bytes = KIND == PLAIN ? K * (BITS / 8) : K / 8 * BITS, row_scales = scales_of_row<KIND, GROUP>(K);
  const int first = tile.template row<HEIGHT, STACKED>(0);
  const device uint8_t* w = tile.weights.w + size_t(first) * row_bytes;
  const device S* scales = tile.weights.scales + size_t(first) * row_scales;
  const device S* biases = tile.weights.biases + size_t(first) * row_scales;
  int further[TILES];
  UNROLL
  for (int t = 0; t < TILES; t++) {
    further[t] = tile.template row<HEIGHT, STACKED>(SIDE * t + row) - first;
  }
  int rows[OCTETS][2];
  UNROLL
  for (int b = 0; b < OCTETS; b++) {
    UNROLL
    for (int j = 0; j < 2; j++) {
      rows[b][j] = min(tile.m + SIDE * b + column + j, tile.M - 1) * tile.stride;
    }
  }

  float result[TILES][OCTETS][2] = {};
  for (int turn = slice * TURN * BLOCK; turn < K; turn += SLICES * TURN * BLOCK) {
    for (int block = turn; block < min(turn + TURN * BLOCK, K); block += BLOCK) {
      float term[TILES][OCTETS][2] = {};
      UNROLL
      for (int unit = 0; unit < BLOCK; unit += U::VALUES) {
        Matrix chains[TILES][OCTETS];
        float sum[OCTETS][2] = {};
        UNROLL
        for (int t = 0; t < TILES; t++) {
          UNROLL
          for (int b = 0; b < OCTETS; b++) {
            chains[t][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
          }
        }
        UNROLL
        for (int part = 0; part < U::VALUES; part += U::PART) {
          const int k = block + unit + part;
          if (k < K) {
            const bool whole = k + U::PART <= K;
            uint words[TILES][(2 * RUN * BITS + 31) / 32];
            UNROLL
            for (int t = 0; t < TILES; t++) {
              U::template load<2 * RUN>(w + further[t] * row_bytes, k + column * RUN, K, whole, words[t]);
            }
            Matrix right[OCTETS][RUN];
            UNROLL
            for (int b = 0; b < OCTETS; b++) {
              UNROLL
              for (int j = 0; j < 2; j++) {
                float values[RUN];
                U::load_values(tile.x + rows[b][j], k + row * RUN, K, whole, values);
                UNROLL
                for (int i = 0; i < RUN; i++) {
                  right[b][i].thread_elements()[j] = values[i];
                  sum[b][j] += values[i];
                }
              }
            }
            UNROLL
            for (int i = 0; i < RUN; i++) {
              UNROLL
              for (int t = 0; t < TILES; t++) {
                Matrix left;
                const float2 pair = U::pair(words[t], i);
                left.thread_elements()[0] = pair.x;
                left.thread_elements()[1] = pair.y;
                UNROLL
                for (int b = 0; b < OCTETS; b++) {
                  simdgroup_multiply_accumulate(chains[t][b], left, right[b][i], chains[t][b]);
                }
              }
            }
          }
        }
        if (block + unit < K) {
          if constexpr (KIND == AFFINE) {
            UNROLL
            for (int b = 0; b < OCTETS; b++) {
              UNROLL
              for (int j = 0; j < 2; j++) {
                sum[b][j] += simd_shuffle_xor(sum[b][j], ushort(2)); // rows of x's matrix are columns of a part
                sum[b][j] += simd_shuffle_xor(sum[b][j], ushort(4));
                sum[b][j] += simd_shuffle_xor(sum[b][j], ushort(16));
              }
            }
          }
          UNROLL
          for (int t = 0; t < TILES; t++) {
            const int at = further[t] * row_scales;
            const float2 scale = U::scale(scales + at, biases + at, (block + unit) / GROUP);
            UNROLL
            for (int b = 0; b < OCTETS; b++) {
              UNROLL
              for (int j = 0; j < 2; j++) {
                term[t][b][j] = U::term(scale, chains[t][b].thread_elements()[j], sum[b][j], term[t][b][j]);
              }
            }
          }
        }
      }
      UNROLL
      for (int t = 0; t < TILES; t++) {
        UNROLL
        for (int b = 0; b < OCTETS; b++) {
          UNROLL
          for (int j = 0; j < 2; j++) {
            result[t][b][j] += term[t][b][j];
          }
        }
      }
    }
  }
  UNROLL
  for (int t = 0; t < TILES; t++) {
    UNROLL
    for (int b = 0; b < OCTETS; b++) {
      UNROLL
      for (int j = 0; j < 2; j++) {
        sums[(slice * ROWS + SIDE * b + column + j) * HEIGHT + SIDE * t + row] = result[t][b][j];
      }
    }
  }
}

// The sums of x over the units of 32 blocks, [units][ROWS], by 8 simdgroups: a lane takes a column.
template <typename U, typename T, int ROWS>
METAL_FUNC void unit_sums(
    const device T* x, const thread int (&rows)[ROWS], int begin, int K, int simd, int lane, threadgroup float* sums) {
  for (int unit = simd * 4 + lane / SIDE; unit < 32 * BLOCK / U::VALUES; unit += 4 * SLICES) {
    const int first = begin + unit * U::VALUES;
    UNROLL
    for (int m = 0; m < ROWS; m++) {
      float sum = 0.0f;
      if (first < K) { // affine rows end with a unit
        UNROLL
        for (int part = 0; part < U::VALUES; part += U::PART) {
          UNROLL
          for (int i = 0; i < U::RUN; i++) {
            sum += float(x[rows[m] + first + part + lane % SIDE * U::RUN + i]);
          }
        }
      }
      UNROLL
      for (ushort apart = 1; apart < SIDE; apart *= 2) {
        sum += simd_shuffle_xor(sum, apart);
      }
      if (lane % SIDE == 0) {
        sums[unit * ROWS + m] = sum;
      }
    }
  }
}

// All slices of a simdgroup's HEIGHT / 8 weight rows: a lane takes a block at a time, four neighbours have a slice.
template <typename T, typename S, int BITS, int KIND, int GROUP, int ROWS, int HEIGHT, int STACKED>
METAL_FUNC void twin_products(const thread Tile<T, S>& tile, int simd, int lane, threadgroup float* sums) {
  using U = Unit<T, S, BITS, KIND, GROUP>;
  constexpr int RESULTS = HEIGHT / SLICES, RUN = U::RUN;
  constexpr int STEPS = KIND == PLAIN && BITS == 32 ? 1 : ROWS > 2 ? RUN / 2 : RUN; // values of x that are loaded at once
  const int K = tile.K;
  const int row_bytes = KIND == PLAIN ? K * (BITS / 8) : K / 8 * BITS, row_scales = scales_of_row<KIND, GROUP>(K);
  const int first = tile.template row<HEIGHT, STACKED>(simd * RESULTS);
  const device uint8_t* w = tile.weights.w + size_t(first) * row_bytes;
  const device S* scales = tile.weights.scales + size_t(first) * row_scales;
  const device S* biases = tile.weights.biases + size_t(first) * row_scales;
  int further[RESULTS], rows[ROWS];
  UNROLL
  for (int r = 0; r < RESULTS; r++) {
    further[r] = tile.template row<HEIGHT, STACKED>(simd * RESULTS + r) - first;
  }
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    rows[m] = min(tile.m + m, tile.M - 1) * tile.stride;
  }

  float result[ROWS][RESULTS] = {};
  for (int begin = 0; begin < K; begin += 32 * BLOCK) {
    const int block = begin + lane * BLOCK;
    threadgroup float* of_x = sums + ROWS * HEIGHT + begin / (32 * BLOCK) % 2 * (32 * BLOCK / U::VALUES * ROWS);
    if constexpr (KIND == AFFINE) {
      unit_sums<U, T, ROWS>(tile.x, rows, begin, K, simd, lane, of_x);
      threadgroup_barrier(mem_flags::mem_threadgroup); // one is enough: the next pass has the other half
    }
    float term[ROWS][RESULTS] = {};
    AS_LOOP // unrolled, it would spill
    for (int unit = 0; unit < BLOCK; unit += U::VALUES) {
      if (block + unit < K) {
        float chain[ROWS][RESULTS] = {};
        AS_LOOP
        for (int part = 0; part < U::VALUES; part += U::PART) {
          const int k = block + unit + part;
          if (k < K) {
            const bool whole = k + U::PART <= K;
            uint words[RESULTS][(U::PART * BITS + 31) / 32];
            UNROLL
            for (int r = 0; r < RESULTS; r++) {
              U::template load<U::PART>(w + further[r] * row_bytes, k, K, whole, words[r]);
            }
            UNROLL
            for (int from = 0; from < RUN; from += STEPS) {
              float values[ROWS][STEPS][SIDE];
              UNROLL
              for (int m = 0; m < ROWS; m++) {
                UNROLL
                for (int c = 0; c < SIDE; c++) {
                  float run[STEPS];
                  U::load_values(tile.x + rows[m], k + c * RUN + from, K, whole, run);
                  UNROLL
                  for (int i = 0; i < STEPS; i++) {
                    values[m][i][c] = run[i];
                  }
                }
              }
              UNROLL
              for (int r = 0; r < RESULTS; r++) {
                UNROLL
                for (int i = 0; i < STEPS; i++) {
                  float weights[SIDE];
                  UNROLL
                  for (int c = 0; c < SIDE; c++) {
                    weights[c] = U::weight(words[r], c * RUN + from + i);
                  }
                  UNROLL
                  for (int m = 0; m < ROWS; m++) {
                    chain[m][r] = eight(chain[m][r], weights, values[m][i]);
                  }
                }
              }
            }
          }
        }
        UNROLL
        for (int r = 0; r < RESULTS; r++) {
          const int at = further[r] * row_scales;
          const float2 scale = U::scale(scales + at, biases + at, (block + unit) / GROUP);
          UNROLL
          for (int m = 0; m < ROWS; m++) {
            const float sum = KIND == AFFINE ? of_x[(lane * BLOCK + unit) / U::VALUES * ROWS + m] : 0.0f;
            term[m][r] = U::term(scale, chain[m][r], sum, term[m][r]);
          }
        }
      }
    }
    // Four lanes have a slice. The 0 of a block past K changes no sum, as none is -0.
    UNROLL
    for (int m = 0; m < ROWS; m++) {
      UNROLL
      for (int r = 0; r < RESULTS; r++) {
        UNROLL
        for (int i = 0; i < TURN; i++) {
          result[m][r] += quad_broadcast(term[m][r], ushort(i));
        }
      }
    }
  }
  UNROLL
  for (int m = 0; m < ROWS; m++) {
    UNROLL
    for (int r = 0; r < RESULTS; r++) {
      float sum = result[m][r];
      UNROLL
      for (ushort apart = 4; apart < 32; apart *= 2) {
        sum += simd_shuffle_xor(sum, apart);
      }
      if (lane == 0) {
        sums[m * HEIGHT + simd * RESULTS + r] = sum;
      }
    }
  }
}

// The floats of threadgroup memory that a tile needs; a twin of affine weights has at most 64 units at a time, twice.
template <int ROWS, int HEIGHT>
constexpr int sums_of() {
  return ROWS > TWIN_ROWS ? SLICES * ROWS * HEIGHT : ROWS * (HEIGHT + 128);
}

// Writes the tile's products to `sums`, for `product_of`; 8 simdgroups, and a barrier at the end.
template <typename T, typename S, int BITS, int KIND, int GROUP, int ROWS, int HEIGHT, int STACKED>
METAL_FUNC void tile_products(const thread Tile<T, S>& tile, int simd, int lane, threadgroup float* sums) {
  if constexpr (ROWS > TWIN_ROWS) {
    matrix_products<T, S, BITS, KIND, GROUP, ROWS, HEIGHT, STACKED>(tile, simd, lane, sums);
  } else {
    twin_products<T, S, BITS, KIND, GROUP, ROWS, HEIGHT, STACKED>(tile, simd, lane, sums);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Element i, m * HEIGHT + j, of the tile's products.
template <int ROWS, int HEIGHT>
METAL_FUNC float product_of(const threadgroup float* sums, int i) {
  if constexpr (ROWS <= TWIN_ROWS) {
    return sums[i];
  } else {
    float s[SLICES];
    UNROLL
    for (int slice = 0; slice < SLICES; slice++) {
      s[slice] = sums[slice * ROWS * HEIGHT + i];
    }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  }
}
