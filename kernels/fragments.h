// Quantized weights as the elements of 8x8 matrices, which the 32 lanes of a simdgroup hold two each.

#include <metal_simdgroup_matrix>

template <int BITS, int KIND>
METAL_FUNC float weight_of(uint code, float scale, float bias) {
  if constexpr (KIND == CODED) {
    return scale * (BITS == 4 ? e2m1(code) : e4m3(code));
  } else {
    return fma(scale, float(int(code)), bias);
  }
}

// A lane's two runs of RUN neighbouring values in one row of weights, and what scales each; past the row's end zeros.
template <int BITS, int KIND, int GROUP, int RUN>
struct Runs {
  static constant constexpr int SCALES = GROUP < 2 * RUN ? 2 : 1;
  uint words[2 * RUN * BITS / 32];
  float scale[2], bias[2];

  template <typename S>
  METAL_FUNC void load(
      const device uint8_t* w, const device S* scales, const device S* biases, int k, int K) thread {
    if (k + 2 * RUN <= K) {
      load_bytes<BITS, 2 * RUN * BITS / 8>(w + k / 8 * BITS, words);
    } else {
      UNROLL
      for (int i = 0; i < 2 * RUN * BITS / 32; i++) {
        words[i] = 0;
      }
      if (GROUP == RUN && k < K) { // else K is a multiple of both runs
        load_bytes<BITS, RUN * BITS / 8>(w + k / 8 * BITS, words);
      }
    }
    UNROLL
    for (int i = 0; i < SCALES; i++) {
      const bool inside = k + i * RUN < K;
      const int group = (k + i * RUN) / GROUP;
      if constexpr (KIND == CODED) {
        scale[i] = inside ? scale_of<GROUP>(scales[group]) : 0.0f;
        bias[i] = 0.0f;
      } else {
        scale[i] = inside ? float(scales[group]) : 0.0f;
        bias[i] = inside ? float(biases[group]) : 0.0f;
      }
    }
  }

  METAL_FUNC float at(int run, int i) const thread {
    const int s = SCALES == 2 ? run : 0;
    return weight_of<BITS, KIND>(code_at<BITS>(words, run * RUN + i), scale[s], bias[s]);
  }
};
