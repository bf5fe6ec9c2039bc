#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/utils.h"

// In gemv.h lanes that are done are missing at the barrier, and lanes read from ones without a row, whose value no one
// uses. The emulator objects to both: here the others come to the barrier later, and such a lane reads itself.
__attribute__((noinline)) inline void meet(mem_flags flags) { threadgroup_barrier(flags); }
inline float shuffle_down(float value, ushort delta, uint lane) {
    bool there = simd_vote::vote_t(simd_active_threads_mask()) >> (lane + delta) & 1;
    return simd_shuffle(value, there ? lane + delta : lane);
}
#define threadgroup_barrier meet
#define simd_shuffle_down(value, delta) shuffle_down(value, delta, simd_lid)
#include "mlx/backend/metal/kernels/gemv.h"
#undef threadgroup_barrier
#undef simd_shuffle_down
