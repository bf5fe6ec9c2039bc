// Atomics in device and threadgroup memory, of relaxed order.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed = 0 };

template <typename T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool> ||
                    is_same_v<T, ulong>,
                "Metal's atomics are of int, uint, float, bool and ulong");
  using value_type = T;
  T opaque;
};
template <typename T>
using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

#define DECLARED_ATOMIC_MEMORY(T, SPACE)                                                                        \
  void atomic_store_explicit(volatile SPACE atomic<T>* object, T x, memory_order order);                        \
  T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order order);                           \
  T atomic_exchange_explicit(volatile SPACE atomic<T>* object, T x, memory_order order);                        \
  bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* object, thread T* expected, T x,         \
                                             memory_order success, memory_order failure);
#define DECLARED_FETCH(T, SPACE, NAME) \
  T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* object, T x, memory_order order);
#define DECLARED_FETCHES(T, SPACE)                                                                              \
  DECLARED_FETCH(T, SPACE, add) DECLARED_FETCH(T, SPACE, sub) DECLARED_FETCH(T, SPACE, min)                     \
  DECLARED_FETCH(T, SPACE, max) DECLARED_FETCH(T, SPACE, and) DECLARED_FETCH(T, SPACE, or)                      \
  DECLARED_FETCH(T, SPACE, xor)
DECLARED_ATOMIC_MEMORY(int, device)
DECLARED_ATOMIC_MEMORY(int, threadgroup)
DECLARED_ATOMIC_MEMORY(uint, device)
DECLARED_ATOMIC_MEMORY(uint, threadgroup)
DECLARED_ATOMIC_MEMORY(bool, device)
DECLARED_ATOMIC_MEMORY(bool, threadgroup)
DECLARED_ATOMIC_MEMORY(float, device)
DECLARED_FETCHES(int, device)
DECLARED_FETCHES(int, threadgroup)
DECLARED_FETCHES(uint, device)
DECLARED_FETCHES(uint, threadgroup)
DECLARED_FETCH(float, device, add)
DECLARED_FETCH(float, device, sub)
void atomic_min_explicit(volatile device atomic<ulong>* object, ulong x, memory_order order);
void atomic_max_explicit(volatile device atomic<ulong>* object, ulong x, memory_order order);

struct os_log {
  constexpr os_log(const constant char*, const constant char*) constant {}
  template <typename... Args>
  void log_debug(const constant char*, Args...) const constant;
  template <typename... Args>
  void log_info(const constant char*, Args...) const constant;
  template <typename... Args>
  void log_error(const constant char*, Args...) const constant;
};
}  // namespace metal
