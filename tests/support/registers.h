// Definitions of functions of Metal, to compile kernels for an AMD GPU and count their registers; the code cannot run. What
// that GPU has an instruction for is that instruction, the rest is an empty one with the same operands. A function without a
// definition here stays undefined, and `registers.py` reports it.

#define DEFINED_1(NAME, T)                                   \
  METAL_FUNC T NAME(T x) {                                   \
    T y;                                                     \
    __asm__("; " #NAME " %0, %1" : "=v"(y) : "v"(x));        \
    return y;                                                \
  }
#define DEFINED_MOVE(NAME, T)                                              \
  METAL_FUNC T NAME(T x, ushort by) {                                      \
    T y;                                                                   \
    __asm__("; " #NAME " %0, %1, %2" : "=v"(y) : "v"(x), "v"(uint(by)));   \
    return y;                                                              \
  }
#define DEFINED_FLOATS(F, NAME) F(NAME, float) F(NAME, half)
#define DEFINED_NUMBERS(F, NAME) DEFINED_FLOATS(F, NAME) F(NAME, int) F(NAME, uint)
#define DEFINED_ORDER(T)                                                     \
  METAL_FUNC T min(T x, T y) { return y < x ? y : x; }                       \
  METAL_FUNC T max(T x, T y) { return x < y ? y : x; }                       \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define DEFINED_FMA(T) \
  METAL_FUNC T fma(T x, T y, T z) { return __builtin_elementwise_fma(x, y, z); }
#define DEFINED_TESTS(T)                                                  \
  METAL_FUNC bool isfinite(T x) { return __builtin_isfinite(float(x)); }  \
  METAL_FUNC bool isinf(T x) { return __builtin_isinf(float(x)); }        \
  METAL_FUNC bool isnan(T x) { return __builtin_isnan(float(x)); }
#define DEFINED_MATH                                                                        \
  DEFINED_FLOATS(DEFINED_1, exp) DEFINED_FLOATS(DEFINED_1, exp2) DEFINED_FLOATS(DEFINED_1, log) \
  DEFINED_FLOATS(DEFINED_1, cos) DEFINED_FLOATS(DEFINED_1, sin) DEFINED_FLOATS(DEFINED_1, rsqrt) \
  DEFINED_FLOATS(DEFINED_1, sqrt) DEFINED_FLOATS(DEFINED_1, log2) DEFINED_FLOATS(DEFINED_1, rint)

namespace metal {
DEFINED_MATH
namespace fast {
DEFINED_MATH
}
namespace precise {
DEFINED_MATH
}
DEFINED_FMA(float) DEFINED_FMA(half) DEFINED_FMA(float2) DEFINED_FMA(float4)
DEFINED_ORDER(float) DEFINED_ORDER(half) DEFINED_ORDER(int) DEFINED_ORDER(uint)
DEFINED_ORDER(short) DEFINED_ORDER(ushort) DEFINED_ORDER(long) DEFINED_ORDER(ulong)
DEFINED_TESTS(float) DEFINED_TESTS(half) DEFINED_TESTS(bfloat)
METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC half abs(half x) { return x < 0.0h ? half(-x) : x; }
METAL_FUNC int abs(int x) { return x < 0 ? -x : x; }
METAL_FUNC uint clz(uint x) { return x == 0 ? 32 : __builtin_clz(x); }

METAL_FUNC void threadgroup_barrier(mem_flags) { __builtin_amdgcn_s_barrier(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __builtin_amdgcn_wave_barrier(); }
DEFINED_NUMBERS(DEFINED_1, simd_sum) DEFINED_NUMBERS(DEFINED_1, simd_max) DEFINED_NUMBERS(DEFINED_1, simd_min)
DEFINED_NUMBERS(DEFINED_1, quad_sum) DEFINED_NUMBERS(DEFINED_1, quad_max) DEFINED_NUMBERS(DEFINED_1, quad_min)
DEFINED_NUMBERS(DEFINED_1, simd_broadcast_first) DEFINED_NUMBERS(DEFINED_1, simd_prefix_exclusive_sum)
DEFINED_NUMBERS(DEFINED_MOVE, simd_shuffle) DEFINED_NUMBERS(DEFINED_MOVE, simd_shuffle_xor)
DEFINED_NUMBERS(DEFINED_MOVE, simd_shuffle_down) DEFINED_NUMBERS(DEFINED_MOVE, simd_shuffle_up)
DEFINED_NUMBERS(DEFINED_MOVE, simd_broadcast) DEFINED_NUMBERS(DEFINED_MOVE, quad_broadcast)
METAL_FUNC uint atomic_load_explicit(const volatile threadgroup atomic<uint>* object, memory_order) {
  return object->opaque;
}
METAL_FUNC void atomic_store_explicit(volatile threadgroup atomic<uint>* object, uint x, memory_order) {
  object->opaque = x;
}
METAL_FUNC uint atomic_fetch_add_explicit(volatile threadgroup atomic<uint>* object, uint x, memory_order) {
  return __atomic_fetch_add(&object->opaque, x, __ATOMIC_RELAXED);
}
METAL_FUNC uint atomic_fetch_max_explicit(volatile threadgroup atomic<uint>* object, uint x, memory_order) {
  return __atomic_fetch_max(&object->opaque, x, __ATOMIC_RELAXED);
}
METAL_FUNC bool simd_any(bool x) { return __builtin_amdgcn_ballot_w32(x) != 0; }
METAL_FUNC bool simd_all(bool x) { return __builtin_amdgcn_ballot_w32(!x) == 0; }

template <typename T, int Cols, int Rows>
METAL_FUNC thread vec<T, 2>& simdgroup_matrix<T, Cols, Rows>::thread_elements() thread {
  return elements;
}
template <typename T, int Cols, int Rows>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Cols, Rows> filled;
  filled.elements = x;
  return filled;
}
// A lane's two elements of the result by those that it has of the others: as many registers, but another sum.
template <typename D, typename A, typename B, typename C, int Cols, int Rows, int K>
METAL_FUNC void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, Cols, Rows>& d,
    thread simdgroup_matrix<A, K, Rows>& a,
    thread simdgroup_matrix<B, Cols, K>& b,
    thread simdgroup_matrix<C, Cols, Rows>& c) {
  vec<D, 2> sum = c.elements;
  __asm__("; simdgroup_multiply_accumulate %0, %1, %2" : "+v"(sum) : "v"(a.elements), "v"(b.elements));
  d.elements = sum;
}
}  // namespace metal

METAL_FUNC float __metal_exp(float x, int) { return metal::exp(x); }
METAL_FUNC float __metal_log(float x, int) { return metal::log(x); }
METAL_FUNC float __metal_fabs(float x, int) { return __builtin_fabsf(x); }
METAL_FUNC float __metal_fmax(float x, float y, int) { return __builtin_fmaxf(x, y); }
METAL_FUNC float __metal_fmin(float x, float y, int) { return __builtin_fminf(x, y); }
METAL_FUNC float __metal_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
