// Functions of integers and of their vectors.
#pragma once

#define DECLARED_ORDER(T, _)  \
  T abs(T x);                 \
  T min(T x, T y);            \
  T max(T x, T y);            \
  T clamp(T x, T low, T high);\
  T min3(T x, T y, T z);      \
  T max3(T x, T y, T z);      \
  T median3(T x, T y, T z);   \
  T addsat(T x, T y);         \
  T subsat(T x, T y);         \
  T hadd(T x, T y);           \
  T rhadd(T x, T y);          \
  T mulhi(T x, T y);          \
  T madhi(T x, T y, T z);     \
  T madsat(T x, T y, T z);    \
  T clz(T x);                 \
  T ctz(T x);                 \
  T popcount(T x);            \
  T reverse_bits(T x);        \
  T rotate(T x, T bits);      \
  T extract_bits(T x, uint offset, uint bits); \
  T insert_bits(T base, T insert, uint offset, uint bits);
#define DECLARED_DIFFERENCE(T, U) U absdiff(T x, T y); vec<U, 2> absdiff(vec<T, 2> x, vec<T, 2> y); \
  vec<U, 3> absdiff(vec<T, 3> x, vec<T, 3> y); vec<U, 4> absdiff(vec<T, 4> x, vec<T, 4> y);
#define DECLARED_24(T, _) T mul24(T x, T y); T mad24(T x, T y, T z);

#define DECLARED_INTEGERS(F, ...)                                            \
  DECLARED_EACH(F, char, __VA_ARGS__) DECLARED_EACH(F, uchar, __VA_ARGS__)   \
  DECLARED_EACH(F, short, __VA_ARGS__) DECLARED_EACH(F, ushort, __VA_ARGS__) \
  DECLARED_EACH(F, int, __VA_ARGS__) DECLARED_EACH(F, uint, __VA_ARGS__)     \
  DECLARED_EACH(F, long, __VA_ARGS__) DECLARED_EACH(F, ulong, __VA_ARGS__)

namespace metal {
DECLARED_INTEGERS(DECLARED_ORDER, _)
DECLARED_EACH(DECLARED_24, int, _)
DECLARED_EACH(DECLARED_24, uint, _)
DECLARED_DIFFERENCE(char, uchar)
DECLARED_DIFFERENCE(uchar, uchar)
DECLARED_DIFFERENCE(short, ushort)
DECLARED_DIFFERENCE(ushort, ushort)
DECLARED_DIFFERENCE(int, uint)
DECLARED_DIFFERENCE(uint, uint)
DECLARED_DIFFERENCE(long, ulong)
DECLARED_DIFFERENCE(ulong, ulong)
DECLARED_SCALED_EACH(int)
DECLARED_SCALED_EACH(uint)
DECLARED_SCALED_EACH(short)
DECLARED_SCALED_EACH(ushort)
}  // namespace metal
