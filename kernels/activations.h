// Activations with the bits of MLX's elementwise kernels: every operation rounds to T.

template <typename T>
METAL_FUNC T sigmoid(T x) {
  // Metal has precise::exp for float only.
  const T power = static_cast<T>(metal::precise::exp(static_cast<float>(metal::abs(x))));
  const T tail = static_cast<T>(1 / (1 + power));
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

// silu(gate) * up, silu(gate) at most `limit` and up between -limit and limit; infinity leaves both as they are.
template <typename T>
METAL_FUNC T swiglu(T gate, T up, T limit) {
  T rate = sigmoid(gate);
  T open = gate * rate;
  return at_most(open, limit) * at_most(at_least(up, T(-limit)), limit);
}
