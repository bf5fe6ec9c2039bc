// The gated delta rule on a slice of one row of a state, kept in registers.
//
// A row of Dk values is spread over lanes, `N` neighbouring values to each. CHAINS is the order of a sum over the
// row: 1: a lane's products one after the other, then the simdgroup's sum (the row has all 32 lanes);
// 8: chains of four products, whose sums meet in pairs, then lanes 1 and 2 apart (the row has 4 lanes of N = 32).

template <int CHAINS>
struct RowSum;

template <>
struct RowSum<1> {
  static float of(thread const float (&part)[1]) {
    return simd_sum(part[0]);
  }
};

template <>
struct RowSum<8> {
  static float of(thread const float (&part)[8]) {
    float low = (part[0] + part[1]) + (part[2] + part[3]);
    float high = (part[4] + part[5]) + (part[6] + part[7]);
    float sum = low + high;
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    return sum;
  }
};

// The product of the whole row of the state with `x`, in every lane of the row.
template <int CHAINS, int N, typename T>
float row_dot(thread const float (&state)[N], const device T* x) {
  constexpr int LENGTH = N / CHAINS;
  float part[CHAINS];
  for (int chain = 0; chain < CHAINS; ++chain) {
    float sum = 0.0f;
    for (int i = chain * LENGTH; i < (chain + 1) * LENGTH; ++i) {
      sum += state[i] * static_cast<float>(x[i]);
    }
    part[chain] = sum;
  }
  return RowSum<CHAINS>::of(part);
}

// state = gate * state; state += k * ((v - state . k) * beta). With GATES = 1 each value has its own gate, with 0 all
// have gate[0].
template <int CHAINS, int GATES, int N, typename T, typename Gate>
void delta_row(thread float (&state)[N], Gate gate, const device T* k, float v, float beta) {
  for (int i = 0; i < N; ++i) {
    state[i] = state[i] * static_cast<float>(gate[GATES * i]);
  }
  float delta = (v - row_dot<CHAINS>(state, k)) * beta;
  for (int i = 0; i < N; ++i) {
    state[i] = state[i] + static_cast<float>(k[i]) * delta;
  }
}

template <int N>
void store_row(device float* to, thread const float (&state)[N]) {
  for (int i = 0; i < N; ++i) {
    to[i] = state[i];
  }
}
