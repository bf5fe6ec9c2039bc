// In the place of MLX's file of this name, whose overloads differ in address spaces only.
#pragma once
#include <metal_stdlib>

namespace metal {
template <class T>
struct is_empty : bool_constant<__is_empty(T)> {};
template <class T>
constexpr bool is_empty_v = __is_empty(T);
template <class...>
struct make_void {
  using type = void;
};
template <class... T>
using void_t = typename make_void<T...>::type;
template <class T>
struct is_static : bool_constant<__is_empty(T)> {};
template <class T>
struct pointer_element {};
template <class T>
struct pointer_element<T*> {
  using type = remove_cv_t<T>;
};
template <class T>
using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
