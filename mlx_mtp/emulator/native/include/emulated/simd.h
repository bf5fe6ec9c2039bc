// Barriers and the collectives of a simdgroup (32 lanes) and of a quadgroup (4 lanes).
#pragma once
#include "abi.h"
#include "math.h"

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }

EMULATED_INTERNAL inline void threadgroup_barrier(mem_flags flags) {
  emulated_barrier(SCOPE_BARRIER, uint(flags), EMULATED_SITE);
}
EMULATED_INTERNAL inline void simdgroup_barrier(mem_flags flags) {
  emulated_barrier(SCOPE_SIMD_BARRIER, uint(flags), EMULATED_SITE);
}

namespace collective {
template <class T>
inline constexpr bool exchangeable = sizeof(T) <= 64;

template <class T>
struct Lanes {
  const EmulatedExchange* exchange;
  int self, first, count;  // `self` is the lane in the simdgroup
  EMULATED_PLAIN bool active(int i) const { return exchange->active >> (first + i) & 1; }
  EMULATED_PLAIN T operator[](int i) const {
    T x;
    __builtin_memcpy(static_cast<void*>(&x), exchange->value[first + i], sizeof(T));
    return x;
  }
};

template <class T>
EMULATED_INTERNAL Lanes<T> gather(EmulatedScope scope, const char* what, void* site, T x, uint arg = 0) {
  static_assert(exchangeable<T>, "a collective exchanges at most 64 bytes");
  const EmulatedExchange* e = emulated_exchange(scope, what, site, &x, sizeof(T), arg);
  int self = int(emulated_lane());
  bool quad = scope == SCOPE_QUAD;
  return {e, self, quad ? self & ~3 : 0, quad ? 4 : 32};
}

// The tree of exchanges with lanes 1, 2, 4, 8 and 16 away, in which every lane gets the same bits.
template <class T, class F>
EMULATED_INTERNAL T reduce(EmulatedScope scope, const char* what, void* site, T x, F f) {
  Lanes<T> lanes = gather(scope, what, site, x);
  T value[32];
  bool active[32];
  for (int i = 0; i < lanes.count; ++i) {
    active[i] = lanes.active(i);
    if (active[i]) value[i] = lanes[i];
  }
  for (int step = 1; step < lanes.count; step *= 2)
    for (int i = 0; i < lanes.count; i += 2 * step) {
      int j = i + step;
      if (active[i] && active[j])
        value[i] = f(value[i], value[j]);
      else if (active[j])
        value[i] = value[j];
      active[i] |= active[j];
    }
  return value[0];
}

template <class T, class F>
EMULATED_INTERNAL T prefix(EmulatedScope scope, const char* what, void* site, T x, T identity, bool inclusive, F f) {
  Lanes<T> lanes = gather(scope, what, site, x);
  int self = lanes.self - lanes.first;
  T sum = identity;
  for (int i = 0; i < self + inclusive; ++i)
    if (lanes.active(i)) sum = f(sum, lanes[i]);
  return sum;
}

// The value of lane `source`, counted in the quad or simdgroup.
template <class T>
EMULATED_INTERNAL T read(const Lanes<T>& lanes, const char* what, void* site, int source) {
  bool inside = source >= 0 && source < lanes.count;
  emulated_source_lane(lanes.exchange, what, site, inside ? uint(lanes.first + source) : 1000u + uint(source));
  return lanes[source];
}
}  // namespace collective

#define EMULATED_REDUCE(NAME, WHAT, EXPRESSION)                                                     \
  template <class T>                                                                                \
  EMULATED_INTERNAL T simd_##NAME(T x) {                                                            \
    return collective::reduce(SCOPE_SIMD, "simd_" WHAT, EMULATED_SITE, x,                           \
                              [](T a, T b) { return static_cast<T>(EXPRESSION); });                 \
  }                                                                                                 \
  template <class T>                                                                                \
  EMULATED_INTERNAL T quad_##NAME(T x) {                                                            \
    return collective::reduce(SCOPE_QUAD, "quad_" WHAT, EMULATED_SITE, x,                           \
                              [](T a, T b) { return static_cast<T>(EXPRESSION); });                 \
  }
EMULATED_REDUCE(sum, "sum", a + b)
EMULATED_REDUCE(product, "product", a * b)
EMULATED_REDUCE(min, "min", min(a, b))
EMULATED_REDUCE(max, "max", max(a, b))
EMULATED_REDUCE(and, "and", a & b)
EMULATED_REDUCE(or, "or", a | b)
EMULATED_REDUCE(xor, "xor", a ^ b)
#undef EMULATED_REDUCE

#define EMULATED_PREFIX(NAME, IDENTITY, INCLUSIVE, EXPRESSION)                                            \
  template <class T>                                                                                     \
  EMULATED_INTERNAL T simd_##NAME(T x) {                                                                  \
    return collective::prefix(SCOPE_SIMD, "simd_" #NAME, EMULATED_SITE, x, T(IDENTITY), INCLUSIVE,        \
                              [](T a, T b) { return static_cast<T>(EXPRESSION); });                       \
  }                                                                                                      \
  template <class T>                                                                                     \
  EMULATED_INTERNAL T quad_##NAME(T x) {                                                                  \
    return collective::prefix(SCOPE_QUAD, "quad_" #NAME, EMULATED_SITE, x, T(IDENTITY), INCLUSIVE,        \
                              [](T a, T b) { return static_cast<T>(EXPRESSION); });                       \
  }
EMULATED_PREFIX(prefix_inclusive_sum, 0, true, a + b)
EMULATED_PREFIX(prefix_exclusive_sum, 0, false, a + b)
EMULATED_PREFIX(prefix_inclusive_product, 1, true, a * b)
EMULATED_PREFIX(prefix_exclusive_product, 1, false, a * b)
#undef EMULATED_PREFIX

// `source` may use `self` (the caller's lane), `arg` and `count`; a shift keeps its own value past the edge.
#define EMULATED_SHUFFLE(NAME, UNIFORM, KEEP, SOURCE)                                          \
  template <class T>                                                                           \
  EMULATED_INTERNAL T simd_##NAME(T x, ushort arg) {                                           \
    auto lanes = collective::gather(SCOPE_SIMD, "simd_" #NAME, EMULATED_SITE, x, arg);         \
    constexpr int count = 32;                                                                  \
    int self = lanes.self;                                                           \
    if (UNIFORM) emulated_uniform(lanes.exchange, "simd_" #NAME, EMULATED_SITE);               \
    return (KEEP) ? x : collective::read(lanes, "simd_" #NAME, EMULATED_SITE, SOURCE);         \
  }                                                                                            \
  template <class T>                                                                           \
  EMULATED_INTERNAL T quad_##NAME(T x, ushort arg) {                                           \
    auto lanes = collective::gather(SCOPE_QUAD, "quad_" #NAME, EMULATED_SITE, x, arg);         \
    constexpr int count = 4;                                                                   \
    int self = lanes.self & 3;                                                       \
    if (UNIFORM) emulated_uniform(lanes.exchange, "quad_" #NAME, EMULATED_SITE);               \
    return (KEEP) ? x : collective::read(lanes, "quad_" #NAME, EMULATED_SITE, SOURCE);         \
  }
EMULATED_SHUFFLE(shuffle, false, self < 0, arg)
EMULATED_SHUFFLE(broadcast, true, self < 0, arg)
EMULATED_SHUFFLE(shuffle_xor, true, self < 0, self ^ arg)
EMULATED_SHUFFLE(shuffle_up, true, self < arg, self - arg)
EMULATED_SHUFFLE(shuffle_down, true, self + arg >= count, self + arg)
EMULATED_SHUFFLE(shuffle_rotate_up, true, self < 0, (self + count - arg % count) % count)
EMULATED_SHUFFLE(shuffle_rotate_down, true, self < 0, (self + arg) % count)
#undef EMULATED_SHUFFLE

// Shifts within runs of `modulo` lanes; a lane without a source takes the filling of the lane a run further.
template <class T>
struct Filled {
  T data, filling;
};
#define EMULATED_FILL(NAME, SCOPE, COUNT, SOURCE, INSIDE, WRAPPED)                                     \
  template <class T>                                                                                   \
  EMULATED_INTERNAL T NAME(T x, T filling, ushort delta, ushort modulo = COUNT) {                      \
    auto lanes = collective::gather(SCOPE, #NAME, EMULATED_SITE, Filled<T>{x, filling}, delta);        \
    emulated_uniform(lanes.exchange, #NAME, EMULATED_SITE);                                            \
    int self = lanes.self - lanes.first, start = self - self % modulo, source = SOURCE;                \
    if (INSIDE) return collective::read(lanes, #NAME, EMULATED_SITE, source).data;                     \
    return collective::read(lanes, #NAME, EMULATED_SITE, WRAPPED).filling;                             \
  }
EMULATED_FILL(simd_shuffle_and_fill_up, SCOPE_SIMD, 32, self - delta, source >= start, source + modulo)
EMULATED_FILL(quad_shuffle_and_fill_up, SCOPE_QUAD, 4, self - delta, source >= start, source + modulo)
EMULATED_FILL(simd_shuffle_and_fill_down, SCOPE_SIMD, 32, self + delta, source < start + modulo, source - modulo)
EMULATED_FILL(quad_shuffle_and_fill_down, SCOPE_QUAD, 4, self + delta, source < start + modulo, source - modulo)
#undef EMULATED_FILL

template <class T>
EMULATED_INTERNAL T simd_broadcast_first(T x) {
  auto lanes = collective::gather(SCOPE_SIMD, "simd_broadcast_first", EMULATED_SITE, x);
  return lanes[__builtin_ctzl(lanes.exchange->active)];
}
template <class T>
EMULATED_INTERNAL T quad_broadcast_first(T x) {
  auto lanes = collective::gather(SCOPE_QUAD, "quad_broadcast_first", EMULATED_SITE, x);
  return lanes[int(__builtin_ctzl(lanes.exchange->active)) - lanes.first];
}

// The lanes of a ballot, one bit each.
struct simd_vote {
  using vote_t = ulong;
  vote_t lanes;
  vote_t everyone;
  explicit constexpr simd_vote(vote_t v = 0) : lanes(v), everyone(0xffffffff) {}
  constexpr simd_vote(vote_t v, vote_t of) : lanes(v), everyone(of) {}
  explicit constexpr operator vote_t() const { return lanes; }
  bool all() const { return lanes == everyone; }
  bool any() const { return lanes != 0; }
};
EMULATED_INTERNAL inline simd_vote simd_ballot(bool x) {
  auto lanes = collective::gather(SCOPE_SIMD, "simd_ballot", EMULATED_SITE, uint(x));
  ulong votes = 0;
  for (int i = 0; i < 32; ++i)
    if (lanes.active(i) && lanes[i]) votes |= 1ul << i;
  return simd_vote(votes, lanes.exchange->active);
}
EMULATED_INTERNAL inline simd_vote simd_active_threads_mask() {
  auto lanes = collective::gather(SCOPE_SIMD, "simd_active_threads_mask", EMULATED_SITE, 1u);
  return simd_vote(lanes.exchange->active, lanes.exchange->active);
}
EMULATED_INTERNAL inline bool simd_all(bool x) {
  return collective::reduce(SCOPE_SIMD, "simd_all", EMULATED_SITE, x, [](bool a, bool b) { return a && b; });
}
EMULATED_INTERNAL inline bool simd_any(bool x) {
  return collective::reduce(SCOPE_SIMD, "simd_any", EMULATED_SITE, x, [](bool a, bool b) { return a || b; });
}
EMULATED_INTERNAL inline bool quad_all(bool x) {
  return collective::reduce(SCOPE_QUAD, "quad_all", EMULATED_SITE, x, [](bool a, bool b) { return a && b; });
}
EMULATED_INTERNAL inline bool quad_any(bool x) {
  return collective::reduce(SCOPE_QUAD, "quad_any", EMULATED_SITE, x, [](bool a, bool b) { return a || b; });
}
EMULATED_INTERNAL inline bool simd_is_first() {
  auto lanes = collective::gather(SCOPE_SIMD, "simd_is_first", EMULATED_SITE, 0u);
  return lanes.self == int(__builtin_ctzl(lanes.exchange->active));
}
}  // namespace metal
