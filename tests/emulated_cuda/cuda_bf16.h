/* bfloat16 of CUDA on a CPU: computed in float, rounded to nearest even. */
#pragma once
#include "cuda.h"

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  template <typename T>
  nv_bfloat16(T value) {
    const float x = static_cast<float>(value);
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = std::isnan(x) ? 0x7fc0 : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
};
typedef nv_bfloat16 __nv_bfloat16;
struct alignas(4) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
typedef nv_bfloat162 __nv_bfloat162;
static inline float __bfloat162float(nv_bfloat16 x) { return x; }
static inline nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline bool __hgt(nv_bfloat16 a, nv_bfloat16 b) { return float(a) > float(b); }
static inline bool __hlt(nv_bfloat16 a, nv_bfloat16 b) { return float(a) < float(b); }
#define EMULATED_BFLOAT16(name, function) \
  static inline nv_bfloat16 name(nv_bfloat16 x) { return function(static_cast<float>(x)); }
EMULATED_BFLOAT16(hexp, expf)
EMULATED_BFLOAT16(hlog, logf)
EMULATED_BFLOAT16(hsqrt, sqrtf)
EMULATED_BFLOAT16(hrsqrt, rsqrtf)
EMULATED_BFLOAT16(__habs, fabsf)
