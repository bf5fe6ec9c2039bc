// The functions that compiled kernels call: instrumented accesses, collectives, atomics and arithmetic checks.
#include "state.h"

void wait_here(Thread*);

#define EXPORT extern "C" __attribute__((visibility("default")))
#define SITE reinterpret_cast<u64>(__builtin_return_address(0))

#define ACCESS(SIZE)                                                                                             \
  EXPORT void __asan_load##SIZE##_noabort(u64 a) { memory_access(a, SIZE, false, SITE, false); }                 \
  EXPORT void __asan_store##SIZE##_noabort(u64 a) { memory_access(a, SIZE, true, SITE, false); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
EXPORT void __asan_loadN_noabort(u64 a, u64 n) { memory_access(a, n, false, SITE, false); }
EXPORT void __asan_storeN_noabort(u64 a, u64 n) { memory_access(a, n, true, SITE, false); }
EXPORT void __asan_handle_no_return() {}

EXPORT void* __asan_memcpy(void* to, const void* from, u64 n) {
  if (n == 0) return to;
  memory_access(reinterpret_cast<u64>(from), n, false, SITE, false);
  memory_access(reinterpret_cast<u64>(to), n, true, SITE, false);
  return memmove(to, from, n);
}
EXPORT void* __asan_memmove(void* to, const void* from, u64 n) {
  if (n == 0) return to;
  memory_access(reinterpret_cast<u64>(from), n, false, SITE, false);
  memory_access(reinterpret_cast<u64>(to), n, true, SITE, false);
  return memmove(to, from, n);
}
EXPORT void* __asan_memset(void* to, int value, u64 n) {
  if (n == 0) return to;
  memory_access(reinterpret_cast<u64>(to), n, true, SITE, false);
  return memset(to, value, n);
}

EXPORT void __sanitizer_cov_trace_pc() {
  Thread* t = rt.current;
  if (!t) return;
  if (reinterpret_cast<u64>(__builtin_frame_address(0)) < t->stack_low + 16384) {
    new_fault(STACK, SITE);
    leave_with_fault();
  }
  if (++t->steps > rt.launch->max_steps) {
    new_fault(ENDLESS, SITE);
    leave_with_fault();
  }
}

EXPORT void emulated_fault(const char* what, void* site) {
  Fault& f = new_fault(OTHER, reinterpret_cast<u64>(site));
  for (u32 i = 0; i < sizeof(f.text) - 1 && what[i]; ++i) f.text[i] = what[i];
  leave_with_fault();
}
EXPORT __attribute__((noinline)) void* emulated_here() { return __builtin_return_address(0); }

EXPORT const EmulatedExchange* emulated_exchange(u32 scope, const char* what, void* site, const void* value, u32 size,
                                                 u32 arg) {
  Thread* t = rt.current;
  Simdgroup& s = rt.simdgroups[t->ids.simdgroup];
  u32 lane = t->ids.lane, quad = lane / 4;
  // Two buffers are enough: a lane can only be one collective ahead of the others.
  EmulatedExchange& e = scope == SCOPE_QUAD ? s.quads[quad][s.quad_exchanges[quad] & 1] : s.buffers[s.exchanges & 1];
  u32& round = scope == SCOPE_QUAD ? s.quad_exchanges[quad] : s.exchanges;
  if (e.round != round + 1) {
    e.active = 0;
    e.round = round + 1;
  }
  e.active |= 1ul << lane;
  e.arg[lane] = arg;
  memcpy(e.value[lane], value, size);
  ++t->collectives;
  t->scope = scope;
  t->what = what;
  t->site = reinterpret_cast<u64>(site);
  wait_here(t);
  return &e;
}

EXPORT u32 emulated_lane() { return rt.current->ids.lane; }

EXPORT void emulated_barrier(u32 scope, u32 flags, void* site) {
  Thread* t = rt.current;
  ++t->barriers;
  t->scope = scope;
  t->flags = flags;
  t->what = scope == SCOPE_BARRIER ? "threadgroup_barrier" : "simdgroup_barrier";
  t->site = reinterpret_cast<u64>(site);
  wait_here(t);
}

EXPORT void emulated_source_lane(const EmulatedExchange* e, const char* what, void* site, u32 lane) {
  if (lane < 32 && (e->active >> lane & 1)) return;
  Fault& f = new_fault(COLLECTIVE, reinterpret_cast<u64>(site));
  u32 i = 0;
  for (; what[i]; ++i) f.text[i] = what[i];
  f.offset = lane >= 1000 ? static_cast<int>(lane - 1000) : static_cast<int>(lane);
  f.other_writes = lane >= 1000;
  leave_with_fault();
}

EXPORT void emulated_uniform(const EmulatedExchange* e, const char* what, void* site) {
  u32 lane = rt.current->ids.lane;
  bool quad = what[0] == 'q';
  for (u32 i = quad ? lane & ~3u : 0; i < (quad ? (lane & ~3u) + 4 : 32); ++i)
    if ((e->active >> i & 1) && e->arg[i] != e->arg[lane]) {
      Fault& f = new_fault(OTHER, reinterpret_cast<u64>(site));
      u32 n = 0;
      for (; what[n]; ++n) f.text[n] = what[n];
      const char* why = ": the lanes give different lane numbers, shifts or masks, and all must give the same";
      for (u32 k = 0; why[k]; ++k) f.text[n++] = why[k];
      leave_with_fault();
    }
}

EXPORT void emulated_atomic(const void* address, u32 size, u32 kind, void* site) {
  u64 a = reinterpret_cast<u64>(address);
  if (kind != ATOMIC_STORE) memory_access(a, size, false, reinterpret_cast<u64>(site), true);
  if (kind != ATOMIC_LOAD) memory_access(a, size, true, reinterpret_cast<u64>(site), true);
}

EXPORT void __ubsan_handle_divrem_overflow(void*, u64, u64) {
  Fault& f = new_fault(ARITHMETIC, SITE);
  memcpy(f.text, "an integer is divided by zero", 30);
  leave_with_fault();
}
EXPORT void __ubsan_handle_out_of_bounds(void*, u64 index) {
  if (!rt.current) return;
  Fault& f = new_fault(INDEX, SITE);
  f.offset = static_cast<long>(index);
  leave_with_fault();
}
EXPORT void __ubsan_handle_shift_out_of_bounds(void*, u64, u64) {
  Fault& f = new_fault(ARITHMETIC, SITE);
  memcpy(f.text, "a shift by as many bits as the type has, or more", 49);
  leave_with_fault();
}
