// Atomics. Threads are fibers of one core, so plain operations are atomic; the runtime hears of each.
#pragma once
#include "abi.h"
#include "math.h"

namespace metal {
enum memory_order { memory_order_relaxed };

template <class T>
struct alignas(sizeof(T)) atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool> ||
                    is_same_v<T, ulong>,
                "Metal's atomics hold int, uint, float, bool or ulong");
  using value_type = T;
  T value;
};
template <class T>
using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

template <class T>
struct same_type {
  using type = T;
};
template <class T>
using value_of = typename same_type<T>::type;

template <class T>
EMULATED_INTERNAL T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  emulated_atomic(const_cast<const atomic<T>*>(object), sizeof(T), ATOMIC_LOAD, EMULATED_SITE);
  return object->value;
}
template <class T>
EMULATED_INTERNAL void atomic_store_explicit(volatile atomic<T>* object, value_of<T> x, memory_order) {
  emulated_atomic(const_cast<atomic<T>*>(object), sizeof(T), ATOMIC_STORE, EMULATED_SITE);
  object->value = x;
}
template <class T>
EMULATED_INTERNAL bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, value_of<T> x,
                                                             memory_order, memory_order) {
  emulated_atomic(const_cast<atomic<T>*>(object), sizeof(T), ATOMIC_UPDATE, EMULATED_SITE);
  T was = object->value;
  bool same = __builtin_memcmp(&was, expected, sizeof(T)) == 0;
  if (same)
    object->value = x;
  else
    *expected = was;
  return same;
}
#define EMULATED_ATOMIC(NAME, EXPRESSION)                                                               \
  template <class T>                                                                                    \
  EMULATED_INTERNAL T atomic_##NAME##_explicit(volatile atomic<T>* object, value_of<T> x, memory_order) { \
    emulated_atomic(const_cast<atomic<T>*>(object), sizeof(T), ATOMIC_UPDATE, EMULATED_SITE);                       \
    T was = object->value;                                                                              \
    object->value = EXPRESSION;                                                                         \
    return was;                                                                                         \
  }
EMULATED_ATOMIC(exchange, x)
EMULATED_ATOMIC(fetch_add, was + x)
EMULATED_ATOMIC(fetch_sub, was - x)
EMULATED_ATOMIC(fetch_min, min(was, x))
EMULATED_ATOMIC(fetch_max, max(was, x))
EMULATED_ATOMIC(fetch_and, was & x)
EMULATED_ATOMIC(fetch_or, was | x)
EMULATED_ATOMIC(fetch_xor, was ^ x)
#undef EMULATED_ATOMIC
}  // namespace metal
