// Filters of a row's logits: the tokens that are left, their mass, and the cut after a number or a mass of the greatest.

#include "head.h"
#include "routing.h"

constant constexpr int COUNT = 0; // what `radix_select` adds up
constant constexpr int MASS = 1;
constant constexpr int INDEX = 2;
constant constexpr int DIGIT = 10; // bits of a place that it reads at a time
constant constexpr int BINS = 1024;

// Where x stands in ascending order, as an integer; LOW: bits that float has and the logits' type lacks.
template <int LOW>
METAL_FUNC uint logit_place(float x) {
  return place_of(x == 0.0f ? 0.0f : x) >> LOW;
}

// The place of the least number of the logits' type that is not below x.
template <int LOW>
METAL_FUNC uint least_place(float x) {
  return (place_of(x == 0.0f ? 0.0f : x) + (x < 0.0f ? 0 : (1u << LOW) - 1)) >> LOW;
}

// The tokens that are left. A distance is the number of places from the greatest logit down.
template <int LOW>
struct Left {
  uint top; // place of the greatest logit
  float greatest, scale; // scale: masses are integers, exp(x - greatest) times this power of two
  uint farthest; // distance of the last token left, and its index
  int last;
  uint nearest; // of smaller distances only special tokens are left
  const device int* special;
  int specials, low_bits; // low_bits: of a mass, counted apart from the others, so that no sum overflows 32 bits

  METAL_FUNC uint distance(float x) const thread {
    return top - logit_place<LOW>(x);
  }

  METAL_FUNC bool is_special(int token) const thread {
    bool found = false;
    for (int i = 0; i < specials; i++) {
      found |= special[i] == token;
    }
    return found;
  }

  METAL_FUNC bool holds(float x, int token) const thread {
    const uint own = distance(x);
    const bool kept = own < farthest || (own == farthest && token <= last);
    return x > -INFINITY && kept && (own >= nearest || is_special(token));
  }

  METAL_FUNC float chance(float x) const thread {
    return x == greatest ? 1.0f : metal::precise::exp(x - greatest);
  }

  METAL_FUNC ulong mass(float x) const thread {
    return ulong(chance(x) * scale);
  }
};

// A place or index, the weight of all tokens before it, and its own; a weight of 0: there is none.
struct Cut {
  uint place;
  ulong before, weight;
};

// Memory and threads of a threadgroup.
struct Group {
  threadgroup metal::atomic_uint *high, *low; // BINS each
  threadgroup ulong* sums; // 32
  threadgroup Cut* cut;
  int thread_id, threads;

  METAL_FUNC void clear(int bins) const thread {
    for (int i = thread_id; i < bins; i += threads) {
      metal::atomic_store_explicit(high + i, 0u, metal::memory_order_relaxed);
      metal::atomic_store_explicit(low + i, 0u, metal::memory_order_relaxed);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  METAL_FUNC void add(uint bin, ulong weight, int low_bits) const thread {
    const uint upper = uint(weight >> low_bits);
    if (upper > 0) {
      metal::atomic_fetch_add_explicit(high + bin, upper, metal::memory_order_relaxed);
    }
    metal::atomic_fetch_add_explicit(low + bin, uint(weight) & ((1u << low_bits) - 1), metal::memory_order_relaxed);
  }

  METAL_FUNC ulong weight_of(int bin, int low_bits) const thread {
    return (ulong(metal::atomic_load_explicit(high + bin, metal::memory_order_relaxed)) << low_bits) +
        metal::atomic_load_explicit(low + bin, metal::memory_order_relaxed);
  }

  METAL_FUNC uint greatest(uint own) const thread {
    clear(1);
    own = simd_max(own);
    if (thread_id % 32 == 0) {
      metal::atomic_fetch_max_explicit(low, own, metal::memory_order_relaxed);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    own = metal::atomic_load_explicit(low, metal::memory_order_relaxed);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    return own;
  }

  // Find the bin in which the weights, added to those before, reach `target`.
  METAL_FUNC Cut reached(Cut from, int shift, ulong target, int low_bits) const thread {
    const int lane = thread_id % 32, own = lane * (BINS / 32);
    ulong sum = 0;
    if (thread_id < 32) {
      for (int bin = own; bin < own + BINS / 32; bin++) {
        sum += weight_of(bin, low_bits);
      }
      sums[lane] = sum;
      *cut = {0, 0, 0};
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (thread_id < 32) {
      ulong before = from.before;
      for (int i = 0; i < lane; i++) {
        before += sums[i];
      }
      if (before < target && before + sum >= target) {
        int bin = own;
        while (before + weight_of(bin, low_bits) < target) {
          before += weight_of(bin++, low_bits);
        }
        *cut = {from.place + (uint(bin) << shift), before, weight_of(bin, low_bits)};
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const Cut found = *cut;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    return found;
  }
};

template <int LOW, typename T>
METAL_FUNC ulong mass_of(const device T* x, int size, Left<LOW> left, Group group) {
  ulong own = 0;
  for (int i = group.thread_id; i < size; i += group.threads) {
    const float value = x[i];
    own += left.holds(value, i) ? left.mass(value) : 0;
  }
  group.clear(1);
  group.add(0, own, left.low_bits);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const ulong mass = group.weight_of(0, left.low_bits);
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return mass;
}

// The first distance (INDEX: the first index of the distance `farthest`), at most `most`, at which the weights of the
// tokens left reach `target`: a radix select.
template <int WEIGHT, int LOW, typename Values>
METAL_FUNC Cut radix_select(Values x, int size, Left<LOW> left, uint most, ulong target, Group group) {
  Cut cut = {0, 0, 0};
  int shift = 32 - metal::clz(most);
  do {
    const int digit = metal::min(shift, DIGIT);
    shift -= digit;
    group.clear(BINS);
    for (int i = group.thread_id; i < size; i += group.threads) {
      const float value = x[i];
      const uint distance = left.distance(value);
      const uint at = WEIGHT == INDEX ? uint(i) : distance, bin = (at - cut.place) >> shift;
      if (at <= most && bin < 1u << digit && (WEIGHT != INDEX || distance == left.farthest) && left.holds(value, i)) {
        group.add(bin, WEIGHT == MASS ? left.mass(value) : 1, left.low_bits);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    cut = group.reached(cut, shift, target, left.low_bits);
  } while (shift > 0 && cut.weight > 0);
  return cut;
}

// Keep the n greatest of the tokens left, of equal ones the lowest indices. maxima: of each thread's logits; the n-th
// of them is a bound, so that few tokens are counted.
template <int LOW, typename T>
METAL_FUNC Left<LOW> first_of(
    const device T* x, int size, Left<LOW> left, int n, const threadgroup float* maxima, Group group) {
  uint most = metal::min(left.farthest, left.distance(-INFINITY));
  if (n <= group.threads && left.nearest == 0) {
    const Cut bound = radix_select<COUNT>(maxima, group.threads, left, most, n, group);
    most = bound.weight > 0 ? bound.place : most;
  }
  const Cut cut = radix_select<COUNT>(x, size, left, most, n, group);
  if (cut.weight > 0) {
    left.last = cut.place == left.farthest ? left.last : 0x7fffffff;
    left.farthest = cut.place;
    const ulong wanted = n - cut.before;
    left.last = wanted < cut.weight ? radix_select<INDEX>(x, size, left, size - 1, wanted, group).place : left.last;
  }
  return left;
}
