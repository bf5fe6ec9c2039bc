// y[m, h] = swiglu(x[m] . gate[h], x[m] . up[h]) in the arithmetic of units.h; both weights quantized.
//
// Inputs   w [2 * H, K * BITS / 32] uint32, gate's rows before up's; scales, biases [2 * H, K / GROUP] (no
//          biases: scales twice); x [M, K]; limit [1] of T: infinity where nothing is clamped
// Output   y [M, H]
// Template T (x, limit, y), S (scales), BITS, GROUP, KIND, ROWS, HEIGHT
// Grid     x: 32 per ROWS rows of x;  y: 8 per HEIGHT / 2 values of H;  threadgroup (32, 8, 1)

#include "matrix.h"
#include "activations.h"

constexpr int WIDTH = HEIGHT / 2;
threadgroup float sums[sums_of<ROWS, HEIGHT>()];
const int M = x_shape[0], K = x_shape[1], H = w_shape[0] / 2;
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int first_m = threadgroup_position_in_grid.x * ROWS, first_h = threadgroup_position_in_grid.y * WIDTH;

const Tile<T, S> tile = {{(const device uint8_t*)w, scales, biases}, x, K, first_m, M, K, first_h, H};
tile_products<T, S, BITS, KIND, GROUP, ROWS, HEIGHT, 2>(tile, simd, lane, sums);
for (int i = simd * 32 + lane; i < ROWS * WIDTH; i += 32 * SLICES) {
  const int m = i / WIDTH, h = i % WIDTH;
  if (first_m + m < M && first_h + h < H) {
    const T gate = static_cast<T>(product_of<ROWS, HEIGHT>(sums, m * HEIGHT + h));
    const T up = static_cast<T>(product_of<ROWS, HEIGHT>(sums, m * HEIGHT + WIDTH + h));
    y[size_t(first_m + m) * H + first_h + h] = swiglu<T>(gate, up, limit[0]);
  }
}
