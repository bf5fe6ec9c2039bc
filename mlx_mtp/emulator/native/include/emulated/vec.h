// Vectors: vec<T, N> with swizzles, packed_vec<T, N>, and their operators, element by element.
#pragma once
#include "types.h"

namespace metal {
template <class T, int N>
struct vec;
template <class T, int N, class V>
struct packed_vec;

// One overlay of a vector's storage, such as `v.zyx`; V is the vector it reads as.
template <class V, class T, int N, int... I>
struct swizzle {
  T data[N];
  operator V() const { return V(data[I]...); }
  swizzle& operator=(const V& v) {
    static_assert(((1 << I) + ...) == ((1 << I) | ...), "a swizzle that names an element twice cannot be assigned");
    int k = 0;
    ((data[I] = v[k++]), ...);
    return *this;
  }
  swizzle& operator=(const swizzle& other) { return *this = V(other); }
  swizzle& operator+=(const V& v) { return *this = V(*this) + v; }
  swizzle& operator-=(const V& v) { return *this = V(*this) - v; }
  swizzle& operator*=(const V& v) { return *this = V(*this) * v; }
  swizzle& operator/=(const V& v) { return *this = V(*this) / v; }
  T operator[](int i) const { return V(*this)[i]; }
};

template <class T>
struct native {
  using type = T;
};
template <>
struct native<bool> {
  using type = unsigned char;
};

#if __clang_major__ < 17
template <>
struct native<bfloat> {
  using type = unsigned short;
};
#endif

// Copies go through one wide value, so that a float4 counts as one access of 16 bytes.
template <class T, int N>
struct wide {
  typedef typename native<T>::type type __attribute__((ext_vector_type(N)));
};

template <class T>
constexpr int width_of = 1;
template <class T, int N>
constexpr int width_of<vec<T, N>> = N;
template <class T, int N, class V>
constexpr int width_of<packed_vec<T, N, V>> = N;
template <class V, class T, int N, int... I>
constexpr int width_of<swizzle<V, T, N, I...>> = sizeof...(I);

struct zeros {};
template <class T, int N>
struct lanes_of;
#define EMULATED_S2(A, a, B, b) swizzle<vec<T, 2>, T, EMULATED_N, a, b> A##B;
#define EMULATED_S3(A, a, B, b, C, c) swizzle<vec<T, 3>, T, EMULATED_N, a, b, c> A##B##C;
#define EMULATED_S4(A, a, B, b, C, c, D, d) swizzle<vec<T, 4>, T, EMULATED_N, a, b, c, d> A##B##C##D;
#define EMULATED_2A(F, X, Y, Z, W, ...) F(__VA_ARGS__, X, 0) F(__VA_ARGS__, Y, 1)
#define EMULATED_3A(F, X, Y, Z, W, ...) EMULATED_2A(F, X, Y, Z, W, __VA_ARGS__) F(__VA_ARGS__, Z, 2)
#define EMULATED_4A(F, X, Y, Z, W, ...) EMULATED_3A(F, X, Y, Z, W, __VA_ARGS__) F(__VA_ARGS__, W, 3)
#define EMULATED_2B(L, F, X, Y, Z, W, ...) L(F, X, Y, Z, W, __VA_ARGS__, X, 0) L(F, X, Y, Z, W, __VA_ARGS__, Y, 1)
#define EMULATED_3B(L, F, X, Y, Z, W, ...) \
  EMULATED_2B(L, F, X, Y, Z, W, __VA_ARGS__) L(F, X, Y, Z, W, __VA_ARGS__, Z, 2)
#define EMULATED_4B(L, F, X, Y, Z, W, ...) \
  EMULATED_3B(L, F, X, Y, Z, W, __VA_ARGS__) L(F, X, Y, Z, W, __VA_ARGS__, W, 3)
#define EMULATED_2C(M, L, F, X, Y, Z, W, ...) \
  M(L, F, X, Y, Z, W, __VA_ARGS__, X, 0) M(L, F, X, Y, Z, W, __VA_ARGS__, Y, 1)
#define EMULATED_3C(M, L, F, X, Y, Z, W, ...) \
  EMULATED_2C(M, L, F, X, Y, Z, W, __VA_ARGS__) M(L, F, X, Y, Z, W, __VA_ARGS__, Z, 2)
#define EMULATED_4C(M, L, F, X, Y, Z, W, ...) \
  EMULATED_3C(M, L, F, X, Y, Z, W, __VA_ARGS__) M(L, F, X, Y, Z, W, __VA_ARGS__, W, 3)
#define EMULATED_SWIZZLES(K, X, Y, Z, W)                                                               \
  EMULATED_##K##A(EMULATED_S2, X, Y, Z, W, X, 0) EMULATED_##K##A(EMULATED_S2, X, Y, Z, W, Y, 1)        \
  EMULATED_##K##B(EMULATED_##K##A, EMULATED_S3, X, Y, Z, W, X, 0)                                      \
  EMULATED_##K##B(EMULATED_##K##A, EMULATED_S3, X, Y, Z, W, Y, 1)                                      \
  EMULATED_##K##C(EMULATED_##K##B, EMULATED_##K##A, EMULATED_S4, X, Y, Z, W, X, 0)                     \
  EMULATED_##K##C(EMULATED_##K##B, EMULATED_##K##A, EMULATED_S4, X, Y, Z, W, Y, 1)
#define EMULATED_SWIZZLES_FROM(K, X, Y, Z, W, V, v)                  \
  EMULATED_##K##A(EMULATED_S2, X, Y, Z, W, V, v)                     \
  EMULATED_##K##B(EMULATED_##K##A, EMULATED_S3, X, Y, Z, W, V, v)    \
  EMULATED_##K##C(EMULATED_##K##B, EMULATED_##K##A, EMULATED_S4, X, Y, Z, W, V, v)

template <class T>
struct lanes_of<T, 2> {
  union {
    T data[2];
    typename wide<T, 2>::type all;
    struct { T x, y; };
    struct { T r, g; };
#define EMULATED_N 2
    EMULATED_SWIZZLES(2, x, y, z, w)
#undef EMULATED_N
  };
  lanes_of() = default;
  explicit constexpr lanes_of(zeros) : data{} {}
  lanes_of(const lanes_of& o) : all(o.all) {}
  lanes_of& operator=(const lanes_of& o) { all = o.all; return *this; }
};
template <class T>
struct lanes_of<T, 3> {
  union {
    T data[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
#define EMULATED_N 3
    EMULATED_SWIZZLES(3, x, y, z, w)
    EMULATED_SWIZZLES_FROM(3, x, y, z, w, z, 2)
    swizzle<vec<T, 2>, T, 3, 0, 1> rg;
#undef EMULATED_N
  };
  lanes_of() = default;
  explicit constexpr lanes_of(zeros) : data{} {}
  constexpr lanes_of(const lanes_of& o) : data{o.data[0], o.data[1], o.data[2]} {}
  lanes_of& operator=(const lanes_of& o) { x = o.x; y = o.y; z = o.z; return *this; }
};
template <class T>
struct lanes_of<T, 4> {
  union {
    T data[4];
    typename wide<T, 4>::type all;
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
#define EMULATED_N 4
    EMULATED_SWIZZLES(4, x, y, z, w)
    EMULATED_SWIZZLES_FROM(4, x, y, z, w, z, 2)
    EMULATED_SWIZZLES_FROM(4, x, y, z, w, w, 3)
    swizzle<vec<T, 2>, T, 4, 0, 1> rg;
    swizzle<vec<T, 3>, T, 4, 0, 1, 2> rgb;
#undef EMULATED_N
  };
  lanes_of() = default;
  explicit constexpr lanes_of(zeros) : data{} {}
  lanes_of(const lanes_of& o) : all(o.all) {}
  lanes_of& operator=(const lanes_of& o) { all = o.all; return *this; }
};

template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : lanes_of<T, N> {
  using value_type = T;
  using lanes_of<T, N>::data;

  vec() = default;
  vec(const vec&) = default;
  vec& operator=(const vec&) = default;
  template <class U, enable_if_t<is_arithmetic_v<U>, int> = 0>
  constexpr vec(U x) : lanes_of<T, N>(zeros{}) {
    for (int i = 0; i < N; ++i) data[i] = static_cast<T>(x);
  }
  template <class U, enable_if_t<!is_same_v<U, T>, int> = 0>
  explicit constexpr vec(const vec<U, N>& v) : lanes_of<T, N>(zeros{}) {
    for (int i = 0; i < N; ++i) data[i] = static_cast<T>(v[i]);
  }
  template <class... A, enable_if_t<(sizeof...(A) > 1), int> = 0>
  constexpr vec(const A&... parts) : lanes_of<T, N>(zeros{}) {
    static_assert((width_of<A> + ... + 0) == N, "a vector's constructor needs exactly its number of elements");
    int k = 0;
    (append(k, parts), ...);
  }
  constexpr T& operator[](int i) { return data[i]; }
  constexpr const T& operator[](int i) const { return data[i]; }

 private:
  template <class A>
  constexpr void append(int& k, const A& part) {
    if constexpr (width_of<A> == 1)
      data[k++] = static_cast<T>(part);
    else
      for (int i = 0; i < width_of<A>; ++i) data[k++] = static_cast<T>(part[i]);
  }

#define EMULATED_BINARY(OP)                                                     \
  friend vec operator OP(const vec& a, const vec& b) {                          \
    vec c;                                                                      \
    for (int i = 0; i < N; ++i) c.data[i] = static_cast<T>(a.data[i] OP b.data[i]); \
    return c;                                                                   \
  }                                                                             \
  friend vec& operator OP##=(vec & a, const vec & b) { return a = a OP b; }
  EMULATED_BINARY(+)
  EMULATED_BINARY(-)
  EMULATED_BINARY(*)
  EMULATED_BINARY(/)
  EMULATED_BINARY(%)
  EMULATED_BINARY(&)
  EMULATED_BINARY(|)
  EMULATED_BINARY(^)
  EMULATED_BINARY(<<)
  EMULATED_BINARY(>>)
#undef EMULATED_BINARY
#define EMULATED_COMPARE(OP)                                               \
  friend vec<bool, N> operator OP(const vec& a, const vec& b) {            \
    vec<bool, N> c;                                                        \
    for (int i = 0; i < N; ++i) c.data[i] = a.data[i] OP b.data[i];        \
    return c;                                                              \
  }
  EMULATED_COMPARE(==)
  EMULATED_COMPARE(!=)
  EMULATED_COMPARE(<)
  EMULATED_COMPARE(<=)
  EMULATED_COMPARE(>)
  EMULATED_COMPARE(>=)
  EMULATED_COMPARE(&&)
  EMULATED_COMPARE(||)
#undef EMULATED_COMPARE
#define EMULATED_UNARY(OP, R)                                    \
  friend vec<R, N> operator OP(const vec& a) {                   \
    vec<R, N> c;                                                 \
    for (int i = 0; i < N; ++i) c.data[i] = OP a.data[i];        \
    return c;                                                    \
  }
  EMULATED_UNARY(-, T)
  EMULATED_UNARY(+, T)
  EMULATED_UNARY(~, T)
  EMULATED_UNARY(!, bool)
#undef EMULATED_UNARY
  friend vec& operator++(vec& a) { return a += vec(T(1)); }
  friend vec& operator--(vec& a) { return a -= vec(T(1)); }
};

// A vector without padding, aligned as its element.
template <class T, int N, class V = vec<T, N>>
struct packed_vec {
  T data[N];
  packed_vec() {}
  packed_vec(const V& v) {
    for (int i = 0; i < N; ++i) data[i] = v[i];
  }
  template <class... A, enable_if_t<(sizeof...(A) > 1), int> = 0>
  packed_vec(const A&... parts) : packed_vec(V(parts...)) {}
  operator V() const {
    V v;
    for (int i = 0; i < N; ++i) v[i] = data[i];
    return v;
  }
  template <class U, enable_if_t<!is_same_v<U, T>, int> = 0>
  explicit operator vec<U, N>() const {
    return vec<U, N>(V(*this));
  }
  T& operator[](int i) { return data[i]; }
  const T& operator[](int i) const { return data[i]; }
};
template <class T, class V>
struct packed_vec<T, 3, V> {
  union {
    T data[3];
    struct { T x, y, z; };
  };
  packed_vec() {}
  packed_vec(const V& v) : data{v[0], v[1], v[2]} {}
  packed_vec(T a, T b, T c) : data{a, b, c} {}
  operator V() const { return V(data[0], data[1], data[2]); }
  T& operator[](int i) { return data[i]; }
  const T& operator[](int i) const { return data[i]; }
};
}  // namespace metal

#define EMULATED_VECTORS(T)                     \
  typedef metal::vec<T, 2> T##2;                \
  typedef metal::vec<T, 3> T##3;                \
  typedef metal::vec<T, 4> T##4;                \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4; \
  namespace metal {                             \
  using ::packed_##T##2;                        \
  using ::packed_##T##3;                        \
  using ::packed_##T##4;                        \
  using ::T##2;                                 \
  using ::T##3;                                 \
  using ::T##4;                                 \
  }
EMULATED_VECTORS(bool)
EMULATED_VECTORS(char)
EMULATED_VECTORS(uchar)
EMULATED_VECTORS(short)
EMULATED_VECTORS(ushort)
EMULATED_VECTORS(int)
EMULATED_VECTORS(uint)
EMULATED_VECTORS(long)
EMULATED_VECTORS(ulong)
EMULATED_VECTORS(half)
EMULATED_VECTORS(bfloat)
EMULATED_VECTORS(float)
#undef EMULATED_VECTORS
