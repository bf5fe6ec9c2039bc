// Vectors: clang's own, so that members, operators and conversions are the compiler's; vectors of bool are a struct.
#pragma once

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// What a comparison of vectors gives: in OpenCL a vector of integers as wide as what was compared.
template <int N>
struct bool_vec {
  bool lanes[N];
  bool_vec() = default;
  constexpr bool_vec(bool x);
  constexpr bool_vec(char __attribute__((ext_vector_type(N))) x);
  constexpr bool_vec(short __attribute__((ext_vector_type(N))) x);
  constexpr bool_vec(int __attribute__((ext_vector_type(N))) x);
  constexpr bool_vec(long __attribute__((ext_vector_type(N))) x);
  thread bool& operator[](int i) thread;
  bool operator[](int i) const thread;
  bool_vec operator!() const thread;
};
template <int N>
bool_vec<N> operator&&(bool_vec<N> a, bool_vec<N> b);
template <int N>
bool_vec<N> operator||(bool_vec<N> a, bool_vec<N> b);
template <int N>
bool any(bool_vec<N> x);
template <int N>
bool all(bool_vec<N> x);
bool any(bool x);
bool all(bool x);

// A vector without padding, aligned as its element.
template <typename T, int N>
struct packed_vec {
  T lanes[N];
  packed_vec() = default;
  packed_vec(vec<T, N> x);
  explicit packed_vec(T x);
  operator vec<T, N>() const thread;
  operator vec<T, N>() const device;
  operator vec<T, N>() const threadgroup;
  operator vec<T, N>() const constant;
  device packed_vec& operator=(vec<T, N> x) device;
  thread packed_vec& operator=(vec<T, N> x) thread;
  threadgroup packed_vec& operator=(vec<T, N> x) threadgroup;
  thread T& operator[](int i) thread;
  device T& operator[](int i) device;
  threadgroup T& operator[](int i) threadgroup;
  T operator[](int i) const thread;
  T operator[](int i) const device;
  T operator[](int i) const threadgroup;
  T operator[](int i) const constant;
};
}  // namespace metal

#define DECLARED_VECTORS(T)                                                                                   \
  typedef metal::vec<T, 2> T##2;                                                                              \
  typedef metal::vec<T, 3> T##3;                                                                              \
  typedef metal::vec<T, 4> T##4;                                                                              \
  typedef metal::packed_vec<T, 2> packed_##T##2;                                                              \
  typedef metal::packed_vec<T, 3> packed_##T##3;                                                              \
  typedef metal::packed_vec<T, 4> packed_##T##4;
DECLARED_VECTORS(char)
DECLARED_VECTORS(uchar)
DECLARED_VECTORS(short)
DECLARED_VECTORS(ushort)
DECLARED_VECTORS(int)
DECLARED_VECTORS(uint)
DECLARED_VECTORS(long)
DECLARED_VECTORS(ulong)
DECLARED_VECTORS(half)
DECLARED_VECTORS(bfloat)
DECLARED_VECTORS(float)
typedef metal::bool_vec<2> bool2;
typedef metal::bool_vec<3> bool3;
typedef metal::bool_vec<4> bool4;

// `float4(a, b)`, which C++ for OpenCL has no form for: front_end.py writes it as a call of `made<float4>`.
namespace declared {
template <typename T>
struct Lanes {
  static constexpr constant int count = 1;
};
template <typename T, int N>
struct Lanes<T __attribute__((ext_vector_type(N)))> {
  static constexpr constant int count = N;
};
template <int N>
struct Lanes<metal::bool_vec<N>> {
  static constexpr constant int count = N;
};
template <typename T, int N>
struct Lanes<metal::packed_vec<T, N>> {
  static constexpr constant int count = N;
};

// Writes a part's elements to the vector's from `at` on, which it moves behind them.
template <typename V, typename P>
METAL_FUNC void put(thread V& vector, thread int& at, P part) {
  if constexpr (Lanes<P>::count == 1) {
    vector[at++] = part;
  } else {
    for (int i = 0; i < Lanes<P>::count; i++) {
      vector[at++] = part[i];
    }
  }
}

template <typename V, typename... Parts>
METAL_FUNC V made(Parts... parts) {
  constexpr int given = (Lanes<Parts>::count + ... + 0);
  static_assert(given == 0 || given == Lanes<V>::count || (sizeof...(Parts) == 1 && given == 1),
                "a vector is made of one value, or of as many as it has elements");
  if constexpr (given == 1) {
    return V(parts...);
  } else {
    V vector = V(0);
    int at = 0;
    (put(vector, at, parts), ...);
    return vector;
  }
}

// Clang casts no half to bfloat, Metal does.
template <typename T>
METAL_FUNC constexpr bfloat to_bfloat(T x) {
  if constexpr (__is_same(T, half)) {
    return bfloat(float(x));
  } else {
    return bfloat(x);
  }
}

// A number whose value is not known to the compiler: front_end.py puts literals in.
float number(float x);
double number(double x);
}  // namespace declared
