// Math, common, relational and geometric functions: of float and half, and of their vectors. MLX's preamble adds bfloat.
#pragma once

#define DECLARED_EACH(F, T, ...) \
  F(T, __VA_ARGS__) F(T##2, __VA_ARGS__) F(T##3, __VA_ARGS__) F(T##4, __VA_ARGS__)
#define DECLARED_FLOATS(F, ...) DECLARED_EACH(F, float, __VA_ARGS__) DECLARED_EACH(F, half, __VA_ARGS__)
#define DECLARED_SINGLES(F, ...) DECLARED_EACH(F, float, __VA_ARGS__)
#define DECLARED_1(T, NAME) T NAME(T x);
#define DECLARED_2(T, NAME) T NAME(T x, T y);
#define DECLARED_3(T, NAME) T NAME(T x, T y, T z);

#define DECLARED_MATH(OF)                                             \
  OF(DECLARED_1, abs) OF(DECLARED_1, acos) OF(DECLARED_1, acosh)      \
  OF(DECLARED_1, asin) OF(DECLARED_1, asinh) OF(DECLARED_1, atan)     \
  OF(DECLARED_1, atanh) OF(DECLARED_1, ceil) OF(DECLARED_1, cos)      \
  OF(DECLARED_1, cosh) OF(DECLARED_1, cospi) OF(DECLARED_1, exp)      \
  OF(DECLARED_1, exp2) OF(DECLARED_1, exp10) OF(DECLARED_1, fabs)     \
  OF(DECLARED_1, floor) OF(DECLARED_1, fract) OF(DECLARED_1, log)     \
  OF(DECLARED_1, log2) OF(DECLARED_1, log10) OF(DECLARED_1, rint)     \
  OF(DECLARED_1, round) OF(DECLARED_1, rsqrt)                         \
  OF(DECLARED_1, saturate) OF(DECLARED_1, sign) OF(DECLARED_1, sin)   \
  OF(DECLARED_1, sinh) OF(DECLARED_1, sinpi) OF(DECLARED_1, sqrt)     \
  OF(DECLARED_1, tan) OF(DECLARED_1, tanh) OF(DECLARED_1, tanpi)      \
  OF(DECLARED_1, trunc) OF(DECLARED_2, atan2) OF(DECLARED_2, divide)  \
  OF(DECLARED_2, fdim) OF(DECLARED_2, fmax) OF(DECLARED_2, fmin)      \
  OF(DECLARED_2, fmod) OF(DECLARED_2, max) OF(DECLARED_2, min)        \
  OF(DECLARED_2, nextafter) OF(DECLARED_2, pow) OF(DECLARED_2, powr)  \
  OF(DECLARED_3, clamp) OF(DECLARED_3, fma) OF(DECLARED_3, fmax3)     \
  OF(DECLARED_3, fmin3) OF(DECLARED_3, fmedian3) OF(DECLARED_3, max3) \
  OF(DECLARED_3, median3) OF(DECLARED_3, min3) OF(DECLARED_3, mix)    \
  OF(DECLARED_POINTED, _)

#define DECLARED_POINTED(T, _)                  \
  T modf(T x, thread T& whole);                 \
  T sincos(T x, thread T& cosine);

// Vectors with one number.
#define DECLARED_SCALED(T, N)                             \
  vec<T, N> min(vec<T, N> x, T y);                        \
  vec<T, N> max(vec<T, N> x, T y);                        \
  vec<T, N> clamp(vec<T, N> x, T low, T high);
#define DECLARED_SCALED_EACH(T) DECLARED_SCALED(T, 2) DECLARED_SCALED(T, 3) DECLARED_SCALED(T, 4)

#define DECLARED_EXPONENT(T, I) \
  T frexp(T x, thread I& exponent); \
  T ldexp(T x, I exponent);         \
  I ilogb(T x);
#define DECLARED_EXPONENTS(T) \
  DECLARED_EXPONENT(T, int) DECLARED_EXPONENT(T##2, int2) DECLARED_EXPONENT(T##3, int3) DECLARED_EXPONENT(T##4, int4)

namespace metal {
DECLARED_MATH(DECLARED_FLOATS)
DECLARED_FLOATS(DECLARED_2, copysign)
DECLARED_FLOATS(DECLARED_2, step)
DECLARED_FLOATS(DECLARED_3, smoothstep)
DECLARED_EXPONENTS(float)
DECLARED_EXPONENTS(half)
DECLARED_SCALED_EACH(float)
DECLARED_SCALED_EACH(half)
// The specification has these for single precision only.
namespace fast {
DECLARED_MATH(DECLARED_SINGLES)
}
namespace precise {
DECLARED_MATH(DECLARED_SINGLES)
}

#define DECLARED_TEST(T, NAME) bool NAME(T x);
#define DECLARED_VECTOR_TEST(T, NAME) bool2 NAME(T##2 x); bool3 NAME(T##3 x); bool4 NAME(T##4 x);
#define DECLARED_TESTS(NAME)                                      \
  DECLARED_TEST(float, NAME) DECLARED_TEST(half, NAME) DECLARED_TEST(bfloat, NAME) \
  DECLARED_VECTOR_TEST(float, NAME) DECLARED_VECTOR_TEST(half, NAME)
DECLARED_TESTS(isfinite)
DECLARED_TESTS(isinf)
DECLARED_TESTS(isnan)
DECLARED_TESTS(isnormal)
DECLARED_TESTS(signbit)

#define DECLARED_GEOMETRY(T, N)                     \
  T dot(vec<T, N> x, vec<T, N> y);                  \
  T length(vec<T, N> x);                            \
  T length_squared(vec<T, N> x);                    \
  T distance(vec<T, N> x, vec<T, N> y);             \
  T distance_squared(vec<T, N> x, vec<T, N> y);     \
  vec<T, N> normalize(vec<T, N> x);                 \
  vec<T, N> refract(vec<T, N> x, vec<T, N> normal, T ratio); \
  vec<T, N> faceforward(vec<T, N> normal, vec<T, N> x, vec<T, N> reference); \
  vec<T, N> reflect(vec<T, N> x, vec<T, N> normal);
#define DECLARED_GEOMETRIES(T) \
  DECLARED_GEOMETRY(T, 2) DECLARED_GEOMETRY(T, 3) DECLARED_GEOMETRY(T, 4) T##3 cross(T##3 x, T##3 y);
DECLARED_GEOMETRIES(float)
DECLARED_GEOMETRIES(half)

#define DECLARED_SELECT(T)                       \
  T select(T a, T b, bool c);                    \
  vec<T, 2> select(vec<T, 2> a, vec<T, 2> b, bool2 c); \
  vec<T, 3> select(vec<T, 3> a, vec<T, 3> b, bool3 c); \
  vec<T, 4> select(vec<T, 4> a, vec<T, 4> b, bool4 c);
DECLARED_SELECT(float)
DECLARED_SELECT(half)
DECLARED_SELECT(bfloat)
DECLARED_SELECT(char)
DECLARED_SELECT(uchar)
DECLARED_SELECT(short)
DECLARED_SELECT(ushort)
DECLARED_SELECT(int)
DECLARED_SELECT(uint)
DECLARED_SELECT(long)
DECLARED_SELECT(ulong)
}  // namespace metal
