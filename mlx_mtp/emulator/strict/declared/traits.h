// Type traits and numeric_limits, in namespace metal; their values are in the constant space.
#pragma once

namespace metal {
template <typename T, T V>
struct integral_constant {
  static constexpr constant T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const thread { return V; }
  constexpr operator T() const constant { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool, typename A, typename B>
struct conditional {
  using type = A;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool C, typename A, typename B>
using conditional_t = typename conditional<C, A, B>::type;

template <typename... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <typename... B>
struct _conjunction : bool_constant<(B::value && ...)> {};

#define DECLARED_TRAIT(NAME, VALUE)               \
  template <typename T>                           \
  struct NAME : bool_constant<VALUE> {};          \
  template <typename T>                           \
  constexpr constant bool NAME##_v = VALUE;
#define DECLARED_TRAIT2(NAME, VALUE)              \
  template <typename A, typename B>               \
  struct NAME : bool_constant<VALUE> {};          \
  template <typename A, typename B>               \
  constexpr constant bool NAME##_v = VALUE;
#define DECLARED_TYPE(NAME, TYPE)                 \
  template <typename T>                           \
  struct NAME {                                   \
    using type = TYPE;                            \
  };                                              \
  template <typename T>                           \
  using NAME##_t = TYPE;

DECLARED_TYPE(remove_cv, __remove_cv(T))
DECLARED_TYPE(remove_const, __remove_const(T))
DECLARED_TYPE(remove_volatile, __remove_volatile(T))
DECLARED_TYPE(remove_reference, __remove_reference_t(T))
DECLARED_TYPE(remove_pointer, __remove_pointer(T))
DECLARED_TYPE(decay, __decay(T))
DECLARED_TYPE(make_unsigned, __make_unsigned(T))
DECLARED_TYPE(make_signed, __make_signed(T))
DECLARED_TYPE(underlying_type, __underlying_type(T))

template <typename T>
struct remove_addrspace {
  using type = T;
};
template <typename T>
struct remove_addrspace<thread T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<device T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<threadgroup T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<constant T> {
  using type = T;
};
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

DECLARED_TRAIT2(is_same, __is_same(A, B))
DECLARED_TRAIT2(is_convertible, __is_convertible(A, B))
DECLARED_TRAIT2(is_base_of, __is_base_of(A, B))
DECLARED_TRAIT(is_pointer, __is_pointer(T))
DECLARED_TRAIT(is_reference, __is_reference(T))
DECLARED_TRAIT(is_array, __is_array(T))
DECLARED_TRAIT(is_void, __is_void(T))
DECLARED_TRAIT(is_const, __is_const(T))
DECLARED_TRAIT(is_class, __is_class(T))
DECLARED_TRAIT(is_enum, __is_enum(T))
DECLARED_TRAIT(is_union, __is_union(T))
DECLARED_TRAIT(is_integral, __is_integral(T))
DECLARED_TRAIT(is_floating_point, __is_floating_point(T))
DECLARED_TRAIT(is_arithmetic, __is_arithmetic(T))
DECLARED_TRAIT(is_scalar, __is_arithmetic(T))
DECLARED_TRAIT(is_unsigned, __is_unsigned(T))
DECLARED_TRAIT(is_signed, __is_signed(T))
DECLARED_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
template <typename T, typename... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <typename T, typename... A>
constexpr constant bool is_constructible_v = __is_constructible(T, A...);

template <typename T>
T declval();

// A value that all threads share is a value.
template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T x) {
  return x;
}

template <typename T>
struct numeric_limits;
#define DECLARED_INTEGER_LIMITS(T, SIGNED, MIN, MAX)                                                 \
  template <>                                                                                        \
  struct numeric_limits<T> {                                                                         \
    static constexpr constant bool is_specialized = true, is_integer = true, is_signed = SIGNED;     \
    static constexpr constant bool is_exact = true, has_infinity = false, has_quiet_NaN = false;     \
    static constexpr constant int digits = 8 * sizeof(T) - SIGNED, radix = 2;                        \
    static constexpr T min() { return MIN; }                                                         \
    static constexpr T max() { return MAX; }                                                         \
    static constexpr T lowest() { return MIN; }                                                      \
  };
#define DECLARED_FLOAT_LIMITS(T, DIGITS, MIN, MAX, EPSILON, LEAST)                                   \
  template <>                                                                                        \
  struct numeric_limits<T> {                                                                         \
    static constexpr constant bool is_specialized = true, is_integer = false, is_signed = true;      \
    static constexpr constant bool is_exact = false, has_infinity = true, has_quiet_NaN = true;      \
    static constexpr constant int digits = DIGITS, radix = 2;                                        \
    static constexpr T min() { return T(MIN); }                                                      \
    static constexpr T max() { return T(MAX); }                                                      \
    static constexpr T lowest() { return T(-MAX); }                                                  \
    static constexpr T epsilon() { return T(EPSILON); }                                              \
    static constexpr T denorm_min() { return T(LEAST); }                                             \
    static constexpr T infinity() { return T(INFINITY); }                                            \
    static constexpr T quiet_NaN() { return T(NAN); }                                                \
  };
DECLARED_INTEGER_LIMITS(bool, 0, false, true)
DECLARED_INTEGER_LIMITS(char, 1, CHAR_MIN, CHAR_MAX)
DECLARED_INTEGER_LIMITS(signed char, 1, SCHAR_MIN, SCHAR_MAX)
DECLARED_INTEGER_LIMITS(uchar, 0, 0, UCHAR_MAX)
DECLARED_INTEGER_LIMITS(short, 1, SHRT_MIN, SHRT_MAX)
DECLARED_INTEGER_LIMITS(ushort, 0, 0, USHRT_MAX)
DECLARED_INTEGER_LIMITS(int, 1, INT_MIN, INT_MAX)
DECLARED_INTEGER_LIMITS(uint, 0, 0, UINT_MAX)
DECLARED_INTEGER_LIMITS(long, 1, LONG_MIN, LONG_MAX)
DECLARED_INTEGER_LIMITS(ulong, 0, 0, ULONG_MAX)
DECLARED_FLOAT_LIMITS(float, 24, __FLT_MIN__, __FLT_MAX__, __FLT_EPSILON__, 0x1p-149f)
DECLARED_FLOAT_LIMITS(half, 11, 0x1p-14f, 65504.0f, 0x1p-10f, 0x1p-24f)
DECLARED_FLOAT_LIMITS(bfloat, 8, 0x1p-126f, 0x1.FEp127f, 0x1p-7f, 0x1p-133f)
}  // namespace metal
