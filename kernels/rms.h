// Root mean square normalization in the order of MLX's kernel: a thread takes four neighbouring values.
// Contracted across statements, bits are MLX's where rows are multiples of four: MLX sums the last few in other code.

#include "contraction.h"
#include "unroll.h"

static constant constexpr int READS = 4;

METAL_FUNC float plus_squares(float sum, const thread float* values) {
  UNROLL
  for (int i = 0; i < READS; i++) {
    sum = MULTIPLY_ADD(values[i], values[i], sum);
  }
  return sum;
}

METAL_FUNC float inverse_rms(float squares, int count, float eps) {
  return metal::precise::rsqrt(squares / count + eps);
}

// The value rounds to T before it meets its weight.
template <typename T>
METAL_FUNC T normalized(float value, float inverse, T weight) {
  return weight * static_cast<T>(value * inverse);
}
