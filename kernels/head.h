// Choosing among logits: their order, and the best of a tile of a row's.

#include "unroll.h"

struct Choice {
  float value;
  int index;
};

// The greater value first; of equal ones the lower index.
METAL_FUNC bool precedes(Choice a, Choice b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

METAL_FUNC Choice before_all() {
  return {INFINITY, -1};
}

METAL_FUNC Choice after_all() {
  return {-INFINITY, 0x7fffffff};
}

METAL_FUNC Choice simd_first(Choice own) {
  const float value = simd_max(own.value);
  return {value, simd_min(own.value == value ? own.index : 0x7fffffff)};
}

// The first n of a tile, in order, by one simdgroup; lane l holds the values l, l + 32, ... NaN counts as -infinity,
// so that nothing is chosen for it. SUM: values[n] is the sum of exp(value - values[0]), where NaN remains.
template <int TILE, bool SUM>
METAL_FUNC void keep_first(
    const threadgroup float* tile, int begin, int n, int lane, device float* values, device int* indices) {
  float own[TILE / 32];
  UNROLL
  for (int i = 0; i < TILE / 32; i++) {
    const float value = tile[32 * i + lane];
    own[i] = isnan(value) ? -INFINITY : value;
  }
  float greatest = 0.0f;
  Choice last = before_all();
  for (int j = 0; j < n; j++) {
    Choice next = after_all();
    UNROLL
    for (int i = 0; i < TILE / 32; i++) {
      const Choice candidate = {own[i], begin + 32 * i + lane};
      if (precedes(last, candidate) && precedes(candidate, next)) {
        next = candidate;
      }
    }
    last = simd_first(next);
    greatest = j == 0 ? last.value : greatest;
    if (lane == 0) {
      values[j] = last.value;
      indices[j] = last.index;
    }
  }
  if constexpr (SUM) {
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < TILE / 32; i++) {
      const float value = tile[32 * i + lane];
      sum += value == greatest ? 1.0f : metal::precise::exp(value - greatest);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      values[n] = sum;
    }
  }
}

// Of a row's tile, which begins at a multiple of 32, the logits whose bits in `words` are 0 become -infinity; one simdgroup.
// Words is a pointer: MLX passes few words in constant memory.
template <typename Words>
METAL_FUNC void keep_allowed(threadgroup float* tile, int size, int begin, int N, int lane, Words words) {
  for (int i = lane; i < min(size, N - begin); i += 32) {
    const bool allowed = words[(begin + i) / 32] >> lane & 1;
    tile[i] = allowed ? tile[i] : -INFINITY;
  }
}
