/* half of CUDA on a CPU whose compiler knows _Float16. */
#pragma once
#include "cuda.h"

typedef _Float16 half;
typedef half __half;
struct alignas(4) half2 {
  half x, y;
  half2() = default;
  half2(half x, half y) : x(x), y(y) {}
};
typedef half2 __half2;
static inline half2 make_half2(half x, half y) { return {x, y}; }
static inline float __half2float(half x) { return x; }
static inline half __float2half(float x) { return x; }
static inline half __float2half_rn(float x) { return x; }
static inline bool __hgt(half a, half b) { return a > b; }
static inline bool __hlt(half a, half b) { return a < b; }
#define EMULATED_HALF(name, function) \
  static inline half name(half x) { return function(static_cast<float>(x)); }
EMULATED_HALF(hexp, expf)
EMULATED_HALF(hlog, logf)
EMULATED_HALF(hsqrt, sqrtf)
EMULATED_HALF(hrsqrt, rsqrtf)
EMULATED_HALF(htanh, tanhf)
EMULATED_HALF(herf, erff)
EMULATED_HALF(__habs, fabsf)
