// The random numbers that mx.random makes of a key, one at a time: threefry-2x32 of 20 rounds (Salmon et al., 2011).

#include "unroll.h"

METAL_FUNC uint2 threefry(uint2 key, uint2 counter) {
  const uint keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
  const uint turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  uint a = counter.x + key.x, b = counter.y + key.y;
  UNROLL
  for (uint round = 0; round < 20; round++) {
    const uint turn = turns[round % 8];
    a += b;
    b = (b << turn | b >> (32 - turn)) ^ a;
    if (round % 4 == 3) {
      const uint block = round / 4 + 1;
      a += keys[block % 3];
      b += keys[(block + 1) % 3] + block;
    }
  }
  return uint2(a, b);
}

// Number i of the `count` that a key gives: each counter makes one of the first half and one of the second.
METAL_FUNC uint random_bits(uint2 key, uint i, uint count) {
  const uint half_count = (count + 1) / 2;
  if (i >= half_count) {
    return threefry(key, uint2(i - half_count, i)).y;
  }
  return threefry(key, uint2(i, i + half_count < count ? i + half_count : 0)).x;
}

// The first of the two keys that a key is split into.
METAL_FUNC uint2 first_half(uint2 key) {
  return uint2(threefry(key, uint2(0, 2)).x, threefry(key, uint2(1, 3)).x);
}

// The second of the two keys that a key is split into.
METAL_FUNC uint2 second_half(uint2 key) {
  return uint2(threefry(key, uint2(0, 2)).y, threefry(key, uint2(1, 3)).y);
}

// u in [0, 1), which the bits are 2^32 times.
METAL_FUNC float fraction(uint bits) {
  return min(float(bits) / 4294967296.0f, 0.999999940395355225f);
}

// -log(-log(u)) of the same u.
METAL_FUNC float gumbel(uint bits) {
  return -metal::precise::log(-metal::precise::log(fraction(bits)));
}

// A row's tile of logits as drawn from: divided by the temperature, with noise of its position's key. The product is
// rounded on its own: a fused sum would have other bits than the reference.
METAL_FUNC void add_noise(
    threadgroup float* tile, int size, int begin, int N, int lane, uint2 key, uint position, float inverse) {
  const uint2 dice = second_half(uint2(key.x, key.y + position));
  for (int i = lane; i < size; i += 32) {
    const float scaled = fma(tile[i], inverse, 0.0f);
    tile[i] = scaled + gumbel(random_bits(dice, begin + i, N));
  }
}
