// Names of graphics and of matrices, so that a kernel that defines one of them is found; none of them can be used.
#pragma once

namespace metal {
enum class access;
enum class coord;
enum class address;
enum class filter;
enum class mip_filter;
enum class compare_func;
struct sampler;
struct command_buffer;
struct ray;
struct intersection_result;
struct acceleration_structure;
template <typename T>
struct intersector;
template <typename T>
struct visible_function_table;
template <typename T>
struct patch_control_point;
template <typename T>
struct interpolant;
template <typename T, int N>
struct array;
template <typename T>
struct array_ref;
template <typename T>
struct tensor;
template <typename T, int Cols, int Rows = Cols>
struct matrix;

#define DECLARED_TEXTURE(NAME) \
  template <typename T>        \
  struct NAME;
DECLARED_TEXTURE(texture1d)
DECLARED_TEXTURE(texture1d_array)
DECLARED_TEXTURE(texture2d)
DECLARED_TEXTURE(texture2d_array)
DECLARED_TEXTURE(texture2d_ms)
DECLARED_TEXTURE(texture3d)
DECLARED_TEXTURE(texturecube)
DECLARED_TEXTURE(texture_buffer)
DECLARED_TEXTURE(depth2d)

template <typename T, int N>
T determinant(matrix<T, N, N> x);
template <typename T, int Cols, int Rows>
matrix<T, Rows, Cols> transpose(matrix<T, Cols, Rows> x);
void discard_fragment();
float dfdx(float x);
float dfdy(float x);
float fwidth(float x);
}  // namespace metal

#define DECLARED_MATRICES(T)                                                                                    \
  typedef metal::matrix<T, 2> T##2x2;                                                                           \
  typedef metal::matrix<T, 3> T##3x3;                                                                           \
  typedef metal::matrix<T, 4> T##4x4;
DECLARED_MATRICES(float)
DECLARED_MATRICES(half)
