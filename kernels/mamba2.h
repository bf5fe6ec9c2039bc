// Mamba2's recurrence on N neighbouring values of a row of a state, kept in registers.

// state = decay * state + x * dt * B. Of two products a compiler that fuses takes the first; in mlx-lm's kernel clang
// reorders them by where their values come from, so that for T of 32 bits it is the other one than for 16.
template <int N, typename T>
void mamba2_row(thread float (&state)[N], float decay, float dt, float x, const device T* B, int64_t stride) {
  for (int i = 0; i < N; i++) {
    const float added = x * dt * static_cast<float>(B[i * stride]);
    state[i] = sizeof(T) == 4 ? added + decay * state[i] : decay * state[i] + added;
  }
}
