// The products of a tile of weight rows with rows of x in the arithmetic of units.h: by 8x8 matrix products, of few rows by the
// twin.

#include <metal_simdgroup_matrix>
#include "twin.h"

constant constexpr int TWIN_ROWS = 3; // the most rows of x that the twin multiplies

// Writes a simdgroup's slice of the tile's products. A lane has those of weight rows 8 t + row and rows 8 b + column and
// 8 b + column + 1 of x.
template <typename T, typename S, int BITS, int KIND, int GROUP, int ROWS, int HEIGHT, int STACKED>
METAL_FUNC void matrix_products(const thread Tile<T, S>& tile, int slice, int lane, threadgroup float* sums) {
  using U = Unit<T, S, BITS, KIND, GROUP>;
  using Matrix = simdgroup_matrix<float, 8, 8>;
  constexpr int TILES = HEIGHT / SIDE, OCTETS = ROWS / SIDE, RUN = U::RUN;

  // A lane holds (row, column) and (row, column + 1) of each matrix.
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2, K = tile.K;
  const int row_bytes = U::row_bytes(K), row_scales = scales_of_row<KIND, GROUP>(K);
  const int first = tile.template row<HEIGHT, STACKED>(0);
  const Source<S> from = U::from(tile.weights, first, K);
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
              U::template load<2 * RUN>(from.w + further[t] * row_bytes, k + column * RUN, K, whole, words[t]);
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
            const float2 scale = U::scale(from.scales + at, from.biases + at, (block + unit) / GROUP);
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
