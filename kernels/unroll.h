// In front of a loop: Metal's compiler unrolls it, so that what it indexes stays in registers.
#define UNROLL _Pragma("clang loop unroll(full)")
// Keeps a loop whose unrolled form would need too many registers.
#define AS_LOOP _Pragma("clang loop unroll(disable)")
