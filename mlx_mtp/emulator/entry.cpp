
# 1 "emulator"
#define EMULATED_UINT3(a) uint3(a[0], a[1], a[2])
const metal::matrix::Order metal::matrix::order = metal::matrix::MATRIX_ORDER;
const bool metal::matrix::fused = MATRIX_FUSED;
extern "C" {
extern __attribute__((visibility("hidden"))) char __ehdr_start, _end;
__attribute__((visibility("default"), no_sanitize("kernel-address", "coverage", "undefined")))
void emulated_entry(void** arguments, const EmulatedThread* t) {
  KERNEL_CALL;
}
__attribute__((visibility("default"), no_sanitize("kernel-address", "coverage", "undefined")))
char* emulated_bound(int high) { return high ? &_end : &__ehdr_start; }
}
