// Processor traps inside a kernel: a division that overflows, and code that cannot be reached.
#include "state.h"

namespace {
struct Action {  // glibc's and musl's struct sigaction on 64-bit Linux
  void (*handler)(int, void*, void*);
  u64 mask[16];
  int flags;
  void (*restorer)();
};
constexpr int SIGNALS[] = {8, 4};  // SIGFPE, SIGILL
constexpr int INFO = 4, NO_DEFER = 0x40000000;
Action before[2];

u64 program_counter(void* context) {
#if defined(__x86_64__)
  return *reinterpret_cast<u64*>(static_cast<char*>(context) + 168) + 1;
#else
  (void)context;
  return 0;
#endif
}

// The kernel's stack is left as it is, signal frame and all: nothing returns to it.
void trapped(int number, void*, void* context) {
  if (!rt.current) __builtin_trap();
  Fault& f = new_fault(ARITHMETIC, program_counter(context));
  const char* what = number == 8 ? "an integer division overflows" : "runs into code that cannot be reached";
  for (u32 i = 0; what[i]; ++i) f.text[i] = what[i];
  leave_with_fault();
}
}  // namespace

extern "C" int sigaction(int, const Action*, Action*);

void catch_traps() {
  Action action{};
  action.handler = trapped;
  action.flags = INFO | NO_DEFER;
  for (int i = 0; i < 2; ++i) sigaction(SIGNALS[i], &action, &before[i]);
}

void release_traps() {
  for (int i = 0; i < 2; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
}
