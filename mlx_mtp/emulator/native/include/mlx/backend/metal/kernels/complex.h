// In the place of MLX's file of this name, whose overloads differ in address spaces only.
#pragma once
#include <metal_stdlib>

#include "mlx/backend/metal/kernels/bf16.h"

template <class T>
struct complex_t {
  using value_type = T;
  T real;
  T imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T re, T im) : real(re), imag(im) {}
  template <class U, metal::enable_if_t<metal::is_arithmetic_v<U>, int> = 0>
  constexpr complex_t(U re) : real(static_cast<T>(re)), imag(0) {}
  template <class U, metal::enable_if_t<metal::is_arithmetic_v<U>, int> = 0>
  explicit constexpr operator U() const {
    return static_cast<U>(real);
  }
  friend constexpr complex_t operator-(complex_t a) { return {-a.real, -a.imag}; }
  friend constexpr complex_t operator+(complex_t a, complex_t b) { return {a.real + b.real, a.imag + b.imag}; }
  friend constexpr complex_t operator-(complex_t a, complex_t b) { return {a.real - b.real, a.imag - b.imag}; }
  friend constexpr complex_t operator*(complex_t a, complex_t b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
  friend constexpr complex_t operator/(complex_t a, complex_t b) {
    T d = b.real * b.real + b.imag * b.imag;
    return {(a.real * b.real + a.imag * b.imag) / d, (a.imag * b.real - a.real * b.imag) / d};
  }
  friend complex_t operator%(complex_t a, complex_t b) {
    T re = a.real - b.real * static_cast<long>(a.real / b.real);
    T im = a.imag - b.imag * static_cast<long>(a.imag / b.imag);
    if (re != 0 && (re < 0) != (b.real < 0)) re += b.real;
    if (im != 0 && (im < 0) != (b.imag < 0)) im += b.imag;
    return {re, im};
  }
  friend constexpr bool operator==(complex_t a, complex_t b) { return a.real == b.real && a.imag == b.imag; }
  friend constexpr bool operator!=(complex_t a, complex_t b) { return !(a == b); }
  friend constexpr bool operator<(complex_t a, complex_t b) {
    return a.real < b.real || (a.real == b.real && a.imag < b.imag);
  }
  friend constexpr bool operator>(complex_t a, complex_t b) { return b < a; }
  friend constexpr bool operator<=(complex_t a, complex_t b) { return !(b < a); }
  friend constexpr bool operator>=(complex_t a, complex_t b) { return !(a < b); }
};
typedef complex_t<float> complex64_t;
template <class T>
constexpr bool is_complex_v = false;
template <class T>
constexpr bool is_complex_v<complex_t<T>> = true;
