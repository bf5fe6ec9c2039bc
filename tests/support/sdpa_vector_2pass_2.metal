sdpa_vector_2pass_2<T, V>(partials, sums, maxs, out, BLOCKS, threadgroup_position_in_grid, threadgroups_per_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
