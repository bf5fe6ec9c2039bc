// Activations with the bits of MLX's elementwise kernels: every operation rounds to T.

template <typename T>
METAL_FUNC T sigmoid(T x) {
  auto tail = 1 / (1 + metal::precise::exp(metal::abs(x)));
  return x < 0 ? tail : 1 - tail;
}

// A NaN stays one.
template <typename T>
METAL_FUNC T at_most(T x, T limit) {
  return metal::isnan(x) || x < limit ? x : limit;
}

template <typename T>
METAL_FUNC T at_least(T x, T limit) {
  return metal::isnan(x) || x > limit ? x : limit;
}

// silu(gate) * up; CLAMPED: silu(gate) at most `limit`, up between -limit and limit.
template <typename T, bool CLAMPED>
METAL_FUNC T swiglu(T gate, T up, T limit) {
  T rate = sigmoid(gate);
  T open = gate * rate;
  if (CLAMPED) {
    open = at_most(open, limit);
    up = at_most(at_least(up, T(-limit)), limit);
  }
  return open * up;
}
