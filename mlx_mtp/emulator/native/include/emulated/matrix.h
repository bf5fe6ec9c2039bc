// simdgroup_matrix: an 8x8 matrix spread over the 32 lanes of a simdgroup, two neighbours of one row in each.
#pragma once
#include "simd.h"

namespace metal {
template <class T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix holds float, half or bfloat");
  using storage_type = vec<T, 2>;
  storage_type elements;

  simdgroup_matrix() {}
  EMULATED_INTERNAL explicit simdgroup_matrix(T diagonal);
  storage_type& thread_elements() { return elements; }
  const storage_type& thread_elements() const { return elements; }
};

namespace matrix {
// Apple's layout: lane l holds (row, col) and (row, col + 1).
inline ulong2 position(uint lane) {
  uint quad = lane / 4;
  return ulong2((quad & 2) * 2 + lane % 2 * 2, (quad & 4) + lane / 2 % 4);
}
EMULATED_INTERNAL inline ulong2 meet(const char* what, void* site) {
  auto lanes = collective::gather(SCOPE_SIMD, what, site, 0u);
  if (lanes.exchange->active != 0xffffffff) emulated_fault("a simdgroup_matrix needs all 32 lanes", site);
  return position(uint(lanes.self));
}
struct Fragment {
  float value[2];
};
EMULATED_INTERNAL inline void spread(const collective::Lanes<Fragment>& lanes, float (&full)[8][8]) {
  for (int lane = 0; lane < 32; ++lane) {
    ulong2 at = position(lane);
    Fragment f = lanes[lane];
    full[at.y][at.x] = f.value[0];
    full[at.y][at.x + 1] = f.value[1];
  }
}
enum Order {
  FORWARD,
  BACKWARD,
  PRODUCTS_FIRST,
  PAIRS,
  STRIDES,
  PAIRS_IN_TURN,
  HALVES,
  HALVES_BY_PAIRS,
  WIDE,
  TRUNCATED,
};
// The launch's options, which entry.cpp defines. fused: a product is not rounded before it is added to a sum.
extern const Order order;
extern const bool fused;

struct Product {
  float a, b;
  EMULATED_PLAIN double exact() const { return double(a) * double(b); }
  // No compiler fuses it with a sum, whatever its options: what comes out of the assembler is any number.
  EMULATED_PLAIN float rounded() const {
    float value = a * b;
    __asm__("" : "+m"(value));
    return value;
  }
  EMULATED_PLAIN double added() const { return fused ? exact() : double(rounded()); }
};
EMULATED_PLAIN inline float operator+(float sum, Product p) {
  return fused ? __builtin_fmaf(p.a, p.b, sum) : sum + p.rounded();
}
EMULATED_PLAIN inline float operator+(Product p, Product q) { return p.rounded() + q; }

// sum + p rounded toward zero.
EMULATED_PLAIN inline float truncated(float sum, Product p) {
  double x = sum, y = p.added(), near = x + y, of_y = near - x;
  double error = (x - (near - of_y)) + (y - of_y);  // near + error is the exact sum
  float found = float(near);
  bool beyond = found == near ? error != 0 && (error < 0) != (near < 0)
                              : __builtin_fabs(double(found)) > __builtin_fabs(near);
  return beyond ? as_type<float>(as_type<uint>(found) - 1) : found;
}
EMULATED_PLAIN inline float eight(float c, const Product (&p)[8]) {
  switch (order) {
    case FORWARD: return c + p[0] + p[1] + p[2] + p[3] + p[4] + p[5] + p[6] + p[7];
    case BACKWARD: return c + p[7] + p[6] + p[5] + p[4] + p[3] + p[2] + p[1] + p[0];
    case PRODUCTS_FIRST: return (p[0] + p[1] + p[2] + p[3] + p[4] + p[5] + p[6] + p[7]) + c;
    case PAIRS: return c + (((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])));
    case STRIDES: return c + (((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7])));
    case PAIRS_IN_TURN: return (((c + (p[0] + p[1])) + (p[2] + p[3])) + (p[4] + p[5])) + (p[6] + p[7]);
    case HALVES: return (c + (p[0] + p[1] + p[2] + p[3])) + (p[4] + p[5] + p[6] + p[7]);
    case HALVES_BY_PAIRS: return (c + ((p[0] + p[1]) + (p[2] + p[3]))) + ((p[4] + p[5]) + (p[6] + p[7]));
    case WIDE: {
      double sum = c;
      for (int k = 0; k < 8; ++k) sum += p[k].added();
      return float(sum);
    }
    case TRUNCATED: {
      for (int k = 0; k < 8; ++k) c = truncated(c, p[k]);
      return c;
    }
  }
}
// Rows and columns of A, B and C in float.
EMULATED_INTERNAL inline Fragment product(void* site, Fragment a, Fragment b, Fragment c) {
  ulong2 at = meet("simdgroup_multiply_accumulate", site);
  float left[8][8], right[8][8];
  spread(collective::gather(SCOPE_SIMD, "simdgroup_multiply_accumulate", site, a), left);
  spread(collective::gather(SCOPE_SIMD, "simdgroup_multiply_accumulate", site, b), right);
  for (int j = 0; j < 2; ++j) {
    Product products[8];
    for (int k = 0; k < 8; ++k) products[k] = {left[at.y][k], right[k][at.x + j]};
    c.value[j] = eight(c.value[j], products);
  }
  return c;
}
}  // namespace matrix

template <class T, int Cols, int Rows>
simdgroup_matrix<T, Cols, Rows>::simdgroup_matrix(T diagonal) {
  ulong2 at = matrix::meet("simdgroup_matrix", EMULATED_SITE);
  elements = storage_type(at.x == at.y ? diagonal : T(0), at.x + 1 == at.y ? diagonal : T(0));
}

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Cols = 8, int Rows = 8>
inline simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements = vec<T, 2>(x);
  return m;
}

// The loads and stores stay visible to the checks, each lane's own two elements.
template <class T, class U>
inline __attribute__((always_inline)) void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* from,
                                                          ulong row_elements = 8, ulong2 origin = 0,
                                                          bool transpose = false) {
  static_assert(is_same_v<T, remove_cv_t<U>>, "simdgroup_load needs memory of the matrix's type");
  ulong2 at = matrix::meet("simdgroup_load", emulated_here());
  for (int j = 0; j < 2; ++j)
    m.elements[j] = transpose ? from[(at.x + j + origin.y) * row_elements + at.y + origin.x]
                              : from[(at.y + origin.y) * row_elements + at.x + j + origin.x];
}
template <class T, class U>
inline __attribute__((always_inline)) void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, U* to,
                                                           ulong row_elements = 8, ulong2 origin = 0,
                                                           bool transpose = false) {
  static_assert(is_same_v<T, U>, "simdgroup_store needs memory of the matrix's type");
  ulong2 at = matrix::meet("simdgroup_store", emulated_here());
  for (int j = 0; j < 2; ++j)
    if (transpose)
      to[(at.x + j + origin.y) * row_elements + at.y + origin.x] = m.elements[j];
    else
      to[(at.y + origin.y) * row_elements + at.x + j + origin.x] = m.elements[j];
}

template <class D, class A, class B, class C>
EMULATED_INTERNAL void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                                     const simdgroup_matrix<B, 8, 8>& b,
                                                     const simdgroup_matrix<C, 8, 8>& c) {
  using matrix::Fragment;
  auto r = matrix::product(EMULATED_SITE, Fragment{{float(a.elements[0]), float(a.elements[1])}},
                           Fragment{{float(b.elements[0]), float(b.elements[1])}},
                           Fragment{{float(c.elements[0]), float(c.elements[1])}});
  d.elements = vec<D, 2>(static_cast<D>(r.value[0]), static_cast<D>(r.value[1]));
}
template <class D, class A, class B>
EMULATED_INTERNAL void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b) {
  using matrix::Fragment;
  auto r = matrix::product(EMULATED_SITE, Fragment{{float(a.elements[0]), float(a.elements[1])}},
                           Fragment{{float(b.elements[0]), float(b.elements[1])}}, Fragment{{0.0f, 0.0f}});
  d.elements = vec<D, 2>(static_cast<D>(r.value[0]), static_cast<D>(r.value[1]));
}
template <class A, class B>
EMULATED_INTERNAL simdgroup_matrix<A, 8, 8> operator*(const simdgroup_matrix<A, 8, 8>& a,
                                                      const simdgroup_matrix<B, 8, 8>& b) {
  using matrix::Fragment;
  auto r = matrix::product(EMULATED_SITE, Fragment{{float(a.elements[0]), float(a.elements[1])}},
                           Fragment{{float(b.elements[0]), float(b.elements[1])}}, Fragment{{0.0f, 0.0f}});
  simdgroup_matrix<A, 8, 8> d;
  d.elements = vec<A, 2>(static_cast<A>(r.value[0]), static_cast<A>(r.value[1]));
  return d;
}
}  // namespace metal
