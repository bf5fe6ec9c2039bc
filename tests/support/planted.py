"""Small kernels with one error each that Metal's front end reports, and ones that look alike and have none.

A kernel has inputs a [64] of T in device memory, b [4] int32 in the constant space and s, a float, and an output `out` of
T; its template is T and N = 3. In a helper `T` is written as bfloat.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.emulator.texts import LaunchText, collected

BUFFERS = [f"x{i}" for i in range(14)]


class Plant(NamedTuple):
    """A kernel's header and body, what the finding says, and the line of the kernel's text where it stands."""

    header: str
    body: str
    message: str = ""
    T: mx.Dtype = mx.bfloat16
    atomic: bool = False
    more: int = 0  # inputs besides, whose shapes the body names

    @property
    def text(self) -> LaunchText:
        """What MLX generates of it."""
        names = ["a", "b", "s", *BUFFERS[: self.more]]
        shapes = "".join(f"// {name}_shape\n" for name in names[3:])
        inputs = [mx.zeros(64, self.T), mx.zeros(4, mx.int32), mx.array(1.0), *[mx.zeros((8, 8))] * self.more]
        with collected() as found:
            kernel = mx.fast.metal_kernel(
                name="probe",
                input_names=names,
                output_names=["out"],
                source=f"uint i = thread_position_in_grid.x;\n{shapes}{self.body}\n",
                header=self.header and f"{self.header}\n",
                atomic_outputs=self.atomic,
            )
            kernel(
                inputs=inputs,
                template=[("T", self.T), ("N", 3)],
                grid=(64, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(64,)],
                output_dtypes=[mx.uint32 if self.atomic else self.T],
            )
        (launch,) = found
        return launch


def half(body: str, message: str) -> Plant:
    return Plant("", body, message, T=mx.float16)


def atomic(body: str, message: str = "") -> Plant:
    return Plant("", body, message, atomic=True)


FIRST = "METAL_FUNC float first({} x) {{ return x[0]; }}"
NO_SPACE = "has no address space"
PASSED = "cannot pass pointer to address space|no known conversion from"
KEYS = "template <typename L> struct K { L list; };"
TO_DOUBLE = "to 'double'$"
TO_BFLOAT = "to .*__bf16"
HELPER = "METAL_FUNC float f(float x) { threadgroup float z[4]; z[0] = x; return z[1]; }"
OURS_TOO = "is a name of Metal's library"

# What the check is for, and the variants of each that differ in how they are found.
REQUIRED = {
    "threadgroup pointer as device": Plant(
        FIRST.format("const device float*"), "threadgroup float z[8]; out[i] = T(first(z));", PASSED
    ),
    "threadgroup pointer as device, assigned": Plant("", "threadgroup T z[8]; device T* p = out; p = z;", "assigning"),
    "thread pointer as device": Plant(
        FIRST.format("const device float*"), "float z[2] = {}; out[i] = T(first(z));", PASSED
    ),
    "device pointer as threadgroup": Plant(
        FIRST.format("const threadgroup bfloat*"), "out[i] = T(first(a));", "address space 'device'"
    ),
    "constant pointer as device": Plant(FIRST.format("const device int*"), "out[i] = T(first(b));", PASSED),
    "device value as thread reference": Plant(
        "METAL_FUNC void add(thread bfloat& x) { x = x + bfloat(1.0f); }", "add(out[i]);", "cannot bind reference"
    ),
    "device value as thread reference of a template": Plant(
        "template <typename U> METAL_FUNC void add(thread U& x) { x = x + U(1); }", "add(out[i]);", "no matching"
    ),
    "helper's pointer without a space, to device": Plant(
        FIRST.format("const bfloat*"), "out[i] = T(first(a));", NO_SPACE
    ),
    "helper's pointer without a space, to thread": Plant(
        FIRST.format("float*"), "float z[2] = {}; out[i] = T(first(z));", NO_SPACE
    ),
    "helper's pointer without a space, of a template": Plant(
        "template <typename U> U first(const U* x) { return x[0]; }", "out[i] = first(a);", NO_SPACE
    ),
    "helper's reference without a space": Plant(
        "METAL_FUNC float f(const float& x) { return x; }", "float z = 1; out[i] = T(f(z));", NO_SPACE
    ),
    "decltype of a local as a field": Plant(
        KEYS, "const auto l = b + 1; const K<decltype(l)> k{l}; out[i] = T(k.list[0]);", "field may not be qualified"
    ),
    "decltype of a variable as a field": Plant(
        KEYS, "auto l = a + 1; K<decltype(l)> k{l}; out[i] = k.list[0];", "field may not be qualified"
    ),
    "threadgroup variable in a helper": Plant(HELPER, "out[i] = T(f(s));", "threadgroup address space"),
    "threadgroup variable in a helper, behind a macro": Plant(
        "#define SHARED threadgroup float\n" + HELPER.replace("threadgroup float", "SHARED"),
        "out[i] = T(f(s));",
        "threadgroup address space",
    ),
    "threadgroup variable in a template": Plant(
        "template <int M> float f(float x) { threadgroup float z[M]; z[0] = x; return z[1]; }",
        "out[i] = T(f<4>(s));",
        "threadgroup address space",
    ),
    "double literal times bfloat": Plant("", "out[i] = T(a[i] * 0.5);", TO_DOUBLE),
    "double literal times half": half("out[i] = a[i] * 0.5;", TO_DOUBLE),
    "double literal plus half": half("out[i] = a[i] + 1e-5;", TO_DOUBLE),
    "double literal compared with bfloat": Plant("", "out[i] = a[i] > 0.5 ? a[i] : T(0);", TO_DOUBLE),
    "double literal in a template": Plant(
        "template <typename U> U half_of(U x) { return x * 0.5; }", "out[i] = half_of(a[i]);", TO_DOUBLE
    ),
    "double literal for a bfloat": Plant("", "T x = 0.5; out[i] = x;", TO_BFLOAT),
    "name of the library, of equal arguments": Plant(
        "METAL_FUNC float exp(float x) { return x; }", "out[i] = T(exp(s));", "ambiguous"
    ),
    "name of the library, never called": Plant("METAL_FUNC float mix(float x) { return x; }", "", OURS_TOO),
    "name of the library, a template": Plant(
        "template <typename U> METAL_FUNC U max(U x, U y) { return x > y ? x : y; }", "out[i] = max(a[i], a[0]);", OURS_TOO
    ),
    "name of the library, a type": Plant("struct vec { float x; };", "", OURS_TOO),
    "name of the library, a macro": Plant("#define select(x, y) x", "", OURS_TOO),
    "name of MLX's preamble": Plant("inline float log1p(float x) { return x; }", "", "redefinition of 'log1p'"),
    "type of MLX's preamble": Plant("struct Limits { int x; };", "", "redefinition of 'Limits'"),
    "constant of MLX's preamble": Plant("constant int REDUCE_N_READS = 8;", "", "redefinition"),
    "typedef of MLX's preamble": Plant("typedef float bfloat16_t;", "", "redefinition"),
    "lambda that captures all": Plant("", "float x = s; auto f = [&](float y) { return x + y; }; out[i] = T(f(1.0f));", "captures"),
    "lambda that captures a copy": Plant("", "float x = s; auto f = [x] { return x; }; out[i] = T(f());", "captures"),
    "lambda that captures, as an argument": Plant(
        "template <typename F> METAL_FUNC float call(F f) { return f(1.0f); }",
        "float x = s; out[i] = T(call([=](float y) { return x + y; }));",
        "captures",
    ),
    "recursion": Plant("METAL_FUNC int f(int n) { return n < 2 ? 1 : n * f(n - 1); }", "out[i] = T(f(b[0]));", "calls itself"),
    "recursion that nothing calls": Plant("METAL_FUNC int f(int n) { return n < 2 ? 1 : n * f(n - 1); }", "", "calls itself"),
    "recursion of a template": Plant(
        "template <typename U> U f(U n) { return n < 2 ? U(1) : n * f(n - 1); }", "out[i] = T(f(b[0]));", "calls itself"
    ),
    "recursion of a method": Plant(
        "struct R { int go(int n) const thread { return n == 0 ? 0 : go(n - 1); } };",
        "R r; out[i] = T(r.go(b[0]));",
        "go calls itself",
    ),
    "recursion of two": Plant(
        "int even(int n);\nint odd(int n) { return n && even(n - 1); }\nint even(int n) { return n == 0 || odd(n - 1); }",
        "out[i] = T(even(b[0]));",
        "odd calls itself",
    ),
    "too much threadgroup memory": Plant("", "threadgroup float z[8193]; out[i] = T(z[0]);", "32768 bytes.*'32784 <="),
    "too much threadgroup memory in all": Plant(
        "", "threadgroup float z[8000];\nthreadgroup T y[N * 135]; out[i] = T(z[0]) + y[0];", "'32816 <="
    ),
    "too much threadgroup memory in blocks": Plant(
        "",
        "if (i == 0) { threadgroup float z[5000]; out[i] = T(z[0]); } else { threadgroup T y[9999]; out[i] = y[1]; }",
        "'40000 <=",
    ),
    "too much threadgroup memory of structs": Plant(
        "struct P { float x[100]; };", "threadgroup P z[82]; out[i] = T(z[0].x[0]);", "32768 bytes"
    ),
    "more than 31 buffers": Plant("", "out[i] = a[i];", "32 buffers", more=14),
}  # fmt: skip

MORE = {
    # address spaces
    "constant reference as thread": Plant("METAL_FUNC void f(thread float& x) { x = 1; }", "f(s);", "no matching"),
    "device value as const thread reference": Plant("METAL_FUNC float f(thread const bfloat& x) { return x; }", "out[i] = T(f(a[i]));", "cannot bind"),
    "device struct as thread reference": Plant("struct P { float x; };\nMETAL_FUNC float f(const thread P& p) { return p.x; }", "out[i] = T(f(*(const device P*)a));", "cannot bind"),
    "device pointer as constant": Plant(FIRST.format("const constant bfloat*"), "out[i] = T(first(a));", PASSED),
    "thread pointer to threadgroup": Plant("", "threadgroup float z[4]; thread float* p = z;", "cannot initialize"),
    "threadgroup pointer to thread": Plant("", "float z[4]; threadgroup float* p = z;", "cannot initialize"),
    "device pointer in a thread field": Plant("struct F { thread float* p; };", "F f; f.p = (device float*)out;", "changes address space"),
    "pointer of another space returned": Plant("thread float* f(device float* x) { return x; }", "f((device float*)out);", "cannot initialize return"),
    "pointers of two spaces in ?:": Plant("", "threadgroup T z[4]; out[i] = (b[0] ? a : z)[0];", "incompatible operand"),
    "cast to another space": Plant("", "out[i] = T(((thread float*)a)[0]);", "mismatching address spaces"),
    "cast to no space": Plant("", "out[i] = T(*reinterpret_cast<const float*>(a));", NO_SPACE),
    "local pointer without a space": Plant("", "float z[2] = {}; float* p = z; out[i] = T(p[0]);", NO_SPACE),
    "local reference without a space": Plant("", "float z[2] = {}; auto& p = z[0]; out[i] = T(p);", NO_SPACE),
    "array reference without a space": Plant("METAL_FUNC float f(float (&x)[2]) { return x[0]; }", "float z[2] = {}; out[i] = T(f(z));", NO_SPACE),
    "field pointer without a space": Plant("struct F { float* p; };", "float z[2] = {}; F f = {z};", NO_SPACE),
    "pointer to a pointer": Plant("METAL_FUNC float f(const device float** x) { return x[0][0]; }", "", NO_SPACE),
    "function pointer": Plant("METAL_FUNC float f(float x) { return x; }", "float (*g)(float) = f;", NO_SPACE),
    "method without a space": Plant("struct Q { float v; float get() const { return v; } };", "Q q = {s}; out[i] = T(q.get());", NO_SPACE),
    "thread method of a device object": Plant("struct Q { float v; float get() const thread { return v; } };", "out[i] = T(((const device Q*)a)->get());", "'this' argument"),
    "string": Plant("", 'const thread char* x = "abc";', "cannot initialize"),
    # inputs are const, numbers are references
    "input written": Plant("", "a[i] = T(0);", "read-only"),
    "constant input written": Plant("", "b[0] = 1;", "read-only"),
    "number written": Plant("", "s = 1.0f;", "const-qualified"),
    "input as a pointer that is not const": Plant("METAL_FUNC void f(device bfloat* x) { x[0] = bfloat(1); }", "f(a);", "lose const"),
    "number indexed": Plant("", "out[i] = T(s[0]);", "subscripted value"),
    # variables outside of functions, and static ones
    "static variable": Plant("", "static int n = 0; out[i] = T(n);", "constant address space"),
    "static constexpr variable": Plant("", "static constexpr int n = 4; out[i] = T(n);", "constant address space"),
    "variable outside": Plant("float table[2] = {1, 2};", "out[i] = T(table[0]);", "constant address space"),
    "constexpr outside": Plant("constexpr int K = 4;", "out[i] = T(K);", "constant address space"),
    "static member": Plant("struct G { static constexpr int K = 4; };", "out[i] = T(G::K);", "constant address space"),
    "threadgroup variable outside": Plant("threadgroup float z[4];", "out[i] = T(z[0]);", "constant address space"),
    "device variable outside": Plant("device float z[4];", "out[i] = T(z[0]);", "constant address space"),
    "threadgroup variable with a value": Plant("", "threadgroup float z = 1.0f; out[i] = T(z);", "threadgroup address space"),
    # C++ that Metal lacks
    "goto": Plant("", "goto end; end: out[i] = a[i];", "no goto"),
    "new": Plant("", "thread int* p = new int;", "no new"),
    "throw": Plant("", "throw 1;", "no exceptions"),
    "virtual": Plant("struct V { virtual int f() thread { return 1; } };", "", "no virtual"),
    "typeid": Plant("", "typeid(i);", "no typeid"),
    "asm": Plant("", 'asm("nop");', "no inline assembly"),
    "double": Plant("", "double x = 1; out[i] = T(x);", "no double"),
    "array of a size at run time": Plant("", "int n = b[0]; float z[n];", "not a constant expression"),
    "narrowing": Plant("", "int x{1.5f}; out[i] = T(x);", "cannot be narrowed"),
    # numbers
    "float to bfloat": Plant("", "out[i] = s;", TO_BFLOAT),
    "float literal to bfloat": Plant("", "T x = 0.0f; out[i] = x;", TO_BFLOAT),
    "infinity to bfloat": Plant("", "T x = -INFINITY; out[i] = x;", TO_BFLOAT),
    "float product to bfloat": Plant("", "out[i] = a[i] * 2.0f;", TO_BFLOAT),
    "float added to bfloat": Plant("", "T x = a[i]; x += s;", TO_BFLOAT),
    "float returned as bfloat": Plant("template <typename U> U f(float x) { return x; }", "out[i] = f<T>(s);", TO_BFLOAT),
    "float argument of bfloat": Plant("METAL_FUNC bfloat f(bfloat x) { return x; }", "out[i] = f(s);", TO_BFLOAT),
    "half to bfloat": Plant("", "half h = half(s); out[i] = h;", "incompatible type"),
    "bfloat to half": Plant("", "half h = a[i];", "cannot initialize"),
    "as_type of another size": Plant("", "out[i] = T(as_type<float>(a[i]));", "one size"),
    # the library
    "int and uint": Plant("", "out[i] = T(max(int(i), i));", "ambiguous"),
    "float and int": Plant("", "out[i] = T(min(s, 1));", "ambiguous"),
    "64 and 32 bits": Plant("", "size_t n = 3; out[i] = T(min(n, 4));", "ambiguous"),
    "square root of an int": Plant("", "out[i] = T(sqrt(i));", "ambiguous"),
    "sum of 64 bits": Plant("", "out[i] = T(simd_sum(long(i)));", "ambiguous"),
    "bits of a float": Plant("", "out[i] = T(simd_and(s));", "ambiguous"),
    "sum of a struct": Plant("struct P { float x; };", "P p = {s}; p = simd_sum(p);", "no matching"),
    "no simd function": Plant("", "out[i] = T(simd_mean(s));", "undeclared"),
    "no erf": Plant("", "out[i] = T(erf(s));", "undeclared"),
    "no std": Plant("", "out[i] = T(std::max(s, 1.0f));", "undeclared"),
    "no expf": Plant("", "out[i] = T(expf(s));", "undeclared"),
    "too few arguments": Plant("", "out[i] = T(clamp(s, 0.0f));", "requires 3 arguments"),
    "shuffle without a lane": Plant("", "out[i] = T(simd_shuffle(s));", "requires 2 arguments"),
    "barrier without flags": Plant("", "threadgroup_barrier();", "no arguments"),
    "flags without their name": Plant("", "threadgroup_barrier(mem_threadgroup);", "undeclared"),
    "exponent in device memory": Plant("", "out[i] = T(frexp(s, *(device int*)out));", "cannot bind"),
    "OpenCL's function": Plant("", "out[i] = T(get_global_id(0));", "undeclared"),
    "OpenCL's barrier": Plant("", "barrier(mem_flags::mem_threadgroup);", "undeclared"),
    "OpenCL's cast": Plant("", "out[i] = T(as_float(i));", "undeclared"),
    "OpenCL's component": Plant("", "float4 v = float4(s); out[i] = T(v.s0);", "no component s0"),
    "vertex": Plant("", "int vertex = 1; out[i] = T(vertex);", "word of Metal's"),
    "kernel": Plant("", "int kernel = 1; out[i] = T(kernel);", "expected"),
    "thread": Plant("", "int thread = 1; out[i] = T(thread);", "expected"),
    "shape of no input": Plant("", "out[i] = T(c_shape[0]);", "undeclared"),
    "attribute of no name": Plant("", "out[i] = T(simd_lane_id);", "undeclared"),
    # vectors and matrices
    "vector of another type": Plant("", "half4 h = half4(0.0h); float4 v = h;", "cannot initialize"),
    "vector of too few": Plant("", "float3 v = float3(1.0f, 2.0f);", "as many as it has elements"),
    "vector of too many": Plant("", "float2 v = float2(1.0f, 2.0f, 3.0f);", "as many as it has elements"),
    "vector of eight": Plant("", "float8 v;", "unknown type name"),
    "component of no vector": Plant("", "float2 v = float2(s); out[i] = T(v.z);", "exceeds type"),
    "component as a reference": Plant("METAL_FUNC void f(thread float& x) { x = 1; }", "float2 v = float2(s); f(v.x);", "vector element"),
    "vector as a condition": Plant("", "bool4 m = float4(s) < 1.0f; if (m) out[i] = a[i];", "contextually convertible"),
    "matrix of another size": Plant("", "simdgroup_matrix<float, 4, 4> m;", "is 8x8"),
    "matrix of ints": Plant("", "simdgroup_matrix<int, 8, 8> m;", "float, half or bfloat"),
    "matrix indexed": Plant("", "simdgroup_matrix<float, 8, 8> m; out[i] = T(m[0][0]);", "subscript"),
    "matrix of another type": Plant("", "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, a, 8);", "no matching"),
    "matrix into an input": Plant("", "simdgroup_matrix<bfloat, 8, 8> m; simdgroup_store(m, a, 8);", "no matching"),
    # atomics
    "atomic without a function": atomic("out[0] += 1u;", "no viable"),
    "atomic function of no atomic": Plant("", "atomic_fetch_add_explicit((device uint*)out, 1u, memory_order_relaxed);", "no matching"),
    "atomic of another order": atomic("atomic_fetch_add_explicit(&out[0], 1u, memory_order_seq_cst);", "undeclared"),
    "atomic without an order": atomic("atomic_fetch_add_explicit(&out[0], 1u);", "requires 3 arguments"),
    "atomic of no explicit order": atomic("atomic_fetch_add(&out[0], 1u);", "undeclared"),
    "atomic of a thread": atomic("atomic_uint n; atomic_store_explicit(&n, 0, memory_order_relaxed);", "no matching"),
    "atomic of another space": atomic("threadgroup atomic_uint* f = &out[0];", "cannot initialize"),
    "atomic maximum of floats": Plant("", "atomic_fetch_max_explicit((device atomic_float*)out, 1.0f, memory_order_relaxed);", "no matching"),
    "atomic half": Plant("", "threadgroup atomic<half> h; (void)h;", "atomics are of"),
    # syntax
    "no semicolon": Plant("", "out[i] = a[i]", "expected ';'"),
    "no brace": Plant("", "if (i > 0) { out[i] = a[i];", "expected"),
    "no return type": Plant("f(float x) { return x; }", "", "type specifier"),
}  # fmt: skip

CLEAN = {
    "pointers of each space": Plant(
        "float f(const device float* x, thread float& y, threadgroup float* z, const constant int* n) { return x[0] + z[0]; }",
        "threadgroup float z[8]; float y = 0; z[i] = s; out[i] = T(f((const device float*)a, y, z, b));",
    ),
    "helper of any space": Plant("template <typename P> auto f(P x) { return x[0]; }", "out[i] = T(f(a) + T(f(b)));"),
    "structs copied": Plant(
        "struct P { int x; float y; };",
        "P p = {1, 2.0f}, q = p; threadgroup P r[4]; r[0] = q; P t = r[1]; device P* d = (device P*)out; d[0] = t; "
        "P u = d[1]; constant P& c = *(constant P*)b; P v = c; P w[2]; w[1] = c; w[0] = {3, 4.0f}; "
        "out[i] = T(u.y + v.x + w[1].x + w[0].y);",
    ),
    "type of a parameter as a field": Plant(
        KEYS + "\ntemplate <typename L> METAL_FUNC K<L> of(L list) { return {list}; }",
        "const auto k = of(b + 1); const auto l = a + 1; auto m = of(l); out[i] = T(k.list[0]) + m.list[0];",
    ),
    "vectors": Plant(
        "",
        "float4 v = float4(1.0f, 2.0f, float2(3.0f)); vec<T, 4> w = vec<T, 4>(a[0], a[1], a[2], a[3]); float4 x = float4(w);"
        "half4 h = half4(x); x.xy = v.zw; bool4 m = x < v; x = select(x, v, m); if (any(m)) { x += 1.0f; } uint2 q(i, 2);"
        "using V = vec<T, 2>; V y = V(a[0], a[1]); out[i] = T(dot(x, v) + h.x + q.y) + y.x; int3 run(0, 0, N); run.z = 1;",
    ),
    "matrices": Plant(
        "#include <metal_simdgroup_matrix>",
        "simdgroup_matrix<float, 8, 8> m(0.0f), n; simdgroup_load(n, (const device float*)a, 8);"
        "simdgroup_multiply_accumulate(m, n, n, m); m.thread_elements()[0] = 1.0f; simdgroup_store(m, (device float*)out, 8);",
    ),
    "atomics": atomic(
        "atomic_fetch_add_explicit(&out[0], 1u, memory_order_relaxed); threadgroup atomic_uint n;"
        "atomic_store_explicit(&n, 0, memory_order_relaxed);"
    ),
    "collectives": Plant(
        "",
        "float x = simd_sum(float(a[i])); x += simd_shuffle_xor(x, 1) + quad_max(x); T y = simd_max(a[i]); out[i] = T(x) + y;"
        "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); bool z = simd_any(i > 3) || simd_all(z);",
    ),
    "bfloat": Plant(
        "",
        "T x = T(0.5f) + a[i] * T(2); x += a[0]; half h = half(s); float f = a[i] * 0.5f; x = static_cast<T>(h) + T(h) + T(f);"
        "x = a[0] > a[1] ? x : T(0); out[i] = max(x, a[1]) + metal::abs(x) + Limits<T>::max;",
    ),
    "half": half("half x = a[i] * 0.5f; x += s; out[i] = x * 2.0h + half(1) + s;", ""),
    "templates that call themselves with less": Plant(
        "template <int M> float f(float x) { if constexpr (M == 0) { return x; } else { return f<M - 1>(x * 2); } }",
        "out[i] = T(f<4>(s));",
    ),
    "overloads": Plant("float f(float x) { return x; }\nfloat f(int x) { return f(float(x)); }", "out[i] = T(f(2));"),
    "methods": Plant(
        "struct Q { float v; METAL_FUNC float get(int j) const thread { return v + j; } Q(float x) thread : v(x) {}\n"
        "  static float twice(float x) { return 2 * x; } };",
        "Q q(1.0f); Q r = Q(2.0f); out[i] = T(q.get(1) + r.get(0) + Q::twice(s));",
    ),
    "lambda that captures nothing": Plant("", "auto f = [](float x) { return x; }; float z[2]; z[0] = s; out[i] = T(f(z[0]));"),
    "constants": Plant(
        "constant float table[2] = {1.0f, 2.0f};\nstatic constant constexpr int K = 4;\n"
        "template <int M> struct G { static constant constexpr int J = M; };",
        "constexpr int L = G<3>::J; out[i] = T(table[0] + K + L);",
    ),
    "branches of other types": Plant(
        "template <typename U> float f(U x) { return x.nothing; }", "if constexpr (N == 3) { out[i] = a[i]; } else { out[i] = T(f(a[i])); }"
    ),
    "threadgroup memory at its limit": Plant("", "threadgroup float z[4096], y[2][2048]; z[i] = 0; out[i] = T(z[0] + y[1][0]);"),
    "31 buffers": Plant("", "out[i] = a[i];", more=13),
    "MLX's functions": Plant("", "out[i] = T(ceildiv(int(i), 3)) + T(elem_to_loc(i, x0_shape, x0_strides, x0_ndim));", more=1),
    "names that are OpenCL's": Plant("", "int local = 1, global = 2, generic = 3, pipe = 4; out[i] = T(local + global + generic + pipe);"),
    "locals that hide functions": Plant("", "float step = 1, dot = 2; int size = 3; out[i] = T(step + dot + size);"),
}  # fmt: skip
