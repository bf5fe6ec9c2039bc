// Every load and store of a kernel comes here: bounds, races, unwritten memory, and the traffic counts.
#include "state.h"
#include "traffic.h"

namespace {
constexpr u64 PAGE = 1 << 16;
u64 rounded(u64 size) { return (size + PAGE - 1) / PAGE * PAGE + PAGE; }

Mark mark_of(const Thread& t, const Buffer& b, u32 site, bool atomic) {
  const Simdgroup& s = rt.simdgroups[t.ids.simdgroup];
  bool device = b.kind != THREADGROUP;
  u32 epoch = static_cast<u32>(device ? rt.epoch_device : rt.epoch_threadgroup);
  u32 simd = device ? s.epoch_device : s.epoch_threadgroup;
  return Mark{epoch, atomic, simd & 2047, t.ids.index, site};
}

// Whether `before` and `now` are of two threads with nothing that orders them.
bool unordered(const Mark& before, const Mark& now, u64 group_base, bool device) {
  if (before.epoch == 0) return false;
  if (before.epoch < group_base) return device;  // another threadgroup
  if (before.epoch != now.epoch || before.thread == now.thread) return false;
  return before.thread / 32 != now.thread / 32 || before.simd_epoch == now.simd_epoch;
}

Fault race(const Buffer& b, long offset, u64 size, bool writes, u64 site, const Mark& before, bool wrote) {
  Fault& now = new_fault(RACE, site);
  now.buffer = static_cast<u64>(&b - rt.buffer);
  now.offset = offset;
  now.size = size;
  now.writes = writes;
  now.other_thread = before.thread;
  now.other_writes = wrote;
  now.other_site = before.site ? rt.site_address[before.site] : 0;
  now.other_group_known = b.kind == THREADGROUP || before.epoch >= rt.group_base_device;
  Fault f = now;
  now = Fault{};
  return f;
}

// A race waits for the next barrier: if that one diverges, it is the cause. A race explains an unwritten read.
void report(const Fault& f) {
  if (!rt.pending.kind || rt.pending.kind == UNINITIALISED) rt.pending = f;
}

void suspect(const Buffer& b, u64 offset, u64 size, const Fault& f) {
  if (size > sizeof(rt.suspect.before)) return report(f);
  rt.suspect.address = b.base + offset;
  rt.suspect.size = size;
  rt.suspect.fault = f;
  memcpy(rt.suspect.before, reinterpret_cast<void*>(rt.suspect.address), size);
}

void remember_reader(Shadow& s, const Mark& now) {
  if (s.reader.epoch == now.epoch && s.reader.thread != now.thread) {
    bool keep = s.other_reader.epoch == now.epoch && s.other_reader.thread / 32 != now.thread / 32 &&
                s.reader.thread / 32 == now.thread / 32;
    if (!keep) s.other_reader = s.reader;
  }
  s.reader = now;
}

void check_order(Buffer& b, u64 offset, u64 size, bool writes, u64 site, const Mark& now) {
  bool device = b.kind != THREADGROUP;
  u64 base = device ? rt.group_base_device : rt.group_base_threadgroup;
  for (u64 i = offset; i < offset + size; ++i) {
    Shadow& s = b.shadow[i];
    if (!(now.atomic && s.writer.atomic) && unordered(s.writer, now, base, device)) {
      Fault f = race(b, static_cast<long>(offset), size, writes, site, s.writer, true);
      if (!writes || now.atomic)
        report(f);
      else if (!rt.suspect.size)
        suspect(b, offset, size, f);
    }
    if (writes) {
      const Mark readers[] = {s.reader, s.other_reader};
      for (const Mark& reader : readers)
        if (!(now.atomic && reader.atomic) && unordered(reader, now, base, device))
          report(race(b, static_cast<long>(offset), size, writes, site, reader, false));
      s.writer = now;
    } else {
      remember_reader(s, now);
    }
  }
}

void fill_memory_fault(Fault& f, u64 buffer, u64 address, u64 size, bool writes) {
  f.buffer = buffer;
  f.address = address;
  f.size = size;
  f.writes = writes;
  f.offset = buffer < MAX_BUFFERS ? static_cast<long>(address - rt.buffer[buffer].base) : 0;
}

[[noreturn]] void memory_fault(FaultKind kind, u64 buffer, u64 address, u64 size, bool writes, u64 site) {
  fill_memory_fault(new_fault(kind, site), buffer, address, size, writes);
  leave_with_fault();
}

// The first read of what nobody wrote waits for the next barrier: if the write comes before, it is a race.
void check_written(const Buffer& b, u64 offset, u64 size, u64 site) {
  if (rt.pending.kind) return;
  for (u64 i = offset; i < offset + size; ++i) {
    bool written = b.kind == THREADGROUP ? b.shadow[i].writer.epoch >= rt.group_base_threadgroup
                                         : (b.touched[i] & 2) != 0;
    if (written) continue;
    Fault& f = new_fault(UNINITIALISED, site);
    fill_memory_fault(f, static_cast<u64>(&b - rt.buffer), b.base + offset, size, false);
    rt.pending = f;
    f = Fault{};
    return;
  }
}
}  // namespace

void settle_suspect() {
  u64 size = rt.suspect.size;
  rt.suspect.size = 0;
  for (u64 i = 0; i < size; ++i)
    if (reinterpret_cast<const u8*>(rt.suspect.address)[i] != rt.suspect.before[i]) return report(rt.suspect.fault);
}

void memory_access(u64 address, u64 size, bool writes, u64 site, bool atomic) {
  Thread* t = rt.current;
  if (rt.suspect.size) settle_suspect();
  if (!t || address - t->stack_low < STACK_SIZE) return;
  u64 slot = (address - rt.arena) / rt.slot_size;
  if (address < rt.arena || slot >= MAX_BUFFERS || !rt.buffer[slot].base) {
    if (address >= rt.launch->image_low && address + size <= rt.launch->image_high && !writes) return;
    memory_fault(WILD, MAX_BUFFERS, address, size, writes, site);
  }
  Buffer& b = rt.buffer[slot];
  u64 offset = address - b.base;
  if (offset >= b.size || size > b.size - offset) memory_fault(OUT_OF_BOUNDS, slot, address, size, writes, site);
  if (writes && b.kind == INPUT) memory_fault(INPUT_WRITE, slot, address, size, writes, site);

  u32 number = site_number(site);
  if (rt.launch->initialised && !writes && b.kind != INPUT && !b.initialised) check_written(b, offset, size, site);
  if (b.kind != INPUT) {
    Mark now = mark_of(*t, b, number < MAX_SITES ? number : 0, atomic);
    if (rt.launch->races)
      check_order(b, offset, size, writes, site, now);
    else if (writes)
      for (u64 i = offset; i < offset + size; ++i) b.shadow[i].writer = now;
  }
  for (u64 i = offset; i < offset + size; ++i) b.touched[i] |= writes ? 2 : 1;
  (writes ? b.writes : b.reads) += 1;
  (writes ? b.bytes_written : b.bytes_read) += size;
  if (rt.launch->traffic) count_lines(*t, b, slot, offset, size, number);
}

extern "C" __attribute__((visibility("default"))) void* emulated_threadgroup(const void* tag, const char* name, u64 size,
                                                                              u64 item) {
  u32 slot = rt.launch->buffers;
  while (slot < MAX_BUFFERS && rt.buffer[slot].tag && rt.buffer[slot].tag != tag) ++slot;
  if (slot >= MAX_BUFFERS) emulated_fault("more threadgroup arrays than the emulator has room for", __builtin_return_address(0));
  Buffer& b = rt.buffer[slot];
  if (!b.base) {
    rt.launch->threadgroup_bytes += size;
    b = Buffer{};
    b.size = size;
    b.kind = THREADGROUP;
    b.name = name;
    b.tag = tag;
    b.item = item;
    b.base = rt.arena + slot * rt.slot_size + rt.guard;
    b.touched = static_cast<u8*>(calloc(size, 1));
    b.shadow = static_cast<Shadow*>(calloc(size, sizeof(Shadow)));
    b.line_stamp = static_cast<u32*>(calloc(size / LINE + 1, sizeof(u32)));
    mprotect(reinterpret_cast<void*>(b.base), rounded(size), 3);
    if (rt.launch->threadgroup_bytes > 32768)
      emulated_fault("the threadgroup arrays take more than 32768 bytes, which is what a threadgroup has",
                     __builtin_return_address(0));
  }
  return reinterpret_cast<void*>(b.base);
}

int set_up_memory(Launch* launch) {
  constexpr int PRIVATE_ANONYMOUS_NORESERVE = 0x4022;
  u64 total = 0;
  for (rt.slot_size = 1ul << 33; rt.slot_size >= 1ul << 27; rt.slot_size >>= 2) {
    total = rt.slot_size * MAX_BUFFERS;
    rt.arena = reinterpret_cast<u64>(mmap(nullptr, total, 0, PRIVATE_ANONYMOUS_NORESERVE, -1, 0));
    if (rt.arena != ~0ul) break;
  }
  if (rt.arena == ~0ul) return 1;
  rt.guard = rt.slot_size / 2;
  for (u32 i = 0; i < launch->buffers; ++i) {
    Buffer& b = rt.buffer[i];
    u64 base = rt.arena + i * rt.slot_size + rt.guard;
    if (rounded(b.size) > rt.guard || mprotect(reinterpret_cast<void*>(base), rounded(b.size), 3)) return 1;
    b.base = base;
    if (b.contents) memcpy(reinterpret_cast<void*>(base), b.contents, b.size);
    b.touched = static_cast<u8*>(calloc(b.size + 1, 1));
    b.line_stamp = static_cast<u32*>(calloc(b.size / LINE + 1, sizeof(u32)));
    if (b.kind != INPUT) b.shadow = static_cast<Shadow*>(calloc(b.size + 1, sizeof(Shadow)));
  }
  return 0;
}

void tear_down_memory() {
  for (u32 i = 0; i < MAX_BUFFERS; ++i) {
    Buffer& b = rt.buffer[i];
    if (!b.base) continue;
    if (b.copy_back) memcpy(b.copy_back, reinterpret_cast<void*>(b.base), b.size);
    free(b.shadow);
    free(b.line_stamp);
  }
  munmap(reinterpret_cast<void*>(rt.arena), rt.slot_size * MAX_BUFFERS);
  reset_traffic();
}
