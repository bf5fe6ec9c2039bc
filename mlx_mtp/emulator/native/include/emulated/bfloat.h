// bfloat for clang 16, which has no arithmetic on __bf16: float rounded to nearest even after every operation.
#pragma once

struct bfloat {
  unsigned short bits;

  bfloat() = default;
  constexpr bfloat(int x) : bfloat(static_cast<float>(x)) {}
  explicit constexpr bfloat(float x) : bits(rounded(__builtin_bit_cast(unsigned, x))) {}
  template <class T, class = decltype(static_cast<float>(T()))>
  explicit constexpr bfloat(T x) : bfloat(static_cast<float>(x)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16); }

 private:
  static constexpr unsigned short rounded(unsigned b) {
    if ((b & 0x7fffffff) > 0x7f800000) return static_cast<unsigned short>(b >> 16 | 0x40);
    return static_cast<unsigned short>((b + 0x7fff + (b >> 16 & 1)) >> 16);
  }
};

namespace bfloats {
template <class T>
constexpr bool is = __is_same(T, bfloat);
template <class T>
constexpr bool number = is<T> || __is_integral(T) || __is_same(T, float) || __is_same(T, _Float16);
template <class T>
constexpr bool wider = __is_same(T, float) || __is_same(T, _Float16);
// With float or half the result is float, with integers bfloat.
template <class A, class B, bool = (is<A> || is<B>) && number<A> && number<B>, bool = wider<A> || wider<B>>
struct result {};
template <class A, class B>
struct result<A, B, true, false> {
  using type = bfloat;
};
template <class A, class B>
struct result<A, B, true, true> {
  using type = float;
};
}  // namespace bfloats

#define EMULATED_BFLOAT(OP)                                                             \
  template <class A, class B>                                                           \
  constexpr typename bfloats::result<A, B>::type operator OP(A a, B b) {                \
    return typename bfloats::result<A, B>::type(static_cast<float>(a) OP static_cast<float>(b)); \
  }                                                                                     \
  template <class T>                                                                    \
  constexpr bfloat& operator OP##=(bfloat& a, T b) {                                    \
    return a = bfloat(static_cast<float>(a) OP static_cast<float>(b));                  \
  }
EMULATED_BFLOAT(+)
EMULATED_BFLOAT(-)
EMULATED_BFLOAT(*)
EMULATED_BFLOAT(/)
#undef EMULATED_BFLOAT
constexpr bfloat operator-(bfloat a) { return bfloat(-static_cast<float>(a)); }
