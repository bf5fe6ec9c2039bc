// Runs the threadgroups of a launch one after the other, each thread up to its next barrier or collective.
#include "state.h"
#include "traffic.h"

Runtime rt;
void* thread_arguments[MAX_BUFFERS];
void start(Thread*);
void wait_here(Thread*);

namespace {
u64 random_state;
u32 random_below(u32 n) {
  random_state = random_state * 6364136223846793005ul + 1442695040888963407ul;
  return static_cast<u32>((random_state >> 33) % n);
}

void fill_order(u32* order, u32 n) {
  for (u32 i = 0; i < n; ++i) order[i] = rt.launch->order == 1 ? n - 1 - i : i;
  if (rt.launch->order > 1)
    for (u32 i = n; i > 1; --i) {
      u32 j = random_below(i), other = order[j];
      order[j] = order[i - 1];
      order[i - 1] = other;
    }
}

struct Text {
  Fault& fault;
  u32 used = 0;
  Text& add(const char* s) {
    while (*s && used < sizeof(fault.text) - 1) fault.text[used++] = *s++;
    fault.text[used] = 0;
    return *this;
  }
  Text& add(u64 n) {
    char digits[24];
    int i = 23;
    digits[i] = 0;
    do digits[--i] = static_cast<char>('0' + n % 10); while (n /= 10);
    return add(digits + i);
  }
};

bool same_call(const Thread& a, const Thread& b) {
  return a.state == b.state && (a.state == FINISHED || (a.scope == b.scope && a.site == b.site));
}


void describe(Fault& fault, u32 first, u32 count) {
  Text text{fault};
  u32 i = first, end = first + count;
  while (i < end) {
    u32 j = i;
    while (j + 1 < end && same_call(rt.threads[i], rt.threads[j + 1])) ++j;
    if (i != first) text.add(", ");
    text.add(i == j ? "thread " : "threads ").add(i);
    if (j > i) text.add("-").add(j);
    Thread& t = rt.threads[i];
    if (t.state == FINISHED) {
      text.add(j > i ? " ended" : " ended");
    } else {
      text.add(j > i ? " wait at " : " waits at ").add(t.what).add("@").add(t.site);
    }
    i = j + 1;
  }
}

void blame(FaultKind kind, u32 first, u32 count) {
  Thread* blamed = nullptr;
  for (u32 i = first; i < first + count && !blamed; ++i)
    if (rt.threads[i].state == WAITING) blamed = &rt.threads[i];
  rt.current = blamed;
  Fault& f = new_fault(kind, blamed->site);
  rt.current = nullptr;
  describe(f, first, count);
}

bool release_together(u32 first, u32 count, u32 scope) {
  Thread* some = nullptr;
  for (u32 i = first; i < first + count; ++i) {
    Thread& t = rt.threads[i];
    if (t.state == FINISHED) continue;
    if (t.state != WAITING || t.scope != scope || (some && t.site != some->site)) return false;
    some = &t;
  }
  if (!some) return false;
  for (u32 i = first; i < first + count; ++i)
    if (rt.threads[i].state == WAITING) rt.threads[i].state = READY;
  return true;
}

u32 lanes_in(u32 simdgroup) {
  u32 first = simdgroup * 32;
  return rt.live - first < 32 ? rt.live - first : 32;
}

void order_memory(u32 flags, u32& threadgroup, u32& device) {
  if (rt.launch->none_orders && flags == 0) flags = FLAG_DEVICE | FLAG_THREADGROUP;
  if (flags & FLAG_THREADGROUP) ++threadgroup;
  if (flags & FLAG_DEVICE) ++device;
}

// Lets go on whoever can: true if some lane is ready again, or all wait for the threadgroup or have ended.
bool resolve(u32 simdgroup, bool& ready) {
  u32 first = simdgroup * 32, count = lanes_in(simdgroup);
  Simdgroup& s = rt.simdgroups[simdgroup];
  ready = false;
  if (release_together(first, count, SCOPE_SIMD)) {
    ++s.exchanges;
    return ready = true;
  }
  if (release_together(first, count, SCOPE_SIMD_BARRIER)) {
    order_memory(rt.threads[first].flags, s.epoch_threadgroup, s.epoch_device);
    return ready = true;
  }
  for (u32 q = 0; q * 4 < count; ++q)
    if (release_together(first + q * 4, count - q * 4 < 4 ? count - q * 4 : 4, SCOPE_QUAD)) {
      ++s.quad_exchanges[q];
      ready = true;
    }
  if (ready) return true;
  for (u32 i = first; i < first + count; ++i)
    if (rt.threads[i].state == WAITING && rt.threads[i].scope != SCOPE_BARRIER) return false;
  return true;
}

bool run_simdgroup(u32 simdgroup) {
  u32 order[32], count = lanes_in(simdgroup);
  for (bool ready = true; ready;) {
    fill_order(order, count);
    for (u32 i = 0; i < count; ++i) {
      Thread& t = rt.threads[simdgroup * 32 + order[i]];
      if (t.state != READY) continue;
      resume(&t);
      if (rt.launch->fault.kind) {
        report_pending();
        return false;
      }
    }
    if (!resolve(simdgroup, ready)) {
      blame(DIVERGENT, simdgroup * 32, count);
      report_pending();
      return false;
    }
  }
  return true;
}

// Whether every thread is at one barrier; clears `running` when all have ended.
bool pass_barrier(bool& running) {
  u32 waiting = 0, ended = 0;
  bool same = true;
  Thread* some = nullptr;
  for (u32 i = 0; i < rt.live; ++i) {
    Thread& t = rt.threads[i];
    if (t.state == FINISHED) { ++ended; continue; }
    ++waiting;
    same = same && (!some || some->site == t.site);
    some = &t;
  }
  running = waiting != 0;
  bool diverged = running && (ended || !same);
  if (diverged) blame(BARRIER, 0, rt.live);
  report_pending();
  if (rt.launch->fault.kind) return false;
  if (!running) return true;
  u32 threadgroup = 0, device = 0;
  order_memory(some->flags, threadgroup, device);
  rt.epoch_threadgroup += threadgroup;
  rt.epoch_device += device;
  for (u32 i = 0; i < rt.live; ++i) rt.threads[i].state = READY;
  return true;
}

void place_thread(u32 index, const u32* local, const u32* size) {
  const Launch& l = *rt.launch;
  Thread& t = rt.threads[index];
  u32* occurrences = t.occurrences;
  t = Thread{};
  t.occurrences = occurrences;
  t.stack_low = rt.stacks + index * STACK_SIZE;
  EmulatedThread& id = t.ids;
  for (int d = 0; d < 3; ++d) {
    id.local[d] = local[d];
    id.local_size[d] = size[d];
    id.dispatch_size[d] = l.group[d];
    id.group[d] = rt.group_position[d];
    id.grid[d] = rt.group_position[d] * l.group[d] + local[d];
    id.grid_size[d] = l.grid[d];
    id.groups[d] = (l.grid[d] + l.group[d] - 1) / l.group[d];
  }
  id.index = index;
  id.simdgroup = index / 32;
  id.lane = index % 32;
  id.simdgroups = (size[0] * size[1] * size[2] + 31) / 32;
  id.dispatch_simdgroups = (l.group[0] * l.group[1] * l.group[2] + 31) / 32;
  start(&t);
}

void count_threads() {
  Launch& l = *rt.launch;
  for (u32 i = 0; i < rt.live; ++i) {
    const Thread& t = rt.threads[i];
    l.steps += t.steps;
    l.barriers += t.barriers;
    l.collectives += t.collectives;
    if (t.barriers > l.max_barriers) l.max_barriers = t.barriers;
    if (t.collectives > l.max_collectives) l.max_collectives = t.collectives;
  }
  l.threads += rt.live;
}

void start_group(u32 number, const u32* position) {
  const Launch& l = *rt.launch;
  rt.group_number = number;
  u32 size[3], local[3], index = 0;
  for (int d = 0; d < 3; ++d) {
    rt.group_position[d] = position[d];
    u32 left = l.grid[d] - position[d] * l.group[d];
    size[d] = left < l.group[d] ? left : l.group[d];
  }
  rt.group_base_threadgroup = ++rt.epoch_threadgroup;
  rt.group_base_device = ++rt.epoch_device;
  rt.live = size[0] * size[1] * size[2];
  rt.simdgroup_count = (rt.live + 31) / 32;
  memset(rt.simdgroups, 0, sizeof(Simdgroup) * rt.simdgroup_count);
  if (l.traffic) begin_group_traffic();
  for (local[2] = 0; local[2] < size[2]; ++local[2])
    for (local[1] = 0; local[1] < size[1]; ++local[1])
      for (local[0] = 0; local[0] < size[0]; ++local[0]) place_thread(index++, local, size);
}

bool run_group(u32 number, const u32* position) {
  start_group(number, position);
  u32 order[MAX_THREADS / 32];
  for (bool running = true; running;) {
    fill_order(order, rt.simdgroup_count);
    for (u32 i = 0; i < rt.simdgroup_count; ++i)
      if (!run_simdgroup(order[i])) return false;
    if (!pass_barrier(running)) return false;
  }
  count_threads();
  return true;
}

void run_all() {
  const Launch& l = *rt.launch;
  u32 groups[3], total = 1;
  for (int d = 0; d < 3; ++d) total *= groups[d] = (l.grid[d] + l.group[d] - 1) / l.group[d];
  u32* order = static_cast<u32*>(malloc(total * sizeof(u32) + 1));
  fill_order(order, total);
  for (u32 i = 0; i < total; ++i) {
    u32 n = order[i];
    u32 position[3] = {n % groups[0], n / groups[0] % groups[1], n / groups[0] / groups[1]};
    if (!run_group(n, position)) break;
  }
  free(order);
}
}  // namespace

Fault& new_fault(FaultKind kind, u64 site) {
  Fault& f = rt.launch->fault;
  f = Fault{};
  f.kind = kind;
  f.site = site;
  f.buffer = MAX_BUFFERS;
  f.thread = rt.current ? rt.current->ids.index : 0;
  for (int d = 0; d < 3; ++d) f.group[d] = rt.group_position[d];
  return f;
}

void report_pending() {
  Fault& f = rt.launch->fault;
  if (!rt.pending.kind) return;
  if (f.kind == DIVERGENT || f.kind == BARRIER)
    rt.launch->earlier = rt.pending;
  else
    f = rt.pending;
}

u32 site_number(u64 address) {
  if (rt.sites * 2 >= rt.site_capacity) {
    u64 capacity = rt.site_capacity ? rt.site_capacity * 4 : 4096;
    u64* table = static_cast<u64*>(calloc(capacity, 8));
    u32* numbers = static_cast<u32*>(calloc(capacity, 4));
    u64* addresses = static_cast<u64*>(calloc(capacity, 8));
    for (u64 i = 1; i <= rt.sites; ++i) {
      u64 at = rt.site_address[i], h = at * 0x9e3779b97f4a7c15ul >> 40;
      while (table[h & (capacity - 1)]) ++h;
      table[h & (capacity - 1)] = at;
      numbers[h & (capacity - 1)] = static_cast<u32>(i);
      addresses[i] = at;
    }
    free(rt.site_table);
    free(rt.site_of);
    free(rt.site_address);
    rt.site_table = table;
    rt.site_of = numbers;
    rt.site_address = addresses;
    rt.site_capacity = capacity;
  }
  for (u64 h = address * 0x9e3779b97f4a7c15ul >> 40;; ++h) {
    u64 i = h & (rt.site_capacity - 1);
    if (rt.site_table[i] == address) return rt.site_of[i];
    if (rt.site_table[i]) continue;
    rt.site_table[i] = address;
    rt.site_of[i] = static_cast<u32>(++rt.sites);
    rt.site_address[rt.sites] = address;
    return rt.site_of[i];
  }
}

// Python lays out the same structures by hand, and compares.
extern "C" __attribute__((visibility("default"))) u64 emulated_layout() { return sizeof(Launch) << 32 | sizeof(Buffer); }

extern "C" __attribute__((visibility("default"))) int emulated_launch(Launch* launch, Buffer* buffers, const u64* origins) {

  rt = Runtime{};
  rt.launch = launch;
  rt.buffer = buffers;
  random_state = launch->order;
  rt.threads = static_cast<Thread*>(calloc(MAX_THREADS, sizeof(Thread)));
  rt.simdgroups = static_cast<Simdgroup*>(calloc(MAX_THREADS / 32, sizeof(Simdgroup)));
  // Kept from launch to launch: new pages would take a third of a short one's time. Launches wait for each other.
  static u64 stacks = ~0ul;
  if (stacks == ~0ul) stacks = reinterpret_cast<u64>(mmap(nullptr, STACK_GUARD + STACK_SIZE * MAX_THREADS, 3, 0x4022, -1, 0));
  if (stacks == ~0ul || set_up_memory(launch)) return 1;
  rt.stacks = stacks + STACK_GUARD;
  for (u32 i = 0; i < launch->buffers; ++i) thread_arguments[i] = reinterpret_cast<void*>(buffers[i].base + origins[i]);
  catch_traps();
  run_all();
  release_traps();
  tear_down_memory();
  free(rt.threads);
  free(rt.simdgroups);
  free(rt.site_table);
  free(rt.site_of);
  free(rt.site_address);
  return 0;
}
