// What a compiled kernel and the runtime know of each other.
#pragma once

extern "C" {
struct EmulatedThread {
  unsigned grid[3], grid_size[3], local[3], local_size[3], dispatch_size[3], group[3], groups[3];
  unsigned index, simdgroup, lane, simdgroups, dispatch_simdgroups;
};

enum EmulatedScope { SCOPE_QUAD = 0, SCOPE_SIMD = 1, SCOPE_SIMD_BARRIER = 2, SCOPE_BARRIER = 3 };

// What the lanes of one simdgroup brought to a collective; `arg` is a lane number, a shift or a mask.
struct EmulatedExchange {
  unsigned long active;
  unsigned round;
  unsigned arg[32];
  alignas(16) unsigned char value[32][64];
};

// Waits until every live lane of the quad or simdgroup is at the same call, then gives what they brought.
const EmulatedExchange* emulated_exchange(unsigned scope, const char* what, void* site, const void* value,
                                          unsigned size, unsigned arg) __attribute__((convergent));
void emulated_barrier(unsigned scope, unsigned flags, void* site) __attribute__((convergent));
unsigned emulated_lane();
// Faults unless `lane` takes part in the exchange.
void emulated_source_lane(const EmulatedExchange*, const char* what, void* site, unsigned lane);
void emulated_uniform(const EmulatedExchange*, const char* what, void* site);
enum EmulatedAtomic { ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE };
void emulated_atomic(const void* address, unsigned size, unsigned kind, void* site);
// The storage of a threadgroup array in the threadgroup that runs; `tag` is a different address for each.
void* emulated_threadgroup(const void* tag, const char* name, unsigned long size, unsigned long item);
void emulated_fault(const char* what, void* site);
void* emulated_here();
}

// Code of the emulator's own inside a kernel: its accesses are not the kernel's.
#define EMULATED_PLAIN __attribute__((no_sanitize("kernel-address", "coverage", "undefined")))
#define EMULATED_INTERNAL __attribute__((noinline, convergent)) EMULATED_PLAIN
#define EMULATED_SITE __builtin_return_address(0)
