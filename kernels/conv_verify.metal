// A causal depthwise convolution over rows that follow the first n rows of a tape, its SiLU, cut into q, k and v.
//
// Inputs:  before [1, taps-1+P, C]: the rows before and on the tape. accepted [1] int: n, from 0 to P
//          x [1, T, C] new rows. w [C, taps, 1]. key_dim int
// Outputs: q, k [1, T, key_dim], v [1, T, C - 2 key_dim]: silu(conv), by channels
//          rows [1, taps-1+T, C]: the rows before the new ones, and these
// Template: InT: the type of all of them.
// Grid (C, taps-1+T, 1), threadgroup (any, 1, 1): a thread for each value of `rows`, which knows its output.
//
// Sums are taken in float, from the oldest tap on, and rounded to InT, in which the SiLU is computed.

int C = x_shape[2], taps = w_shape[1], behind = taps - 1;
int n = clamp(int(accepted[0]), 0, before_shape[1] - behind);
int c = thread_position_in_grid.x, row = thread_position_in_grid.y, t = row - behind;

if (t < 0) {
  rows[row * C + c] = before[(n + row) * C + c];
  return;
}
InT newest = InT(0);
float sum = 0.0f;
for (int i = 0; i < taps; ++i) {
  int from = t + i;
  newest = from < behind ? before[(n + from) * C + c] : x[(from - behind) * C + c];
  sum += static_cast<float>(newest) * static_cast<float>(w[c * taps + i]);
}
rows[row * C + c] = newest;

InT value = static_cast<InT>(sum);
InT tail = InT(1) / (InT(1) + metal::precise::exp(metal::abs(value)));
InT sigmoid = value < InT(0) ? tail : InT(1) - tail;
InT out = value * sigmoid;

if (c < key_dim) {
  q[t * key_dim + c] = out;
} else if (c < 2 * key_dim) {
  k[t * key_dim + c - key_dim] = out;
} else {
  v[t * (C - 2 * key_dim) + c - 2 * key_dim] = out;
}
