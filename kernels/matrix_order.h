// One step of a Mac's matrix unit: eight products of operands of type T, added to a float.

#include <metal_simdgroup_matrix>

// Sums i = 0 to 7 are the diagonal of one step: c + sum over k of a[k] * b[k], of which a lane holds at most one value.
// sums: 17 numbers of each sum, a[8], b[8] and c. Writes the eight results to y.
template <typename T>
METAL_FUNC void eight_sums(const device float* sums, device float* y, int lane) {
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sum;
  for (int j = 0; j < 2; j++) {
    left.thread_elements()[j] = static_cast<T>(sums[17 * row + column + j]);
    right.thread_elements()[j] = static_cast<T>(sums[17 * (column + j) + 8 + row]);
    sum.thread_elements()[j] = sums[17 * row + 16];
  }
  simdgroup_multiply_accumulate(sum, left, right, sum);
  for (int j = 0; j < 2; j++) {
    if (row == column + j) {
      y[row] = sum.thread_elements()[j];
    }
  }
}
