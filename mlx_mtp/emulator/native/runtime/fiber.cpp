// One stack per GPU thread and the switch between them.
#include "state.h"

extern "C" void emulated_switch(void** save, void* to);

#if defined(__x86_64__)
__asm__(R"(
.text
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr u32 SAVED = 6;
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulator runs on x86-64 and arm64"
#endif

extern void* thread_arguments[];

static void thread_main() {
  EmulatedThread ids = rt.current->ids;  // on the thread's own stack, where it may read
  rt.launch->entry(thread_arguments, &ids);
  if (rt.suspect.size) settle_suspect();
  Thread* self = rt.current;
  self->state = FINISHED;
  emulated_switch(&self->sp, rt.scheduler_sp);
  __builtin_trap();
}

void start(Thread* t) {
  u64* top = reinterpret_cast<u64*>(t->stack_low + STACK_SIZE);
#if defined(__x86_64__)
  *--top = 0;  // where a caller's return address would be: it keeps the stack aligned as after a call
  *--top = reinterpret_cast<u64>(&thread_main);
  for (u32 i = 0; i < SAVED; ++i) *--top = 0;
#else
  top -= 20;
  for (u32 i = 0; i < 20; ++i) top[i] = 0;
  top[11] = reinterpret_cast<u64>(&thread_main);
#endif
  t->sp = top;
  t->state = READY;
}

void resume(Thread* t) {
  rt.current = t;
  emulated_switch(&rt.scheduler_sp, t->sp);
  rt.current = nullptr;
}

void wait_here(Thread* t) {
  if (rt.suspect.size) settle_suspect();
  t->state = WAITING;
  emulated_switch(&t->sp, rt.scheduler_sp);
}

void leave_with_fault() {
  void* unused;
  emulated_switch(&unused, rt.scheduler_sp);
  __builtin_trap();
}
