// y[m, n] = sum over k of x[m, k] * W[n, k], W quantized: 8x8 matrix products, in an order of their own.
//
// Inputs   w [>= N, K * BITS / 32] uint32; scales, biases [>= N, K / GROUP] (floating-point formats: scales twice);
//          x [M, K]; ends [P] int32, where each of the P weights that w stacks along N ends
// Output   y [M * N]: for each weight in turn its [M, N_p]
// Template T (x, y), S (scales), BITS, GROUP, FP, TILES
// Grid     x: 32 per 8 rows of x;  y: SPLIT per 8 * TILES weight rows;  group of threads (32, SPLIT, 1)
//
// Column c of a block of 8 * RUN values of K is the RUN values that begin at c * RUN; step i multiplies value i of every
// column, weights [8 n, 8 c] by x [8 c, 8 m]. Blocks are dealt to the SPLIT simdgroups in turn.

#include "quantized.h"
#include "fragments.h"

constexpr int SPLIT = 4, RUN = 16, PIECES = 4, STEPS = RUN / PIECES, BLOCK = 8 * RUN, HEIGHT = 8 * TILES;
const int M = x_shape[0], K = x_shape[1], N = ends[ends_shape[0] - 1];
const int lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const int first_m = threadgroup_position_in_grid.x * 8, first_n = threadgroup_position_in_grid.y * HEIGHT;

// A lane holds (row, column) and (row, column + 1) of each matrix.
const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
const device T* rows = x + size_t(first_m + column) * K;
const int row_bytes = K / 8 * BITS, row_groups = K / GROUP;

float sums[TILES][2] = {};
for (int begin = part * BLOCK; begin < K; begin += SPLIT * BLOCK) {
  float values[2][RUN];
  UNROLL
  for (int j = 0; j < 2; j++) {
    const bool inside = first_m + column + j < M && begin + row * RUN < K;
    UNROLL
    for (int i = 0; i < RUN; i++) {
      values[j][i] = inside ? float(rows[j * K + begin + row * RUN + i]) : 0.0f;
    }
  }
  Runs<BITS, FP, GROUP, RUN> runs[TILES];
  UNROLL
  for (int t = 0; t < TILES; t++) {
    const int n = first_n + 8 * t + row;
    const size_t from = min(n, N - 1);
    runs[t].load((const device uint8_t*)w + from * row_bytes, scales + from * row_groups, biases + from * row_groups,
                 begin + column * RUN, n < N ? K : 0);
  }
  // Sums of 16 products, then of two by two: short ones keep float32's error near that of MLX's kernels.
  float pieces[PIECES][TILES][2];
  UNROLL
  for (int p = 0; p < PIECES; p++) {
    simdgroup_matrix<float, 8, 8> chains[2 * TILES];
    UNROLL
    for (int c = 0; c < 2 * TILES; c++) {
      chains[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    UNROLL
    for (int i = p * STEPS; i < (p + 1) * STEPS; i++) {
      simdgroup_matrix<float, 8, 8> right;
      right.thread_elements()[0] = values[0][i];
      right.thread_elements()[1] = values[1][i];
      UNROLL
      for (int t = 0; t < TILES; t++) {
        simdgroup_matrix<float, 8, 8> left;
        left.thread_elements()[0] = runs[t].at(0, i);
        left.thread_elements()[1] = runs[t].at(1, i);
        const int c = 2 * t + i % 2;
        simdgroup_multiply_accumulate(chains[c], left, right, chains[c]);
      }
    }
    UNROLL
    for (int t = 0; t < TILES; t++) {
      UNROLL
      for (int j = 0; j < 2; j++) {
        pieces[p][t][j] = chains[2 * t].thread_elements()[j] + chains[2 * t + 1].thread_elements()[j];
      }
    }
  }
  UNROLL
  for (int t = 0; t < TILES; t++) {
    UNROLL
    for (int j = 0; j < 2; j++) {
      sums[t][j] += (pieces[0][t][j] + pieces[1][t][j]) + (pieces[2][t][j] + pieces[3][t][j]);
    }
  }
}

// The parts' sums, in their order; n moves fastest, as in y.
threadgroup float partial[SPLIT][8 * HEIGHT];
UNROLL
for (int t = 0; t < TILES; t++) {
  UNROLL
  for (int j = 0; j < 2; j++) {
    partial[part][(column + j) * HEIGHT + 8 * t + row] = sums[t][j];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = part * 32 + lane; i < 8 * HEIGHT; i += SPLIT * 32) {
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
