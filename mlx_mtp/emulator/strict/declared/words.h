// Metal's words by those of C++ for OpenCL, and OpenCL's own words as names, which they are in Metal.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private

#define global name_global
#define local name_local
#define generic name_generic
#define pipe name_pipe
#define read_only name_read_only
#define write_only name_write_only
#define read_write name_read_write
#define vec_step name_vec_step
#define event_t name_event_t
#define clk_event_t name_clk_event_t
#define queue_t name_queue_t
#define reserve_id_t name_reserve_id_t
#define sampler_t name_sampler_t
#define atomic_int name_atomic_int
#define atomic_uint name_atomic_uint
#define atomic_long name_atomic_long
#define atomic_ulong name_atomic_ulong
#define atomic_float name_atomic_float
#define atomic_flag name_atomic_flag

#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __METAL_MACOS__ 1
#define __HAVE_BFLOAT__ 1
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST static constexpr constant
