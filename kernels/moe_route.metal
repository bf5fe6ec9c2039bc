// The top_k experts of each row by its logits, and the (row, expert) pairs sorted by expert, then by row.
//
// Inputs   logits [M, E] of T; bias [E] (read where BIASED); sizes [4] int32: top_k, groups of experts, groups that stay,
//          whether weights are divided by their sum; numbers [2] float32: added to that sum, and the weights' factor
// Outputs  P = M * top_k pairs in sorted order: tokens [P] int32, weights [P] float32; experts [P] int32, starts [P + 1]
//          int32: the distinct experts and where the pairs of each start (-1 and P behind the last); places [P] int32:
//          where each row's pairs stand, one row after the other, its experts in ascending order
// Template T (logits), SOFTMAX (else sigmoid), BIASED, VALUES (4 per 128 experts), PAIRS (at least P)
// Grid     (32, M, 1), all of it one threadgroup: 32 for each row

#include "activations.h"
#include "routing.h"

const int M = logits_shape[0], E = logits_shape[1], top_k = sizes[0], pairs = M * top_k;
const int lane = thread_index_in_simdgroup, row = simdgroup_index_in_threadgroup;

float values[VALUES];
for (int i = 0; i < VALUES; i++) {
  const int expert = expert_at(i, lane);
  values[i] = expert < E ? float(logits[row * E + expert]) : -INFINITY;
}
Softmax softmax = {0, 0};
if constexpr (SOFTMAX) {
  softmax = softmax_of<VALUES>(values, lane);
}
uint candidates[VALUES]; // 0: none, or chosen already
for (int i = 0; i < VALUES; i++) {
  const int expert = expert_at(i, lane);
  float score = SOFTMAX ? float(static_cast<T>(softmax(values[i]))) : sigmoid(values[i]);
  if constexpr (BIASED) {
    if (expert < E) {
      score = score + float(bias[expert]);
    }
  }
  candidates[i] = expert < E ? place_of(score) : 0;
}
if (sizes[1] > 1) {
  const int experts_of_group = E / sizes[1];
  uint own = 0;
  for (int group = 0; group < sizes[1]; group++) {
    const uint place = group_place<VALUES>(candidates, group, experts_of_group, lane);
    own = lane == group ? place : own;
  }
  const uint lost = losing_groups(own, sizes[1], sizes[1] - sizes[2], lane);
  for (int i = 0; i < VALUES; i++) {
    const int expert = expert_at(i, lane);
    if (expert < E && lost >> (expert / experts_of_group) & 1) {
      candidates[i] = place_of(0.0f);
    }
  }
}

// MLX sorts negated sigmoids and takes the first, but takes the last softmaxes: so NaN is worst or best, and of equal
// ones the first expert or the last is better.
int chosen = 0;
for (int rank = 0; rank < top_k; rank++) {
  uint best = 0;
  int at = 0;
  for (int i = 0; i < VALUES; i++) {
    const uint candidate = !SOFTMAX && candidates[i] == place_of(NAN) ? 1 : candidates[i];
    if (SOFTMAX ? candidate >= best : candidate > best) {
      best = candidate;
      at = expert_at(i, lane);
    }
  }
  const uint highest = simd_max(best);
  const int expert = SOFTMAX ? simd_max(best == highest ? at : -1) : simd_min(best == highest ? at : E);
  for (int i = 0; i < VALUES; i++) {
    candidates[i] = expert_at(i, lane) == expert ? 0 : candidates[i];
  }
  chosen = lane == rank ? expert : chosen;
}

float weight = 0;
if (lane < top_k) {
  const float logit = float(logits[row * E + chosen]);
  weight = SOFTMAX ? float(static_cast<T>(softmax(logit))) : sigmoid(logit);
}
if (sizes[3]) {
  const float sum = simd_sum(weight);
  weight = SOFTMAX ? float(static_cast<T>(weight / float(static_cast<T>(sum)))) : weight / (sum + numbers[0]);
}
weight = weight * numbers[1];

threadgroup int visited[PAIRS], sorted[PAIRS];
const int pair = row * top_k + lane;
if (lane < top_k) {
  visited[pair] = chosen;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (lane < top_k) {
  int place = 0, before = 0;
  for (int other = 0; other < pairs; other++) {
    const int expert = visited[other];
    place += expert < chosen || (expert == chosen && other < pair);
    before += expert < chosen && other / top_k == row;
  }
  sorted[place] = chosen;
  tokens[place] = row;
  weights[place] = weight;
  places[row * top_k + before] = place;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int own_place = thread_index_in_threadgroup;
if (own_place < pairs) {
  int slot = -1, distinct = 0;
  for (int place = 0; place < pairs; place++) {
    distinct += place == 0 || sorted[place] != sorted[place - 1];
    slot = place == own_place ? distinct - 1 : slot;
  }
  if (own_place == 0 || sorted[own_place] != sorted[own_place - 1]) {
    experts[slot] = sorted[own_place];
    starts[slot] = own_place;
  }
  if (own_place >= distinct) {
    experts[own_place] = -1;
    starts[own_place] = pairs;
  }
  if (own_place == 0) {
    starts[pairs] = pairs;
  }
}
