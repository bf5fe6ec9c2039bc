// The products of a tile of weight rows with few rows of x by scalar multiply-adds, with the bits of matrix.h. The host puts
// `eight` before this text, which adds eight products in the order of this machine's simdgroup_matrix (`metal_sum`).

#include "units.h"

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
  const int row_bytes = U::row_bytes(K), row_scales = scales_of_row<KIND, GROUP>(K);
  const int first = tile.template row<HEIGHT, STACKED>(simd * RESULTS);
  const Source<S> from = U::from(tile.weights, first, K);
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
              U::template load<U::PART>(from.w + further[r] * row_bytes, k, K, whole, words[r]);
            }
            UNROLL
            for (int step = 0; step < RUN; step += STEPS) {
              float values[ROWS][STEPS][SIDE];
              UNROLL
              for (int m = 0; m < ROWS; m++) {
                UNROLL
                for (int c = 0; c < SIDE; c++) {
                  float run[STEPS];
                  U::load_values(tile.x + rows[m], k + c * RUN + step, K, whole, run);
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
                    weights[c] = U::weight(words[r], c * RUN + step + i);
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
          const float2 scale = U::scale(from.scales + at, from.biases + at, (block + unit) / GROUP);
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
