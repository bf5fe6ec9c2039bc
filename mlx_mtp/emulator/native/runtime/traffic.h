// Counts of distinct cache lines, per threadgroup and per access of a simdgroup.
#pragma once
#include "state.h"

constexpr u64 LINE = 64;
void count_lines(const Thread&, Buffer&, u64 slot, u64 offset, u64 size, u32 site);
void begin_group_traffic();
void reset_traffic();
