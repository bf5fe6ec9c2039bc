// y[m, n] = sum over k of x[m, k] * W[n, k], W quantized: 8x8 matrix products, in an order of their own.
//
// Inputs   w [>= N, K * BITS / 32] uint32; scales, biases [>= N, K / GROUP] (no biases: scales twice);
//          x [M, K]; ends [P] int32, where each of the P weights that w stacks along N ends
// Output   y [M * N]: for each weight in turn its [M, N_p]
// Template T (x, y), S (scales), BITS, GROUP, KIND, TILES, BLOCKS
// Grid     x: 32 per 8 * BLOCKS rows of x;  y: SPLIT per 8 * TILES weight rows;  threadgroup (32, SPLIT, 1)
//
// Column c of a block of 8 * RUN values of K is the RUN values that begin at c * RUN; step i multiplies value i of every
// column, weights [8 n, 8 c] by x [8 c, 8 m]. Blocks are dealt to the SPLIT simdgroups in turn.

#include "quantized.h"
#include "fragments.h"

constexpr int SPLIT = 4, RUN = 16, PIECES = 4, STEPS = RUN / PIECES, BLOCK = 8 * RUN, HEIGHT = 8 * TILES, ROWS = 8 * BLOCKS;
const int M = x_shape[0], K = x_shape[1], N = ends[ends_shape[0] - 1];
const int lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const int first_m = threadgroup_position_in_grid.x * ROWS, first_n = threadgroup_position_in_grid.y * HEIGHT;

// A lane holds (row, column) and (row, column + 1) of each matrix.
const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
const device T* rows = x + size_t(first_m + column) * K;
const int row_bytes = K / 8 * BITS, row_groups = K / GROUP;

float sums[TILES][BLOCKS][2] = {};
for (int begin = part * BLOCK; begin < K; begin += SPLIT * BLOCK) {
  Runs<BITS, KIND, GROUP, RUN> runs[TILES];
  UNROLL
  for (int t = 0; t < TILES; t++) {
    const int n = first_n + 8 * t + row;
    const size_t from = min(n, N - 1);
    runs[t].load((const device uint8_t*)w + from * row_bytes, scales + from * row_groups, biases + from * row_groups,
                 begin + column * RUN, n < N ? K : 0);
  }
  // Sums of 16 products, then of two by two: short ones keep float32's error near that of MLX's kernels.
  float pieces[PIECES][TILES][BLOCKS][2];
  UNROLL
  for (int p = 0; p < PIECES; p++) {
    simdgroup_matrix<float, 8, 8> chains[TILES][BLOCKS][2], right[BLOCKS][STEPS];
    UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      UNROLL
      for (int j = 0; j < 2; j++) {
        const bool inside = first_m + 8 * b + column + j < M && begin + row * RUN < K;
        UNROLL
        for (int i = 0; i < STEPS; i++) {
          const int k = begin + row * RUN + p * STEPS + i;
          right[b][i].thread_elements()[j] = inside ? float(rows[(8 * b + j) * K + k]) : 0.0f;
        }
        UNROLL
        for (int t = 0; t < TILES; t++) {
          chains[t][b][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
      }
    }
    UNROLL
    for (int i = 0; i < STEPS; i++) {
      UNROLL
      for (int t = 0; t < TILES; t++) {
        simdgroup_matrix<float, 8, 8> left;
        left.thread_elements()[0] = runs[t].at(0, p * STEPS + i);
        left.thread_elements()[1] = runs[t].at(1, p * STEPS + i);
        UNROLL
        for (int b = 0; b < BLOCKS; b++) {
          simdgroup_multiply_accumulate(chains[t][b][i % 2], left, right[b][i], chains[t][b][i % 2]);
        }
      }
    }
    UNROLL
    for (int t = 0; t < TILES; t++) {
      UNROLL
      for (int b = 0; b < BLOCKS; b++) {
        UNROLL
        for (int j = 0; j < 2; j++) {
          pieces[p][t][b][j] = chains[t][b][0].thread_elements()[j] + chains[t][b][1].thread_elements()[j];
        }
      }
    }
  }
  UNROLL
  for (int t = 0; t < TILES; t++) {
    UNROLL
    for (int b = 0; b < BLOCKS; b++) {
      UNROLL
      for (int j = 0; j < 2; j++) {
        sums[t][b][j] += (pieces[0][t][b][j] + pieces[1][t][b][j]) + (pieces[2][t][b][j] + pieces[3][t][b][j]);
      }
    }
  }
}

// The parts' sums, in their order; n moves fastest, as in y.
threadgroup float partial[SPLIT][ROWS * HEIGHT];
UNROLL
for (int t = 0; t < TILES; t++) {
  UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    UNROLL
    for (int j = 0; j < 2; j++) {
      partial[part][(8 * b + column + j) * HEIGHT + 8 * t + row] = sums[t][b][j];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = part * 32 + lane; i < ROWS * HEIGHT; i += SPLIT * 32) {
  const int m = first_m + i / HEIGHT, n = first_n + i % HEIGHT;
  if (m < M && n < N) {
    float sum = partial[0][i];
    UNROLL
    for (int s = 1; s < SPLIT; s++) {
      sum += partial[s][i];
    }
    const int2 at = place_of(ends, ends_shape[0], n);
    y[size_t(M) * at.x + size_t(m) * (at.y - at.x) + n - at.x] = static_cast<T>(sum);
  }
}
