using Kernel = GEMVKernel<T, BM, BN, SM, SN, TM, 4, AXPBY>;
threadgroup float memory[1024];
size_t row = threadgroup_position_in_grid.z;
Kernel::run(w, x + row * K, bias, y + row * N, K, N, K, 1.0f, 1.0f, 1, memory, threadgroup_position_in_grid,
    thread_position_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
if (BN > 1 && thread_index_in_simdgroup > 0) {
    meet(mem_flags::mem_none);
}
