sdpa_vector_2pass_1<T, D, V>(queries, keys, values, partials, sums, maxs, S, size_t(keys_strides[KV_AXIS]),
    size_t(keys_strides[2]), size_t(values_strides[KV_AXIS]), size_t(values_strides[2]), scale, nullptr, nullptr,
    S, S, S, nullptr, threads_per_threadgroup, thread_position_in_threadgroup, threadgroup_position_in_grid,
    threadgroups_per_grid, thread_index_in_simdgroup);
