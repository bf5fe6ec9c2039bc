// A token of each row of logits, by its sequence's options: the greatest, or a draw after the filters of mlx-lm.
//
// Inputs   logits [n, R, V] of T; key [n, 2] uint32, position [n] uint32, that of each sequence's row 0; options [n * 8]
//          float: 1 / temperature (0: the greatest), top-p (1: none), the logarithm of min-p (-infinity: none), the
//          number of tokens that min-p keeps, XTC's probability and threshold, top-k (0: none), 0; special [n * S] int32:
//          tokens that XTC keeps, padded with -1
// Output   tokens [n, R] int32
// Template T, LOW (bits of a float that T lacks)
// Grid     x: THREADS per row;  threadgroup (THREADS, 1, 1), at most 1024
//
// Top-p keeps x if less than its part of the mass is strictly greater; masses are integers, so no sum depends on an
// order. A NaN is never chosen; where nothing is greater than -infinity the token is 0.

#include "filters.h"
#include "random.h"

threadgroup metal::atomic_uint high[BINS], low[BINS];
threadgroup ulong lane_sums[32];
threadgroup Cut cut;
threadgroup float maxima[1024], value_of[32];
threadgroup int index_of[32];
const int rows = logits_shape[1], V = logits_shape[2];
const int row = threadgroup_position_in_grid.x, sequence = row / rows, lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup, thread_id = thread_index_in_threadgroup;
const int threads = threads_per_threadgroup.x, simds = threads / 32;
const Group group = {high, low, lane_sums, &cut, thread_id, threads};
const auto x = logits + size_t(row) * V;
const auto option = options + 8 * sequence;
const float inverse = option[0], top_p = option[1], log_min_p = option[2], xtc = option[4];
const int min_keep = int(option[3]), top_k = int(option[6]), specials = special_shape[0] / (logits_shape[0]);
const uint2 own_key = uint2(key[2 * sequence], key[2 * sequence + 1] + position[sequence] + row % rows);

Left<LOW> left = {0, 0.0f, 0.0f, 0xffffffffu, 0x7fffffff, 0, special + sequence * specials, specials, 14};
if (top_p < 1.0f || log_min_p > -INFINITY || xtc > 0.0f || top_k > 0) {
  const bool masses = top_p < 1.0f || xtc > 0.0f;
  float own = -INFINITY, sum = 0.0f;
  for (int i = thread_id; i < V; i += threads) {
    const float value = x[i];
    if (value > own) {
      sum = masses ? fma(sum, metal::precise::exp(own - value), 1.0f) : 0.0f;
      own = value;
    } else if (masses && value > -INFINITY) {
      sum += value == own ? 1.0f : metal::precise::exp(value - own);
    }
  }
  maxima[thread_id] = own;
  left.greatest = number_at(group.greatest(place_of(own)));
  left.top = logit_place<LOW>(left.greatest);
  if (masses) {
    sum = simd_sum(sum * left.chance(own));
    if (lane == 0) {
      value_of[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = simd_sum(lane < simds ? value_of[lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // The total is below 2^(31 + low_bits), and fewer than 2^(32 - low_bits) tokens have low bits to add.
    left.low_bits = metal::min(14, int(metal::clz(uint(V - 1))));
    const int exponent = int(as_type<uint>(sum) >> 23) - 127;
    left.scale = as_type<float>(uint(127 + 30 + left.low_bits - exponent) << 23);
  }
  if (top_p < 1.0f) {
    const float part = metal::rint(top_p * 16777216.0f);
    const ulong limit = (mass_of(x, V, left, group) >> 8) * ulong(part) >> 16;
    // Smaller logits have, all together, less than the mass that remains after the cut.
    const float lowest = left.greatest +
        metal::precise::log((1.0f - part / 16777216.0f) * sum / (2.0f * float(V)));
    const uint most = lowest > -INFINITY ? left.top - least_place<LOW>(lowest) : left.distance(-INFINITY);
    left.farthest = radix_select<MASS>(x, V, left, most, limit > 0 ? limit : 1, group).place;
  }
  if (log_min_p > -INFINITY) {
    const uint most = left.top - least_place<LOW>(left.greatest + log_min_p);
    if (most < left.farthest) {
      Left<LOW> first = left;
      first.farthest = 0;
      if (min_keep > 1) {
        first = first_of(x, V, left, min_keep, maxima, group);
      }
      left.farthest = max(most, first.farthest);
      left.last = first.farthest > most ? first.last : 0x7fffffff;
    }
  }
  if (xtc > 0.0f && fraction(random_bits(first_half(own_key), 0, 1)) < xtc) {
    const float threshold = option[5] * (float(mass_of(x, V, left, group)) / left.scale);
    uint nearest = 0;
    for (int i = thread_id; i < V; i += threads) {
      const float value = x[i];
      nearest = left.holds(value, i) && left.chance(value) > threshold ? max(nearest, left.distance(value)) : nearest;
    }
    left.nearest = group.greatest(nearest);
  }
  if (top_k > 0) {
    left = first_of(x, V, left, top_k, maxima, group);
  }
}

const uint2 dice = second_half(own_key);
float shift = 0.0f;
bool again = false;
do {
  Choice best = after_all();
  for (int i = thread_id; i < V; i += threads) {
    const float value = x[i];
    if (left.holds(value, i)) {
      // The product is rounded on its own: a fused sum would have other bits than the reference.
      const float score =
          inverse > 0.0f ? fma(value - shift, inverse, 0.0f) + gumbel(random_bits(dice, i, V)) : value;
      const Choice drawn = {score, i};
      best = precedes(drawn, best) ? drawn : best;
    }
  }
  best = simd_first(best);
  if (lane == 0) {
    value_of[simd] = best.value;
    index_of[simd] = best.index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  best = after_all();
  if (lane < simds) {
    best = {value_of[lane], index_of[lane]};
  }
  best = simd_first(best);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Scores of this size have no bits left for the noise, and may be infinite: the greatest logit is subtracted first.
  again = inverse > 0.0f && shift == 0.0f && metal::abs(best.value) > 1048576.0f;
  if (again) {
    float own = -INFINITY;
    for (int i = thread_id; i < V; i += threads) {
      const float value = x[i];
      own = left.holds(value, i) ? max(own, value) : own;
    }
    shift = number_at(group.greatest(place_of(own)));
    again = shift != 0.0f && metal::abs(shift) < INFINITY;
  }
  if (!again && thread_id == 0) {
    tokens[row] = best.value == -INFINITY ? 0 : best.index;
  }
} while (again);
