// Barriers, and the collectives of a simdgroup and of a quadgroup: of integers up to 32 bits, float and half.
#pragma once

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define DECLARED_SMALL(F, ...)                                               \
  DECLARED_EACH(F, char, __VA_ARGS__) DECLARED_EACH(F, uchar, __VA_ARGS__)   \
  DECLARED_EACH(F, short, __VA_ARGS__) DECLARED_EACH(F, ushort, __VA_ARGS__) \
  DECLARED_EACH(F, int, __VA_ARGS__) DECLARED_EACH(F, uint, __VA_ARGS__)
#define DECLARED_EXCHANGED(F, ...) DECLARED_SMALL(F, __VA_ARGS__) DECLARED_FLOATS(F, __VA_ARGS__)

#define DECLARED_MOVED(T, GROUP)                                              \
  T GROUP##_broadcast(T x, ushort lane);                                      \
  T GROUP##_broadcast_first(T x);                                             \
  T GROUP##_shuffle(T x, ushort lane);                                        \
  T GROUP##_shuffle_up(T x, ushort delta);                                    \
  T GROUP##_shuffle_down(T x, ushort delta);                                  \
  T GROUP##_shuffle_xor(T x, ushort mask);                                    \
  T GROUP##_shuffle_rotate_up(T x, ushort delta);                             \
  T GROUP##_shuffle_rotate_down(T x, ushort delta);                           \
  T GROUP##_shuffle_and_fill_up(T x, T filling, ushort delta);                \
  T GROUP##_shuffle_and_fill_up(T x, T filling, ushort delta, ushort modulo); \
  T GROUP##_shuffle_and_fill_down(T x, T filling, ushort delta);              \
  T GROUP##_shuffle_and_fill_down(T x, T filling, ushort delta, ushort modulo);
#define DECLARED_REDUCED(T, GROUP)               \
  T GROUP##_sum(T x);                            \
  T GROUP##_product(T x);                        \
  T GROUP##_min(T x);                            \
  T GROUP##_max(T x);                            \
  T GROUP##_prefix_inclusive_sum(T x);           \
  T GROUP##_prefix_exclusive_sum(T x);           \
  T GROUP##_prefix_inclusive_product(T x);       \
  T GROUP##_prefix_exclusive_product(T x);
#define DECLARED_BITWISE(T, GROUP) T GROUP##_and(T x); T GROUP##_or(T x); T GROUP##_xor(T x);
#define DECLARED_VOTES(GROUP)                        \
  struct GROUP##_vote {                              \
    using vote_t = ulong;                            \
    explicit constexpr GROUP##_vote(vote_t v = 0); \
    explicit constexpr operator vote_t() const thread;    \
    bool all() const thread;                         \
    bool any() const thread;                         \
  };                                                 \
  GROUP##_vote GROUP##_ballot(bool x);               \
  GROUP##_vote GROUP##_active_threads_mask();        \
  bool GROUP##_all(bool x);                          \
  bool GROUP##_any(bool x);                          \
  bool GROUP##_is_first();                           \
  bool GROUP##_is_helper_thread();

DECLARED_EXCHANGED(DECLARED_MOVED, simd)
DECLARED_EXCHANGED(DECLARED_MOVED, quad)
DECLARED_EXCHANGED(DECLARED_REDUCED, simd)
DECLARED_EXCHANGED(DECLARED_REDUCED, quad)
DECLARED_SMALL(DECLARED_BITWISE, simd)
DECLARED_SMALL(DECLARED_BITWISE, quad)
DECLARED_VOTES(simd)
DECLARED_VOTES(quad)
}  // namespace metal
