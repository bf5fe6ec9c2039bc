// simdgroup_matrix: 8x8 values of a simdgroup, of which each thread has two.
#pragma once

namespace metal {
template <typename T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "a simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "a simdgroup_matrix holds float, half or bfloat");
  using storage_type = vec<T, 2>;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread storage_type& thread_elements() thread;
  storage_type elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Cols, int Rows = Cols>
simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T x);

#define DECLARED_MATRIX_MEMORY(SPACE)                                                                           \
  template <typename T, int Cols, int Rows>                                                                     \
  void simdgroup_load(thread simdgroup_matrix<T, Cols, Rows>& to, const SPACE T* from,                          \
                      ulong elements_per_row = Cols, ulong2 origin = 0, bool transpose = false);                \
  template <typename T, int Cols, int Rows>                                                                     \
  void simdgroup_store(thread simdgroup_matrix<T, Cols, Rows> from, SPACE T* to,                                \
                       ulong elements_per_row = Cols, ulong2 origin = 0, bool transpose = false);
DECLARED_MATRIX_MEMORY(device)
DECLARED_MATRIX_MEMORY(threadgroup)

template <typename D, typename A, typename B, typename C, int Cols, int Rows, int K>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, Cols, Rows>& d, thread simdgroup_matrix<A, K, Rows>& a,
                                   thread simdgroup_matrix<B, Cols, K>& b, thread simdgroup_matrix<C, Cols, Rows>& c);
template <typename D, typename A, typename B, int Cols, int Rows, int K>
void simdgroup_multiply(thread simdgroup_matrix<D, Cols, Rows>& d, thread simdgroup_matrix<A, K, Rows>& a,
                        thread simdgroup_matrix<B, Cols, K>& b);
template <typename A, typename B, int Cols, int Rows, int K>
simdgroup_matrix<A, Cols, Rows> operator*(simdgroup_matrix<A, K, Rows> a, simdgroup_matrix<B, Cols, K> b);
}  // namespace metal
