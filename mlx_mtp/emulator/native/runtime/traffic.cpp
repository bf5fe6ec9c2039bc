#include "traffic.h"

namespace {
// A set of (access, line) pairs of the threadgroup that runs; the n-th execution of an instruction by
// each lane of a simdgroup is one access.
struct Entry {
  u64 access, line;
  u32 stamp;
};
struct Set {
  Entry* entries;
  u64 capacity, used;
  u32 stamp;

  bool insert(u64 access, u64 line) {
    if (used * 2 >= capacity) grow();
    u64 h = (access * 0x9e3779b97f4a7c15ul ^ line * 0xc2b2ae3d27d4eb4ful) * 0xff51afd7ed558ccdul;
    for (u64 i = h >> 20;; ++i) {
      Entry& e = entries[i & (capacity - 1)];
      if (e.stamp != stamp) {
        e = Entry{access, line, stamp};
        ++used;
        return true;
      }
      if (e.access == access && e.line == line) return false;
    }
  }
  void grow() {
    Set larger{nullptr, capacity ? capacity * 4 : 1ul << 16, 0, 1};
    larger.entries = static_cast<Entry*>(calloc(larger.capacity, sizeof(Entry)));
    for (u64 i = 0; i < capacity; ++i)
      if (entries[i].stamp == stamp) larger.insert(entries[i].access, entries[i].line);
    free(entries);
    *this = larger;
  }
};
Set seen;
u32 occurrence_capacity;

u32 next_occurrence(const Thread& t, u32 site) {
  Thread& thread = rt.threads[t.ids.index];
  if (!thread.occurrences) thread.occurrences = static_cast<u32*>(calloc(occurrence_capacity, sizeof(u32)));
  return thread.occurrences[site]++;
}
}  // namespace

void count_lines(const Thread& t, Buffer& b, u64 slot, u64 offset, u64 size, u32 site) {
  if (site >= occurrence_capacity) {
    u32 larger = occurrence_capacity ? occurrence_capacity : 256;
    while (larger <= site) larger *= 4;
    for (u32 i = 0; i < MAX_THREADS; ++i)
      if (rt.threads[i].occurrences) {
        u32* copy = static_cast<u32*>(calloc(larger, sizeof(u32)));
        memcpy(copy, rt.threads[i].occurrences, occurrence_capacity * sizeof(u32));
        free(rt.threads[i].occurrences);
        rt.threads[i].occurrences = copy;
      }
    occurrence_capacity = larger;
  }
  u64 access = static_cast<u64>(next_occurrence(t, site)) << 32 | static_cast<u64>(site) << 6 | t.ids.simdgroup;
  b.simd_accesses += seen.insert(access, slot << 48 | 0xffffffffffff);
  for (u64 line = offset / LINE; line <= (offset + size - 1) / LINE; ++line) {
    b.simd_lines += seen.insert(access, slot << 48 | line);
    if (b.line_stamp[line] != rt.group_number + 1) {
      b.line_stamp[line] = rt.group_number + 1;
      ++b.group_lines;
    }
  }
}

void begin_group_traffic() {
  ++seen.stamp;
  seen.used = 0;
  for (u32 i = 0; i < MAX_THREADS; ++i)
    if (rt.threads[i].occurrences) memset(rt.threads[i].occurrences, 0, occurrence_capacity * sizeof(u32));
}

void reset_traffic() {
  for (u32 i = 0; i < MAX_THREADS; ++i) {
    free(rt.threads[i].occurrences);
    rt.threads[i].occurrences = nullptr;
  }
  occurrence_capacity = 0;
  free(seen.entries);
  seen = Set{};
}
