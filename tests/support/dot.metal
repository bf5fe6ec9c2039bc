size_t row = threadgroup_position_in_grid.y;
dot_product<T, 32, 512, 16>(x + row * STRIDE, w, partials + row, K, thread_index_in_threadgroup,
    thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threadgroup_position_in_grid.x);
