// The state of one launch. Everything runs on one core, so nothing here is locked.
#pragma once
#include "emulated/abi.h"

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;

extern "C" {
void* malloc(u64);
void* calloc(u64, u64);
void free(void*);
void* memcpy(void*, const void*, u64);
void* memmove(void*, const void*, u64);
void* memset(void*, int, u64);
void* mmap(void*, u64, int, int, int, long);
int munmap(void*, u64);
int mprotect(void*, u64, int);
}

// Who touched a byte last: an epoch of the whole launch, the thread, its simdgroup's epoch and the instruction.
struct Mark {
  u64 epoch : 32, atomic : 1, simd_epoch : 11, thread : 10, site : 10;
};
struct Shadow {
  Mark writer, reader, other_reader;
};

enum BufferKind { INPUT = 0, OUTPUT = 1, THREADGROUP = 2 };

// One registered range of memory. Python fills the first block and reads the rest back.
struct Buffer {
  u64 size;
  u32 kind, initialised;
  const u8* contents;
  u8* copy_back;

  u64 base;
  u8* touched;  // a byte each: 1 read, 2 written
  Shadow* shadow;
  u32* line_stamp;
  u64 reads, writes, bytes_read, bytes_written;
  u64 group_lines, simd_accesses, simd_lines;
  const char* name;
  const void* tag;
  u64 item;
};

enum FaultKind {
  NO_FAULT, OUT_OF_BOUNDS, WILD, UNINITIALISED, RACE, INPUT_WRITE, DIVERGENT, BARRIER, ENDLESS, STACK, ARITHMETIC,
  COLLECTIVE, OTHER, INDEX
};

struct Fault {
  u32 kind, writes, thread, other_thread, other_writes, other_group_known;
  u64 buffer, size, address, site, other_site;
  long offset;
  u32 group[3];
  char text[512];
};

struct Thread {
  void* sp;
  u64 stack_low;
  EmulatedThread ids;
  u32 state, scope, flags;
  const char* what;
  u64 site;
  u64 steps, barriers, collectives;
  u32* occurrences;
};

enum State { READY, WAITING, FINISHED };

struct Simdgroup {
  u32 epoch_threadgroup, epoch_device, exchanges;
  EmulatedExchange buffers[2];
  u32 quad_exchanges[8];
  EmulatedExchange quads[8][2];
};

// A frame that does not fit reaches below its stack before anyone can tell: the first one has room there.
constexpr u64 STACK_SIZE = 1 << 18, STACK_GUARD = 1 << 28;
constexpr u32 MAX_THREADS = 1024, MAX_BUFFERS = 128, MAX_SITES = 1023;
constexpr u32 FLAG_DEVICE = 1, FLAG_THREADGROUP = 2;

struct Launch {  // filled by Python
  void (*entry)(void** arguments, const EmulatedThread*);
  u64 image_low, image_high, max_steps;
  u32 grid[3], group[3];
  u32 order, races, initialised, none_orders, traffic;  // order: 0 forward, 1 reverse, otherwise a seed
  u32 buffers;
  u64 steps, barriers, collectives, max_barriers, max_collectives, threads, threadgroup_bytes;
  Fault fault, earlier;  // `earlier`: a race or an unwritten read before threads diverged
};

struct Runtime {
  Launch* launch;
  Buffer* buffer;  // MAX_BUFFERS of them; threadgroup arrays follow the launch's own
  Thread* current;
  void* scheduler_sp;
  Thread* threads;
  Simdgroup* simdgroups;
  u32 live, simdgroup_count;
  u64 arena, slot_size, guard;
  u64 stacks;
  u64 epoch_threadgroup, epoch_device, group_base_threadgroup, group_base_device;
  u32 group_number, group_position[3];
  u64* site_table;
  u32* site_of;
  u64 site_capacity, sites;
  u64* site_address;
  // A write where another thread wrote: a race unless it leaves the same bytes, which is known once it is done.
  struct {
    u64 address, size;
    u8 before[64];
    Fault fault;
  } suspect;
  Fault pending;  // the first race or unwritten read; what comes before the next barrier may explain it
};
extern Runtime rt;

u32 site_number(u64 address);
void memory_access(u64 address, u64 size, bool writes, u64 site, bool atomic);
void resume(Thread*);
[[noreturn]] void leave_with_fault();
Fault& new_fault(FaultKind, u64 site);
void report_pending();
void settle_suspect();
int set_up_memory(Launch*);
void tear_down_memory();
void catch_traps();
void release_traps();
