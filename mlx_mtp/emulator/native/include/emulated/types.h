// Scalar types, traits and limits of the Metal Shading Language.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef _Float16 half;
#if __clang_major__ >= 17
typedef __bf16 bfloat;
#else
#include "bfloat.h"
#endif

static_assert(sizeof(long) == 8, "the emulator needs a 64-bit long, as Metal has");

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2u + 1u)
#define SHRT_MAX __SHRT_MAX__
#define USHRT_MAX (__SHRT_MAX__ * 2 + 1)
#define CHAR_BIT 8
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_SQRT2_F 1.41421356237309504880f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_PI_4_F 0.78539816339744830962f
#define M_2_PI_F 0.63661977236758134308f

namespace metal {
using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return V; }
  constexpr T operator()() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool C, class A, class B>
using conditional_t = typename conditional<C, A, B>::type;

template <class... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
struct _conjunction : bool_constant<(B::value && ...)> {};

#define EMULATED_TRAIT(NAME, VALUE)        \
  template <class T>                       \
  struct NAME : bool_constant<(VALUE)> {}; \
  template <class T>                       \
  constexpr bool NAME##_v = VALUE;
#define EMULATED_TRAIT2(NAME, VALUE)       \
  template <class A, class B>              \
  struct NAME : bool_constant<(VALUE)> {}; \
  template <class A, class B>              \
  constexpr bool NAME##_v = VALUE;
#define EMULATED_TYPE(NAME, TYPE)          \
  template <class T>                       \
  struct NAME {                            \
    using type = TYPE;                     \
  };                                       \
  template <class T>                       \
  using NAME##_t = TYPE;

EMULATED_TYPE(remove_cv, __remove_cv(T))
EMULATED_TYPE(remove_const, __remove_const(T))
EMULATED_TYPE(remove_reference, __remove_reference_t(T))
EMULATED_TYPE(remove_pointer, __remove_pointer(T))
EMULATED_TYPE(remove_addrspace, T)
EMULATED_TYPE(decay, __decay(T))
EMULATED_TYPE(make_unsigned, __make_unsigned(T))
EMULATED_TYPE(make_signed, __make_signed(T))

EMULATED_TRAIT2(is_same, __is_same(A, B))
EMULATED_TRAIT2(is_convertible, __is_convertible(A, B))
EMULATED_TRAIT2(is_base_of, __is_base_of(A, B))
EMULATED_TRAIT(is_pointer, __is_pointer(T))
EMULATED_TRAIT(is_class, __is_class(T))
EMULATED_TRAIT(is_enum, __is_enum(T))
EMULATED_TRAIT(is_floating_point, __is_same(__remove_cv(T), float) || __is_same(__remove_cv(T), half) ||
                                      __is_same(__remove_cv(T), bfloat))
EMULATED_TRAIT(is_integral, __is_integral(T))
EMULATED_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
EMULATED_TRAIT(is_scalar, is_arithmetic_v<T>)
EMULATED_TRAIT(is_unsigned, __is_unsigned(T))
EMULATED_TRAIT(is_signed, is_arithmetic_v<T> && !is_unsigned_v<T>)
template <class T, class... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A>
constexpr bool is_constructible_v = __is_constructible(T, A...);
#undef EMULATED_TRAIT
#undef EMULATED_TRAIT2
#undef EMULATED_TYPE

template <class T>
T&& declval();
template <class T>
constexpr remove_reference_t<T>&& move(T&& x) {
  return static_cast<remove_reference_t<T>&&>(x);
}
template <class T>
constexpr T&& forward(remove_reference_t<T>& x) {
  return static_cast<T&&>(x);
}
// Uniform over the threads or not, a value is a value here.
template <class T>
using uniform = T;
template <class T>
constexpr T make_uniform(T x) {
  return x;
}

template <class T, size_t N>
struct array {
  T elements[N];
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};

// Clang casts no half to bfloat; Metal does.
template <class T>
constexpr bfloat to_bfloat(T x) {
  if constexpr (is_same_v<T, half>)
    return bfloat(static_cast<float>(x));
  else
    return bfloat(x);
}

template <class T>
void swap(T& a, T& b) {
  T c = a;
  a = b;
  b = c;
}

template <class T>
struct integer_limits {
  static constexpr bool is_specialized = true, is_integer = true, is_exact = true;
  static constexpr bool is_signed = !is_unsigned_v<T>, has_infinity = false;
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() { return static_cast<T>(~static_cast<make_unsigned_t<T>>(0) >> is_signed); }
  static constexpr T min() { return is_signed ? static_cast<T>(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <class T>
struct numeric_limits : integer_limits<T> {};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};

#define EMULATED_FLOAT_LIMITS(T, BITS, MANTISSA, MAX, MIN, EPSILON, DENORM)                       \
  template <>                                                                                     \
  struct numeric_limits<T> {                                                                      \
    static constexpr bool is_specialized = true, is_integer = false, is_signed = true;            \
    static constexpr bool has_infinity = true, has_quiet_NaN = true, is_exact = false;            \
    static constexpr int digits = MANTISSA;                                                       \
    static constexpr T infinity() { return static_cast<T>(__builtin_inff()); }                    \
    static constexpr T quiet_NaN() { return static_cast<T>(__builtin_nanf("")); }                 \
    static constexpr T max() { return static_cast<T>(MAX); }                                      \
    static constexpr T lowest() { return static_cast<T>(-(MAX)); }                                \
    static constexpr T min() { return static_cast<T>(MIN); }                                      \
    static constexpr T epsilon() { return static_cast<T>(EPSILON); }                              \
    static constexpr T denorm_min() { return static_cast<T>(DENORM); }                            \
  };
EMULATED_FLOAT_LIMITS(float, 32, 24, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, 0x1p-149f)
EMULATED_FLOAT_LIMITS(half, 16, 11, 65504.0f, 0x1p-14f, 0x1p-10f, 0x1p-24f)
EMULATED_FLOAT_LIMITS(bfloat, 16, 8, 0x1.FEp127f, 0x1p-126f, 0x1p-7f, 0x1p-133f)
#undef EMULATED_FLOAT_LIMITS
}  // namespace metal

// The bits of `x` as a `To` of the same size.
template <class To, class From>
inline __attribute__((always_inline)) To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To y;
  __builtin_memcpy(static_cast<void*>(&y), static_cast<const void*>(&x), sizeof(To));
  return y;
}
namespace metal {
using ::as_type;
}
