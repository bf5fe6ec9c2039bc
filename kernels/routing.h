// A router's selection: places in an order that puts NaN last, as MLX's sort does, and the softmax of a row.

// Where x stands in ascending order: 0 is before all numbers, the greatest is NaN. No score or sum of them is -0.
METAL_FUNC uint place_of(float x) {
  if (metal::isnan(x)) {
    return 0xffffffffu;
  }
  const uint bits = as_type<uint>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

METAL_FUNC float number_at(uint place) {
  return as_type<float>(place >> 31 ? place & 0x7fffffffu : ~place);
}

// Value i of lane's VALUES is of this expert; MLX's softmax deals a row to its threads in the same way.
METAL_FUNC int expert_at(int i, int lane) {
  return i / 4 * 128 + lane * 4 + i % 4;
}

struct Softmax {
  float highest, factor;

  METAL_FUNC float operator()(float x) const thread {
    return metal::fast::exp(x - highest) * factor;
  }
};

// Sums in the order of MLX's kernel: four values, the 32 lanes, then the runs of 128 values.
template <int VALUES>
METAL_FUNC Softmax softmax_of(const thread float* values, int lane) {
  Softmax softmax = {-metal::numeric_limits<float>::max(), 0};
  for (int i = 0; i < VALUES; i++) {
    softmax.highest = softmax.highest < values[i] ? values[i] : softmax.highest;
  }
  softmax.highest = simd_max(softmax.highest);
  float own = 0;
  for (int run = 0; run < VALUES / 4; run++) {
    float sum = 0;
    for (int i = 0; i < 4; i++) {
      sum += metal::fast::exp(values[4 * run + i] - softmax.highest);
    }
    sum = simd_sum(sum);
    own = lane == run ? sum : own;
  }
  softmax.factor = 1 / simd_sum(own);
  return softmax;
}

// The place of the sum of the two best values of group `group`, each group a number of neighbouring experts.
template <int VALUES>
METAL_FUNC uint group_place(const thread uint* places, int group, int experts, int lane) {
  uint best = 0, second = 0;
  for (int i = 0; i < VALUES; i++) {
    const int expert = expert_at(i, lane);
    const uint place = expert / experts == group ? places[i] : 0;
    second = metal::max(second, metal::min(best, place));
    best = metal::max(best, place);
  }
  const uint highest = simd_max(best);
  const int owner = simd_min(best == highest ? lane : 32);
  const uint next = simd_max(lane == owner ? second : best);
  return place_of(number_at(highest) + number_at(next));
}

// The groups, as bits, that lose: the `losers` lowest of the places that the lanes hold; of equal ones the first.
METAL_FUNC uint losing_groups(uint place, int groups, int losers, int lane) {
  uint lost = 0;
  for (int i = 0; i < losers; i++) {
    const bool alive = lane < groups && !(lost >> lane & 1);
    const uint lowest = simd_min(alive ? place : 0xffffffffu);
    lost |= 1u << simd_min(alive && place == lowest ? lane : 31);
  }
  return lost;
}
