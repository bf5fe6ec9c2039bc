// The compiler's own functions that MLX's preamble calls for bfloat (bf16_math.h).
#pragma once

#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

#define DECLARED_BUILTIN1(NAME) float __metal_##NAME(float x, int mode);
#define DECLARED_BUILTIN2(NAME) float __metal_##NAME(float x, float y, int mode);
#define DECLARED_BUILTIN3(NAME) float __metal_##NAME(float x, float y, float z, int mode);
DECLARED_BUILTIN1(acos) DECLARED_BUILTIN1(acosh) DECLARED_BUILTIN1(asin) DECLARED_BUILTIN1(asinh)
DECLARED_BUILTIN1(atan) DECLARED_BUILTIN1(atanh) DECLARED_BUILTIN1(ceil) DECLARED_BUILTIN1(cos)
DECLARED_BUILTIN1(cosh) DECLARED_BUILTIN1(cospi) DECLARED_BUILTIN1(exp) DECLARED_BUILTIN1(exp10)
DECLARED_BUILTIN1(exp2) DECLARED_BUILTIN1(fabs) DECLARED_BUILTIN1(floor) DECLARED_BUILTIN1(fract)
DECLARED_BUILTIN1(log) DECLARED_BUILTIN1(log10) DECLARED_BUILTIN1(log2) DECLARED_BUILTIN1(rint)
DECLARED_BUILTIN1(round) DECLARED_BUILTIN1(rsqrt) DECLARED_BUILTIN1(sin) DECLARED_BUILTIN1(sinh)
DECLARED_BUILTIN1(sinpi) DECLARED_BUILTIN1(sqrt) DECLARED_BUILTIN1(tan) DECLARED_BUILTIN1(tanh)
DECLARED_BUILTIN1(tanpi) DECLARED_BUILTIN1(trunc)
DECLARED_BUILTIN2(atan2) DECLARED_BUILTIN2(divide) DECLARED_BUILTIN2(fmax) DECLARED_BUILTIN2(fmin)
DECLARED_BUILTIN2(fmod) DECLARED_BUILTIN2(pow) DECLARED_BUILTIN2(powr)
DECLARED_BUILTIN3(fmax3) DECLARED_BUILTIN3(fmedian3) DECLARED_BUILTIN3(fmin3)
float __metal_fma(float x, float y, float z);
float __metal_frexp(float x, thread int* exponent);
float __metal_ldexp(float x, int exponent, int mode);
float __metal_nextafter(float x, float y);

ushort __metal_get_simdgroup_size(ushort);
#define DECLARED_BUILTIN_MOVE(NAME) ushort __metal_simd_##NAME(ushort x, ushort by);
#define DECLARED_BUILTIN_FILL(NAME) ushort __metal_simd_##NAME(ushort x, ushort filling, ushort delta, ushort modulo);
#define DECLARED_BUILTIN_REDUCE(NAME) float __metal_simd_##NAME(float x);
DECLARED_BUILTIN_MOVE(broadcast) DECLARED_BUILTIN_MOVE(shuffle) DECLARED_BUILTIN_MOVE(shuffle_down)
DECLARED_BUILTIN_MOVE(shuffle_up) DECLARED_BUILTIN_MOVE(shuffle_xor)
DECLARED_BUILTIN_MOVE(shuffle_rotate_down) DECLARED_BUILTIN_MOVE(shuffle_rotate_up)
DECLARED_BUILTIN_FILL(shuffle_and_fill_down) DECLARED_BUILTIN_FILL(shuffle_and_fill_up)
DECLARED_BUILTIN_REDUCE(max) DECLARED_BUILTIN_REDUCE(min) DECLARED_BUILTIN_REDUCE(sum)
DECLARED_BUILTIN_REDUCE(product) DECLARED_BUILTIN_REDUCE(xor)
DECLARED_BUILTIN_REDUCE(prefix_exclusive_product) DECLARED_BUILTIN_REDUCE(prefix_exclusive_sum)
DECLARED_BUILTIN_REDUCE(prefix_inclusive_product) DECLARED_BUILTIN_REDUCE(prefix_inclusive_sum)
