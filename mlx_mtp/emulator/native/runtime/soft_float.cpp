// Conversions that clang calls by name where the processor has none: round to nearest, ties to even.
#include "state.h"

namespace {
u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
float float_of(u32 b) { return __builtin_bit_cast(float, b); }

unsigned short to_bfloat(float x) {
  u32 b = bits_of(x);
  if ((b & 0x7fffffff) > 0x7f800000) return static_cast<unsigned short>(b >> 16 | 0x40);
  return static_cast<unsigned short>((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

unsigned short to_half(float x) {
  u32 b = bits_of(x), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000) return static_cast<unsigned short>(sign | 0x7e00 | (a >> 13 & 0x3ff));
  if (a >= 0x47800000) return static_cast<unsigned short>(sign | 0x7c00);
  if (a < 0x38800000) {  // a subnormal half is a multiple of 2^-24: let the adder round to it
    float r = float_of(a) + 0.5f;
    return static_cast<unsigned short>(sign | (bits_of(r) - bits_of(0.5f)));
  }
  return static_cast<unsigned short>(sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13));
}

float from_half(unsigned short h) {
  u32 sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  float r = static_cast<float>(mantissa) * 0x1p-24f;
  return float_of(sign | bits_of(r));
}

// Rounding twice is wrong only at ties, which the sticky last bit of a rounding to odd keeps apart.
float to_odd(double x) {
  float f = static_cast<float>(x);
  u32 b = bits_of(f);
  if (static_cast<double>(f) == x || x != x || (b & 1)) return f;
  bool larger = __builtin_fabs(static_cast<double>(f)) > __builtin_fabs(x);
  return float_of(larger ? b - 1 : b + 1);
}
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
#if __clang_major__ >= 17
__bf16 __truncsfbf2(float x) { return __builtin_bit_cast(__bf16, to_bfloat(x)); }
__bf16 __truncdfbf2(double x) { return __builtin_bit_cast(__bf16, to_bfloat(to_odd(x))); }
#endif
_Float16 __truncsfhf2(float x) { return __builtin_bit_cast(_Float16, to_half(x)); }
_Float16 __truncdfhf2(double x) { return __builtin_bit_cast(_Float16, to_half(to_odd(x))); }
float __extendhfsf2(_Float16 x) { return from_half(__builtin_bit_cast(unsigned short, x)); }
}
