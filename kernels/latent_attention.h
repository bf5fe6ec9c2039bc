// Matrices of 8 x 8 floats that a simdgroup multiplies: each lane holds two neighbours of one row.

#include "unroll.h"

typedef simdgroup_matrix<float, 8, 8> Fragment;

// The row, and the first of the two columns, that a lane holds.
struct Place {
  int row;
  int column;
};

inline Place place_of(uint lane) {
  const uint quad = lane / 4;
  return {int((quad & 4) + lane / 2 % 4), int((quad & 2) * 2 + lane % 2 * 2)};
}

inline void set(thread Fragment& to, float2 pair) {
  to.thread_elements()[0] = pair.x;
  to.thread_elements()[1] = pair.y;
}

// Device memory is read value by value: a slice of a larger array may begin at any of them.
template <typename T>
float2 device_pair(const device T* from) {
  return float2(static_cast<float>(from[0]), static_cast<float>(from[1]));
}

template <typename T>
float2 staged_pair(const threadgroup T* from) {
  const vec<T, 2> pair = *reinterpret_cast<const threadgroup vec<T, 2>*>(from);
  return float2(static_cast<float>(pair.x), static_cast<float>(pair.y));
}

// The keys that rows attend to: all before `end`, or those up to `last` in a list of `end` slots.
template <bool CHOSEN, typename List>
struct Keys {
  List list;
  int end, last;

  // The slot of a key, -1 if there is none.
  METAL_FUNC int slot(int key) const thread {
    const int found = key >= end ? -1 : CHOSEN ? int(list[key]) : key;
    return CHOSEN && found > last ? -1 : found;
  }
};

// The type of a parameter has no address space of its own; `decltype` of a variable would have one, which no field may have.
template <bool CHOSEN, typename List>
METAL_FUNC Keys<CHOSEN, List> keys_of(List list, int end, int last) {
  return {list, end, last};
}

// Four neighbours of a row of `width` in a slot, zeros of none: other slots may hold anything.
template <typename T>
vec<T, 4> row_quad(const device T* rows, int width, int slot, int column) {
  if (slot < 0) {
    return vec<T, 4>(T(0));
  }
  const device T* from = rows + size_t(slot) * width + column;
  return vec<T, 4>(from[0], from[1], from[2], from[3]);
}

// Where a tile [D, KEYS] holds a key's d-th value; keys change places, in pairs, so that writes meet few banks twice.
template <int KEYS>
int key_place(int d, int key) {
  return d * KEYS + (key ^ (d / 4 * 2 % KEYS));
}

// Where a tile [keys, WIDTH] holds a value; blocks of eight change places, so that a column of keys meets many banks.
template <int WIDTH>
int value_place(int key, int column) {
  return key * WIDTH + ((column / 8 ^ key) % (WIDTH / 8) * 8 + column % 8);
}

// Puts KEYS rows of D values that begin at `first` on the tile, transposed.
template <typename T, int D, int KEYS, typename Slots>
void stage_keys(
    threadgroup T* tile, const device T* rows, int first, thread const Slots& keys, int thread_index, int threads) {
  for (int i = 4 * thread_index; i < KEYS * D; i += 4 * threads) {
    const int key = i / D, d = i % D;
    const vec<T, 4> values = row_quad(rows, D, keys.slot(first + key), d);
    UNROLL
    for (int j = 0; j < 4; ++j) {
      tile[key_place<KEYS>(d + j, key)] = values[j];
    }
  }
}

// scores += q keys: rows of q [R, D], eight to a fragment, times a tile [D, KEYS], d ascending.
template <typename T, int D, int KEYS, int FRAGMENTS>
void add_scores(
    thread Fragment (&scores)[FRAGMENTS][KEYS / 8],
    const device T* q,
    thread const int (&rows)[FRAGMENTS],
    const threadgroup T* tile,
    Place at) {
  for (int d = 0; d < D; d += 8) {
    Fragment keys[KEYS / 8];
    UNROLL
    for (int k = 0; k < KEYS / 8; ++k) {
      set(keys[k], staged_pair(tile + key_place<KEYS>(d + at.row, 8 * k + at.column)));
    }
    UNROLL
    for (int f = 0; f < FRAGMENTS; ++f) {
      Fragment query;
      set(query, device_pair(q + size_t(rows[f]) * D + d + at.column));
      UNROLL
      for (int k = 0; k < KEYS / 8; ++k) {
        simdgroup_multiply_accumulate(scores[f][k], query, keys[k], scores[f][k]);
      }
    }
  }
}

// Of the lanes that share a fragment's row: the largest value, the sum.
inline float row_max(float value) {
  value = max(value, simd_shuffle_xor(value, 1));
  return max(value, simd_shuffle_xor(value, 8));
}

inline float row_sum(float value) {
  value += simd_shuffle_xor(value, 1);
  return value + simd_shuffle_xor(value, 8);
}
