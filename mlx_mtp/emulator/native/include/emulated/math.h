// Metal's mathematics: overloads for every scalar type, and element by element for vectors.
#pragma once
#include "vec.h"

namespace metal {
namespace libm {
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float exp10(float x) { return __builtin_powf(10.0f, x); }
inline float powr(float x, float y) { return x < 0 ? __builtin_nanf("") : __builtin_powf(x, y); }
inline float divide(float x, float y) { return x / y; }
inline float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f; }
inline float fract(float x) {
  float f = x - __builtin_floorf(x);
  return f >= 1.0f ? 0x1.fffffep-1f : f;
}
// The argument is reduced before it meets pi: sinpi(x) is exact at integers.
inline float sinpi(float x) {
  float r = x - 2.0f * __builtin_rintf(0.5f * x);
  float y = __builtin_fabsf(r) > 0.5f ? __builtin_copysignf(1.0f, r) - r : r;
  return __builtin_sinf(3.14159265358979323846f * y);
}
inline float cospi(float x) {
  float r = __builtin_fabsf(x - 2.0f * __builtin_rintf(0.5f * x));
  return r == 0.5f ? 0.0f : __builtin_cosf(3.14159265358979323846f * r);
}
inline float tanpi(float x) { return sinpi(x) / cospi(x); }
inline float saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
}  // namespace libm

template <class F, class T, int N, class... V>
inline auto each(F f, const vec<T, N>& a, const V&... b) {
  vec<remove_cv_t<decltype(f(a[0], b[0]...))>, N> c;
  for (int i = 0; i < N; ++i) c[i] = f(a[i], b[i]...);
  return c;
}

#define EMULATED_FLOAT1(NAME, CALL)                                                  \
  inline float NAME(float x) { return CALL(x); }                                     \
  inline half NAME(half x) { return static_cast<half>(CALL(float(x))); }             \
  inline bfloat NAME(bfloat x) { return static_cast<bfloat>(CALL(float(x))); }       \
  template <class T, enable_if_t<is_integral_v<T>, int> = 0>                         \
  inline float NAME(T x) {                                                           \
    return CALL(float(x));                                                           \
  }                                                                                  \
  template <class T, int N>                                                          \
  inline vec<T, N> NAME(const vec<T, N>& v) {                                        \
    return each([](T x) { return NAME(x); }, v);                                     \
  }
#define EMULATED_FLOAT2(NAME, CALL)                                                                   \
  inline float NAME(float x, float y) { return CALL(x, y); }                                          \
  inline half NAME(half x, half y) { return static_cast<half>(CALL(float(x), float(y))); }            \
  inline bfloat NAME(bfloat x, bfloat y) { return static_cast<bfloat>(CALL(float(x), float(y))); }    \
  template <class T, int N>                                                                           \
  inline vec<T, N> NAME(const vec<T, N>& a, const vec<T, N>& b) {                                     \
    return each([](T x, T y) { return NAME(x, y); }, a, b);                                           \
  }
#define EMULATED_FLOATS                          \
  EMULATED_FLOAT1(acos, __builtin_acosf)         \
  EMULATED_FLOAT1(acosh, __builtin_acoshf)       \
  EMULATED_FLOAT1(asin, __builtin_asinf)         \
  EMULATED_FLOAT1(asinh, __builtin_asinhf)       \
  EMULATED_FLOAT1(atan, __builtin_atanf)         \
  EMULATED_FLOAT1(atanh, __builtin_atanhf)       \
  EMULATED_FLOAT1(ceil, __builtin_ceilf)         \
  EMULATED_FLOAT1(cos, __builtin_cosf)           \
  EMULATED_FLOAT1(cosh, __builtin_coshf)         \
  EMULATED_FLOAT1(cospi, libm::cospi)            \
  EMULATED_FLOAT1(exp, __builtin_expf)           \
  EMULATED_FLOAT1(exp2, __builtin_exp2f)         \
  EMULATED_FLOAT1(exp10, libm::exp10)            \
  EMULATED_FLOAT1(fabs, __builtin_fabsf)         \
  EMULATED_FLOAT1(floor, __builtin_floorf)       \
  EMULATED_FLOAT1(fract, libm::fract)            \
  EMULATED_FLOAT1(log, __builtin_logf)           \
  EMULATED_FLOAT1(log2, __builtin_log2f)         \
  EMULATED_FLOAT1(log10, __builtin_log10f)       \
  EMULATED_FLOAT1(rint, __builtin_rintf)         \
  EMULATED_FLOAT1(round, __builtin_roundf)       \
  EMULATED_FLOAT1(rsqrt, libm::rsqrt)            \
  EMULATED_FLOAT1(saturate, libm::saturate)      \
  EMULATED_FLOAT1(sign, libm::sign)              \
  EMULATED_FLOAT1(sin, __builtin_sinf)           \
  EMULATED_FLOAT1(sinh, __builtin_sinhf)         \
  EMULATED_FLOAT1(sinpi, libm::sinpi)            \
  EMULATED_FLOAT1(sqrt, __builtin_sqrtf)         \
  EMULATED_FLOAT1(tan, __builtin_tanf)           \
  EMULATED_FLOAT1(tanh, __builtin_tanhf)         \
  EMULATED_FLOAT1(tanpi, libm::tanpi)            \
  EMULATED_FLOAT1(trunc, __builtin_truncf)       \
  EMULATED_FLOAT2(atan2, __builtin_atan2f)       \
  EMULATED_FLOAT2(copysign, __builtin_copysignf) \
  EMULATED_FLOAT2(divide, libm::divide)          \
  EMULATED_FLOAT2(fdim, __builtin_fdimf)         \
  EMULATED_FLOAT2(fmax, __builtin_fmaxf)         \
  EMULATED_FLOAT2(fmin, __builtin_fminf)         \
  EMULATED_FLOAT2(fmod, __builtin_fmodf)         \
  EMULATED_FLOAT2(nextafter, __builtin_nextafterf) \
  EMULATED_FLOAT2(pow, __builtin_powf)           \
  EMULATED_FLOAT2(powr, libm::powr)

EMULATED_FLOATS
namespace fast {
EMULATED_FLOATS
}
namespace precise {
EMULATED_FLOATS
}

// Integers, and min, max and abs of every type.
#define EMULATED_ORDERED(T, ABS, MIN, MAX)               \
  inline T abs(T x) { return ABS; }                      \
  inline T min(T x, T y) { return MIN; }                 \
  inline T max(T x, T y) { return MAX; }                 \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); } \
  inline T min3(T x, T y, T z) { return min(x, min(y, z)); } \
  inline T max3(T x, T y, T z) { return max(x, max(y, z)); } \
  inline T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }
#define EMULATED_INTEGER(T, ABS) EMULATED_ORDERED(T, ABS, x < y ? x : y, x > y ? x : y)
#define EMULATED_REALS                                                                        \
  EMULATED_ORDERED(float, __builtin_fabsf(x), __builtin_fminf(x, y), __builtin_fmaxf(x, y))   \
  EMULATED_ORDERED(half, half(__builtin_fabsf(x)), half(__builtin_fminf(x, y)), half(__builtin_fmaxf(x, y))) \
  EMULATED_ORDERED(bfloat, bfloat(__builtin_fabsf(float(x))), bfloat(__builtin_fminf(float(x), float(y))), \
                   bfloat(__builtin_fmaxf(float(x), float(y))))
EMULATED_REALS
EMULATED_INTEGER(char, x < 0 ? char(-x) : x)
EMULATED_INTEGER(int8_t, x < 0 ? int8_t(-x) : x)
EMULATED_INTEGER(short, x < 0 ? short(-x) : x)
EMULATED_INTEGER(int, x < 0 ? -x : x)
EMULATED_INTEGER(long, x < 0 ? -x : x)
EMULATED_INTEGER(uchar, x)
EMULATED_INTEGER(ushort, x)
EMULATED_INTEGER(uint, x)
EMULATED_INTEGER(ulong, x)
EMULATED_INTEGER(bool, x)
#undef EMULATED_INTEGER
namespace fast {
EMULATED_REALS
}
namespace precise {
EMULATED_REALS
}
#undef EMULATED_REALS
#undef EMULATED_ORDERED
#undef EMULATED_FLOATS
#undef EMULATED_FLOAT1
#undef EMULATED_FLOAT2

template <class T, int N>
inline vec<T, N> abs(const vec<T, N>& a) {
  return each([](T x) { return abs(x); }, a);
}
template <class T, int N>
inline vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) {
  return each([](T x, T y) { return min(x, y); }, a, b);
}
template <class T, int N>
inline vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
  return each([](T x, T y) { return max(x, y); }, a, b);
}
template <class T, int N>
inline vec<T, N> min(const vec<T, N>& a, T b) {
  return min(a, vec<T, N>(b));
}
template <class T, int N>
inline vec<T, N> max(const vec<T, N>& a, T b) {
  return max(a, vec<T, N>(b));
}
template <class T, int N>
inline vec<T, N> clamp(const vec<T, N>& a, const vec<T, N>& lo, const vec<T, N>& hi) {
  return min(max(a, lo), hi);
}
template <class T, int N>
inline vec<T, N> clamp(const vec<T, N>& a, T lo, T hi) {
  return min(max(a, vec<T, N>(lo)), vec<T, N>(hi));
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return static_cast<half>(__builtin_fmaf(a, b, c)); }
inline bfloat fma(bfloat a, bfloat b, bfloat c) {
  return static_cast<bfloat>(__builtin_fmaf(float(a), float(b), float(c)));
}
template <class T, int N>
inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  return each([](T x, T y, T z) { return fma(x, y, z); }, a, b, c);
}
namespace fast {
using metal::fma;
}
namespace precise {
using metal::fma;
}

template <class T>
inline T mad(T a, T b, T c) {
  return a * b + c;
}
template <class T>
inline T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <class T>
inline T step(T edge, T x) {
  return x < edge ? T(0) : T(1);
}
template <class T>
inline T smoothstep(T lo, T hi, T x) {
  T t = clamp((x - lo) / (hi - lo), T(0), T(1));
  return t * t * (T(3) - T(2) * t);
}
template <class T, enable_if_t<is_arithmetic_v<T>, int> = 0>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N, class C>
inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<C, N>& c) {
  return each([](T x, T y, C z) { return z ? y : x; }, a, b, c);
}
template <class T, int N>
inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, bool c) {
  return c ? b : a;
}

#define EMULATED_TEST(NAME, EXPRESSION)                             \
  template <class T, enable_if_t<is_floating_point_v<T>, int> = 0>  \
  inline bool NAME(T value) {                                       \
    float x = static_cast<float>(value);                            \
    return EXPRESSION;                                              \
  }                                                                 \
  template <class T, int N>                                         \
  inline vec<bool, N> NAME(const vec<T, N>& v) {                    \
    return each([](T x) { return NAME(x); }, v);                    \
  }
EMULATED_TEST(isnan, __builtin_isnan(x))
EMULATED_TEST(isinf, __builtin_isinf(x))
EMULATED_TEST(isfinite, __builtin_isfinite(x))
EMULATED_TEST(signbit, __builtin_signbit(x))
#undef EMULATED_TEST
// A 16-bit subnormal is a normal float, so these two look at the type's own limits.
template <class T>
inline bool isnormal(T x) {
  return isfinite(x) && abs(x) >= numeric_limits<T>::min();
}

inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline half ldexp(half x, int e) { return static_cast<half>(__builtin_ldexpf(x, e)); }
inline bfloat ldexp(bfloat x, int e) { return static_cast<bfloat>(__builtin_ldexpf(float(x), e)); }
// The C library's frexp and modf write through pointers behind the emulator's back, so these do not call it.
inline int ilogb(float x) { return __builtin_ilogbf(x); }
template <class T, enable_if_t<is_floating_point_v<T>, int> = 0>
inline T frexp(T x, int& e) {
  float f = static_cast<float>(x);
  if (f == 0 || !__builtin_isfinite(f)) {
    e = 0;
    return x;
  }
  e = __builtin_ilogbf(f) + 1;
  return static_cast<T>(__builtin_scalbnf(f, -e));
}
template <class T, enable_if_t<is_floating_point_v<T>, int> = 0>
inline T modf(T x, T& whole) {
  whole = trunc(x);
  return isinf(x) ? T(0) : T(x - whole);
}
template <class T, enable_if_t<is_floating_point_v<T>, int> = 0>
inline T sincos(T x, T& c) {
  c = cos(x);
  return sin(x);
}
namespace fast {
using metal::isfinite;
using metal::isinf;
using metal::isnan;
using metal::ldexp;
using metal::frexp;
using metal::sincos;
}
namespace precise {
using metal::isfinite;
using metal::isinf;
using metal::isnan;
using metal::ldexp;
using metal::frexp;
using metal::sincos;
}

template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; ++i) s = s + a[i] * b[i];
  return s;
}
template <class T, int N>
inline T length_squared(const vec<T, N>& a) {
  return dot(a, a);
}
template <class T, int N>
inline T length(const vec<T, N>& a) {
  return sqrt(dot(a, a));
}
template <class T, int N>
inline T distance(const vec<T, N>& a, const vec<T, N>& b) {
  return length(a - b);
}
template <class T, int N>
inline vec<T, N> normalize(const vec<T, N>& a) {
  return a * rsqrt(dot(a, a));
}
template <class T>
inline vec<T, 3> cross(const vec<T, 3>& a, const vec<T, 3>& b) {
  return vec<T, 3>(a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]);
}
template <int N>
inline bool all(const vec<bool, N>& v) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && v[i];
  return r;
}
template <int N>
inline bool any(const vec<bool, N>& v) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || v[i];
  return r;
}
inline bool all(bool x) { return x; }
inline bool any(bool x) { return x; }

// Bits.
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R popcount(T x) {
  return static_cast<T>(__builtin_popcountll(static_cast<make_unsigned_t<T>>(x)));
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R clz(T x) {
  constexpr int bits = sizeof(T) * 8;
  auto u = static_cast<make_unsigned_t<T>>(x);
  return static_cast<T>(u ? __builtin_clzll(u) - (64 - bits) : bits);
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R ctz(T x) {
  auto u = static_cast<make_unsigned_t<T>>(x);
  return static_cast<T>(u ? __builtin_ctzll(u) : int(sizeof(T) * 8));
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R reverse_bits(T x) {
  auto u = static_cast<make_unsigned_t<T>>(x);
  return static_cast<T>(__builtin_bitreverse64(u) >> (64 - sizeof(T) * 8));
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R rotate(T x, T by) {
  constexpr unsigned bits = sizeof(T) * 8;
  auto u = static_cast<make_unsigned_t<T>>(x);
  unsigned n = static_cast<make_unsigned_t<T>>(by) % bits;
  return static_cast<T>(n ? (u << n) | (u >> (bits - n)) : u);
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R extract_bits(T x, uint offset, uint bits) {
  constexpr uint size = sizeof(T) * 8;
  if (bits == 0) return T(0);
  auto u = static_cast<make_unsigned_t<T>>(static_cast<make_unsigned_t<T>>(x) << (size - offset - bits));
  return static_cast<T>(static_cast<T>(u) >> (size - bits));
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R insert_bits(T base, T insert, uint offset, uint bits) {
  ulong mask = (bits >= 64 ? ~0ul : (1ul << bits) - 1) << offset;
  return static_cast<T>((ulong(base) & ~mask) | ((ulong(insert) << offset) & mask));
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R mulhi(T a, T b) {
  if constexpr (is_unsigned_v<T>)
    return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> (sizeof(T) * 8));
  else
    return static_cast<T>((static_cast<__int128>(a) * b) >> (sizeof(T) * 8));
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R absdiff(T a, T b) {
  return a > b ? T(a - b) : T(b - a);
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R addsat(T a, T b) {
  T c;
  if (!__builtin_add_overflow(a, b, &c)) return c;
  return b > 0 ? numeric_limits<T>::max() : numeric_limits<T>::min();
}
template <class T, class R = enable_if_t<is_integral_v<T>, T>>
inline R subsat(T a, T b) {
  T c;
  if (!__builtin_sub_overflow(a, b, &c)) return c;
  return b > 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
#define EMULATED_INTEGER_EACH(NAME)                     \
  template <class T, int N>                             \
  inline vec<T, N> NAME(const vec<T, N>& v) {           \
    return each([](T x) { return NAME(x); }, v);        \
  }
EMULATED_INTEGER_EACH(popcount)
EMULATED_INTEGER_EACH(clz)
EMULATED_INTEGER_EACH(ctz)
EMULATED_INTEGER_EACH(reverse_bits)
#undef EMULATED_INTEGER_EACH
}  // namespace metal
