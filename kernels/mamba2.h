// Mamba2's recurrence on N neighbouring values of a row of a state, kept in registers.

// state = decay * state + x * dt * B, the terms in the order in which compilers that fuse products and sums fuse the same
// product as in mlx-lm's kernel.
template <int N, typename T>
void mamba2_row(thread float (&state)[N], float decay, float dt, float x, const device T* B, int64_t stride) {
  for (int i = 0; i < N; i++) {
    const float added = x * dt * static_cast<float>(B[i * stride]);
    state[i] = added + decay * state[i];
  }
}
