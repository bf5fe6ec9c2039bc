// The gates of a gated-delta layer with the bits of MLX's elementwise kernels: every operation rounds to its type.

// log(1 + exp(x)), in the steps of a log-add-exp with 0.
// The compile options decide the precision of its exp and log, as in kernels that mx.compile makes.
template <typename T>
METAL_FUNC T softplus(T x) {
  if (metal::isnan(x)) {
    return metal::numeric_limits<T>::quiet_NaN();
  }
  const T most = metal::max(x, T(0)), least = metal::min(x, T(0));
  return most + log1p(metal::exp(least - most));
}

// exp(-exp(A_log) * softplus(step))
template <typename T>
METAL_FUNC float decay_of(float A_log, T step) {
  const float rate = -metal::precise::exp(A_log);
  const float exponent = rate * static_cast<float>(softplus(step));
  return metal::precise::exp(exponent);
}
