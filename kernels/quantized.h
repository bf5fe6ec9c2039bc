// Products of a few rows of x with quantized rows of weights, in the order of MLX's one-row kernels.
//
// A lane takes VALUES neighbouring values of K, then the ones LANES * VALUES further on. What stands under one scale is
// summed on its own, in chunks of 4 or 8 values, then scaled and added to the lane's result. A weight of an affine format is
// used where it lies in its byte (4 bits: in its 16-bit word), unshifted, and x divided by that power of two instead; one
// that crosses into the next byte is two terms.

#include "contraction.h"
#include "unroll.h"

// The kinds of formats: integers with scales and biases; floating-point codes with codes of scales; GGUF's IQ4_NL, with a
// float16 scale per group; its IQ4_XS (4 bits) and Q6_K (6 bits), whose scales are integers times a float16 number.
constant constexpr int AFFINE = 0;
constant constexpr int CODED = 1;
constant constexpr int BLOCKS = 2;
constant constexpr int SUPERBLOCKS = 3;

// Widths at which a lane's share of a row can be loaded; BYTES of a share is its greatest alignment. Shares of 2, 4 and
// 8 bits are whole words.
template <int BITS, int BYTES>
METAL_FUNC void load_bytes(const device uint8_t* from, thread uint* words) {
  if constexpr (BYTES % 4 == 0) {
    UNROLL
    for (int i = 0; i < BYTES / 4; i++) {
      words[i] = ((const device uint*)from)[i];
    }
  } else {
    constexpr int UNIT = BYTES % 2 == 0 ? 2 : 1;
    UNROLL
    for (int i = 0; i < (BYTES + 3) / 4; i++) {
      words[i] = 0;
    }
    UNROLL
    for (int i = 0; i < BYTES / UNIT; i++) {
      uint unit = UNIT == 2 ? ((const device ushort*)from)[i] : from[i];
      words[i * UNIT / 4] |= unit << (i * UNIT % 4 * 8);
    }
  }
}

METAL_FUNC float e2m1(uint code) {
  half magnitude_and_sign = as_type<half>(ushort((code & 7) << 9 | (code & 8) << 12));
  return float(half(magnitude_and_sign * half(16384)));
}

METAL_FUNC float e4m3(uint code) {
  uint magnitude = code & 127;
  uint bits = magnitude << 7 | (code & 128) << 8;
  return float(half(as_type<half>(ushort(magnitude == 127 ? bits | 0x4000 : bits)) * half(256)));
}

METAL_FUNC float e8m0(uint code) {
  return as_type<float>(code == 0 ? 0x400000u : code << 23);
}

// A value of IQ4's table, which is the polynomial of degree 4 that errs least, by 0.434 at most, rounded. A table in memory
// would be a load for each weight, and selecting bytes of four words takes more instructions.
METAL_FUNC float iq4(uint code) {
  const float c = float(int(code));
  return metal::precise::rint(fma(fma(fma(fma(0.00158604f, c, 0.0310864f), c, -1.37193f), c, 24.1738f), c, -126.567f));
}

// The scale of a group in a row of GGUF's blocks. Of SUPERBLOCKS 256 values share a record of words: the number, then
// two factors in each word.
template <int KIND, int GROUP, typename S>
METAL_FUNC float block_scale(const device S* scales, int group) {
  if constexpr (KIND == BLOCKS) {
    return float(as_type<half>(ushort(scales[group])));
  } else {
    constexpr int GROUPS = 256 / GROUP;
    const device S* record = scales + group / GROUPS * (1 + GROUPS / 2);
    const int at = group % GROUPS;
    const int factor = int(uint(record[1 + at / 2]) << (at % 2 ? 16 : 24)) >> 24;
    return float(as_type<half>(ushort(record[0]))) * float(factor);
  }
}

// The number of elements of `scales` in a row of K weights.
template <int KIND, int GROUP>
METAL_FUNC int scales_of_row(int K) {
  return KIND == SUPERBLOCKS ? K / 256 * (1 + 128 / GROUP) : K / GROUP;
}

// Value i of packed values of BITS bits.
template <int BITS>
METAL_FUNC uint code_at(const thread uint* words, int i) {
  const int word = i * BITS / 32, begin = i * BITS % 32;
  uint code = words[word] >> begin;
  if (begin + BITS > 32) {
    code |= words[word + 1] << (32 - begin);
  }
  return code & ((1u << BITS) - 1);
}

// Affine scales are numbers; those of floating-point formats are codes: e4m3 for groups of 16 (nvfp4), else e8m0.
template <int GROUP>
METAL_FUNC float scale_of(uint code) {
  return GROUP == 16 ? e4m3(code) : e8m0(code);
}

template <int BITS, int KIND>
struct Format {
  static constant constexpr int CHUNK = BITS == 3 || BITS == 5 ? 8 : 4;
  static constant constexpr int UNIT = BITS == 4 ? 16 : 8;
  static constant constexpr int MASK = (1 << BITS) - 1;

  // Where value i of a chunk begins in its unit; it may go on in the next one.
  static constexpr int shift(int i) { return i * BITS % UNIT; }

  static METAL_FUNC uint unit_at(const thread uint* words, int bit) {
    return words[bit / 32] >> (bit % 32) & ((1u << UNIT) - 1);
  }

  // Chunk c of the loaded words as floats: low[i], and high[i] of values that cross.
  static METAL_FUNC void decode(const thread uint* words, int c, thread float* low, thread float* high) {
    UNROLL
    for (int i = 0; i < CHUNK; i++) {
      const int bit = c * CHUNK * BITS + i * BITS / UNIT * UNIT;
      const uint at = unit_at(words, bit);
      if constexpr (KIND >= BLOCKS) {
        const uint code = code_at<BITS>(words, c * CHUNK + i);
        low[i] = BITS == 4 ? iq4(code) : float(int(code) - 32);
      } else if constexpr (KIND == CODED) {
        low[i] = BITS == 4 ? e2m1(at >> shift(i)) : e4m3(at);
      } else {
        low[i] = float(int(at & uint(MASK << shift(i))));
        if constexpr (BITS == 3 || BITS > 4) {
          if (shift(i) + BITS > UNIT) {
            high[i] = float(int(unit_at(words, bit + UNIT) & uint(MASK >> (UNIT - shift(i)))));
          }
        }
      }
    }
  }

  // Loads a chunk of x in the weights' order; returns its part of the sum that biases are multiplied with.
  template <typename T>
  static METAL_FUNC float load(const device T* x, float sum, thread float* values) {
    UNROLL
    for (int i = 0; i < CHUNK; i++) {
      values[i] = float(x[i]);
    }
    if constexpr (KIND != AFFINE) {
      return sum;
    }
    if constexpr (BITS == 8) {
      UNROLL
      for (int i = 0; i < CHUNK; i++) {
        sum += values[i];
      }
    } else {
      float chunk = values[0];
      UNROLL
      for (int i = 1; i < CHUNK; i++) {
        chunk += values[i];
      }
      sum += chunk;
    }
    UNROLL
    for (int i = 0; i < CHUNK; i++) {
      values[i] = values[i] / float(1 << shift(i));
    }
    return sum;
  }

  static METAL_FUNC float dot(float sum, const thread float* x, const thread float* low, const thread float* high) {
    if constexpr (KIND >= BLOCKS) {
      UNROLL
      for (int i = 0; i < CHUNK; i++) {
        sum = fma(low[i], x[i], sum);
      }
    } else if constexpr (BITS == 2 || BITS == 4) {
      float four = MULTIPLY_ADD(x[0], low[0], PRODUCT(x[1], low[1]));
      four = MULTIPLY_ADD(x[2], low[2], four);
      sum += MULTIPLY_ADD(x[3], low[3], four);
    } else {
      UNROLL
      for (int i = 0; i < CHUNK; i++) {
        sum = MULTIPLY_ADD(low[i], x[i], sum);
        if constexpr (KIND == AFFINE) {
          if (shift(i) + BITS > UNIT) {
            sum = MULTIPLY_ADD(high[i], x[i] * 256.0f, sum);
          }
        }
      }
    }
    return sum;
  }

  static METAL_FUNC float scaled(float sum, float bias, float scale, float products) {
    if constexpr (KIND == CODED) {
      return PRODUCT(scale, products);
    } else {
      return CONTRACTION == FUSED_ACROSS ? MULTIPLY_ADD(sum, bias, PRODUCT(scale, products))
                                         : MULTIPLY_ADD(scale, products, PRODUCT(sum, bias));
    }
  }
};

// Weights [.., K]; several whose rows meet the same rows of x are loaded side by side.
template <typename S>
struct Source {
  const device uint8_t* w;
  const device S* scales;
  const device S* biases;
};

// Adds to result [ROWS][RESULTS] one lane's share of the rows of x that begin at `rows`, times the weight rows `outputs`, as
// many of each source in turn.
template <typename T, typename S, int BITS, int KIND, int GROUP, int VALUES, int LANES, int ROWS, int RESULTS, int SOURCES>
METAL_FUNC void gathered_products(
    const thread Source<S> (&sources)[SOURCES],
    const device T* x,
    const thread int* rows,
    const thread int* outputs,
    int K,
    int lane,
    thread float (&result)[ROWS][RESULTS]) {
  using F = Format<BITS, KIND>;
  constexpr int STEP = VALUES < GROUP ? VALUES : GROUP; // values under one scale
  constexpr int BYTES = STEP * BITS / 8;
  constexpr int STRIDE = LANES * VALUES;
  constexpr int EACH = RESULTS / SOURCES;

  // Long offsets once; in the loop, where they would cost more than the products, a row is a number of bytes and scales further.
  const int row_bytes = K / 8 * BITS, row_scales = scales_of_row<KIND, GROUP>(K);
  Source<S> from[SOURCES];
  int byte_offset[RESULTS], scale_offset[RESULTS];
  UNROLL
  for (int r = 0; r < RESULTS; r++) {
    const int first = outputs[r / EACH * EACH], s = r / EACH;
    const size_t scales = size_t(first) * row_scales;
    from[s] = {sources[s].w + size_t(first) * row_bytes, sources[s].scales + scales, sources[s].biases + scales};
    byte_offset[r] = (outputs[r] - first) * row_bytes;
    scale_offset[r] = (outputs[r] - first) * row_scales;
  }
  for (int begin = lane * VALUES; begin < K; begin += STRIDE) {
    for (int k = begin; k < begin + VALUES; k += STEP) {
      float scale[RESULTS], bias[RESULTS];
      uint words[RESULTS][(BYTES + 3) / 4];
      UNROLL
      for (int r = 0; r < RESULTS; r++) {
        const int group = scale_offset[r] + k / GROUP;
        if constexpr (KIND >= BLOCKS) {
          scale[r] = block_scale<KIND, GROUP>(from[r / EACH].scales + scale_offset[r], k / GROUP);
          bias[r] = 0.0f;
        } else if constexpr (KIND == CODED) {
          scale[r] = scale_of<GROUP>(from[r / EACH].scales[group]);
          bias[r] = 0.0f;
        } else {
          scale[r] = float(from[r / EACH].scales[group]);
          bias[r] = float(from[r / EACH].biases[group]);
        }
        load_bytes<BITS, BYTES>(from[r / EACH].w + byte_offset[r] + k * BITS / 8, words[r]);
      }
      float products[ROWS][RESULTS] = {}, sums[ROWS] = {};
      UNROLL
      for (int c = 0; c < STEP / F::CHUNK; c++) {
        float values[ROWS][F::CHUNK];
        UNROLL
        for (int m = 0; m < ROWS; m++) {
          sums[m] = F::load(x + rows[m] + k + c * F::CHUNK, sums[m], values[m]);
        }
        UNROLL
        for (int r = 0; r < RESULTS; r++) {
          float low[F::CHUNK], high[F::CHUNK];
          F::decode(words[r], c, low, high);
          UNROLL
          for (int m = 0; m < ROWS; m++) {
            products[m][r] = F::dot(products[m][r], values[m], low, high);
          }
        }
      }
      UNROLL
      for (int r = 0; r < RESULTS; r++) {
        // Arguments in this order: a compiler that contracts freely then fuses the one of the two products that it fuses
        // in MLX's kernels, where the products are the last to be known.
        UNROLL
        for (int m = 0; m < ROWS; m++) {
          if constexpr (KIND >= BLOCKS) {
            result[m][r] = fma(scale[r], products[m][r], result[m][r]);
          } else if constexpr (KIND == CODED && CONTRACTION == FUSED_ACROSS) {
            result[m][r] = MULTIPLY_ADD(scale[r], products[m][r], result[m][r]);
          } else {
            result[m][r] += F::scaled(sums[m], bias[r], scale[r], products[m][r]);
          }
        }
      }
    }
  }
}

// The sum of a result over the lanes that share its row.
template <int LANES>
METAL_FUNC float lanes_sum(float result) {
  return LANES == 4 ? quad_sum(result) : simd_sum(result);
}

// (start, end) of the weight that row n of a stack belongs to; `ends`: where each of them ends.
template <typename Ends>
METAL_FUNC int2 place_of(Ends ends, int weights, int n) {
  int start = 0, end = ends[0];
  for (int p = 1; n >= end && p < weights; p++) {
    start = end;
    end = ends[p];
  }
  return int2(start, end);
}
