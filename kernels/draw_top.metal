// A token of each row, drawn from its n greatest logits after top-p and min-p, with the noise of a draw from the whole row.
//
// Inputs   of any strides: values [M, n] float, the greatest first, n at most 64; tokens [M, n] int32; total [M] float, the
//          logarithm of the sum of all exponentials of a row. key [2] uint32, position [1] uint32, that of row 0;
//          limits [3] float: 1 / temperature, top-p, the logarithm of min-p (-infinity for none); count [1] uint32: the
//          vocabulary's size
// Output   drawn [M] int32
// Grid     x: 32; y: M;  threadgroup (32, 1, 1)
//
// A NaN is never chosen; where nothing is greater than -infinity the token is 0.

#include "head.h"
#include "random.h"

constexpr int MOST = 64;
threadgroup float chances[MOST];
const int n = values_shape[1], lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.y;
const float sum = total[row * total_strides[0]];
const auto row_values = values + row * values_strides[0];
const auto row_tokens = tokens + row * tokens_strides[0];

for (int i = lane; i < n; i += 32) {
  chances[i] = metal::precise::exp(row_values[i * values_strides[1]] - sum);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float least = -INFINITY;
if (limits[1] < 1.0f) {
  float above = 0.0f;
  int kept = 0;
  for (int i = 0; i < n; i++) {
    kept += above < limits[1];
    above += chances[i];
  }
  least = row_values[(kept - 1) * values_strides[1]] - sum;
}
const float lowest = row_values[0] - sum + limits[2];

const uint2 dice = second_half(uint2(key[0], key[1] + position[0] + row));
Choice best = after_all();
for (int i = lane; i < n; i += 32) {
  const float value = row_values[i * values_strides[1]] - sum;
  if (!(value < least || value < lowest)) {
    const int token = row_tokens[i * tokens_strides[1]];
    // The product is rounded on its own: a fused sum would have other bits than the reference.
    const Choice drawn = {fma(value, limits[0], 0.0f) + gumbel(random_bits(dice, token, count[0])), token};
    best = precedes(drawn, best) ? drawn : best;
  }
}
best = simd_first(best);
if (lane == 0) {
  drawn[row] = best.value == -INFINITY ? 0 : best.index;
}
