sdpa_vector<T, D, V>(queries, keys, values, out, gqa_factor, S, size_t(keys_strides[KV_AXIS]),
    size_t(keys_strides[2]), size_t(values_strides[KV_AXIS]), size_t(values_strides[2]), scale,
    nullptr, nullptr, gqa_factor, gqa_factor, gqa_factor, nullptr, gqa_factor, threadgroup_position_in_grid,
    threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
