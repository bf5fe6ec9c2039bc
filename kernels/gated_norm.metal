// The RMS norm of each head times a weight, times silu(z) in float; one simdgroup per head.
//
// Inputs   of any strides: y [1, T, H, D] of T; z [1, T, G, H D / G]; weight [D]. eps [1] float
// Outputs  out [1, T, H, D] of T
// Template T, O (the type that T and the weight's promote to), BLOCKS (of 128 values of a head)
// Grid     (32, H, T), threadgroup (32, any, 1)

#include "rms.h"
#include "activations.h"

const int H = y_shape[2], D = y_shape[3];
const int head = thread_position_in_grid.y, row = thread_position_in_grid.z, lane = thread_index_in_simdgroup;
const int first = head * D % z_shape[3];  // in its group
const int64_t own = row * y_strides[1] + head * y_strides[2];
const int64_t gates = row * z_strides[1] + head * D / z_shape[3] * z_strides[2] + first * z_strides[3];

float kept[BLOCKS][READS] = {};
float squares = 0.0f;
UNROLL
for (int block = 0; block < BLOCKS; block++) {
  UNROLL
  for (int i = 0; i < READS; i++) {
    const int d = (block * 32 + lane) * READS + i;
    if (d < D) {
      kept[block][i] = static_cast<float>(y[own + d * y_strides[3]]);
    }
  }
  squares += simd_sum(plus_squares(0.0f, kept[block]));
}

const float inverse = inverse_rms(squares, D, eps[0]);
UNROLL
for (int block = 0; block < BLOCKS; block++) {
  UNROLL
  for (int i = 0; i < READS; i++) {
    const int d = (block * 32 + lane) * READS + i;
    if (d < D) {
      const O normed = normalized<O>(kept[block][i], inverse, static_cast<O>(weight[d * weight_strides[0]]));
      const float gate = static_cast<float>(z[gates + d * z_strides[3]]);
      const float open = gate * sigmoid(gate);
      out[(size_t(row) * H + head) * D + d] = static_cast<T>(open * static_cast<float>(normed));
    }
  }
}
