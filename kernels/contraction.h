// Multiply-adds of kernels that repeat MLX's own sums. A compiler may round a product before it adds it, or fuse the two, and
// MLX's library may be compiled in another way than these kernels. The host defines CONTRACTION as one of:
//
// AS_COMPILED   the compiler chooses; the bits are MLX's where it does the same in MLX's library
// SEPARATE      a product is rounded before it is added, as with -ffp-contract=off
// FUSED         a product and a sum in one expression are fused, as with -ffp-contract=on
// FUSED_ACROSS  those in different statements are fused, too, as with -ffp-contract=fast

constant constexpr int AS_COMPILED = 0;
constant constexpr int SEPARATE = 1;
constant constexpr int FUSED = 2;
constant constexpr int FUSED_ACROSS = 3;

// a * b, rounded, to be added to something. Compilers may ignore `#pragma clang fp contract(off)` (clang does so with
// -ffp-contract=fast), but none fuses fma(a, b, 0). It makes a product of -0 into 0, which changes no sum that begins at 0.
template <typename V>
METAL_FUNC V rounded_product(V a, V b) {
  return fma(a, b, V(0.0f));
}

template <typename V>
METAL_FUNC V multiply_add(V a, V b, V c) {
  return CONTRACTION == SEPARATE ? rounded_product(a, b) + c : fma(a, b, c);
}

// a * b + c and, for c, a * b; of floats or vectors of them.
#define MULTIPLY_ADD(a, b, c) (CONTRACTION == AS_COMPILED ? (a) * (b) + (c) : multiply_add(a, b, c))
#define PRODUCT(a, b) (CONTRACTION == AS_COMPILED ? (a) * (b) : rounded_product(a, b))
