// Sums of eight products of floats, halves and bfloats, each added to a float by one step of the matrix unit.
//
// Inputs   sums [N * 17] float, N a multiple of 8: a[8], b[8] and c of each sum
// Output   y [3 * N] float: c + sum over k of a[k] * b[k], with a and b in each of the three types
// Grid     x: 32 per eight sums;  threadgroup (32, 1, 1)

#include "matrix_order.h"

const int lane = thread_index_in_simdgroup, first = 8 * threadgroup_position_in_grid.x, N = sums_shape[0] / 17;
eight_sums<float>(sums + 17 * first, y + first, lane);
eight_sums<half>(sums + 17 * first, y + N + first, lane);
eight_sums<bfloat>(sums + 17 * first, y + 2 * N + first, lane);
