// What generated kernels are written with: vectors of floats as wide as the processor has them, loads and stores of every
// dtype, whole and cut short, and the functions of the graph on vectors and on single floats.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
typedef int64_t whole;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// --- single values ---------------------------------------------------------------------------------------------------
INLINE float get(const float* p) { return *p; }
INLINE float get(const double* p) { return (float)*p; }
INLINE float get(const bf16* p) {
  uint32_t wide = (uint32_t)p->bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
INLINE float get(const f16* p) {
#if defined(__F16C__)
  return _cvtsh_ss(p->bits);
#else
  uint32_t sign = (uint32_t)(p->bits >> 15) << 31, exponent = (p->bits >> 10) & 31, mantissa = p->bits & 1023, wide;
  if (exponent == 0) {
    float small = std::ldexp((float)mantissa, -24);
    return sign ? -small : small;
  }
  wide = sign | (exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13));
  float value;
  memcpy(&value, &wide, 4);
  return value;
#endif
}
INLINE whole get(const int8_t* p) { return *p; }
INLINE whole get(const int32_t* p) { return *p; }
INLINE whole get(const int64_t* p) { return *p; }
INLINE whole get(const bool* p) { return *p; }

INLINE uint16_t to_bf16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if (value != value) return (uint16_t)((wide >> 16) | 64);
  return (uint16_t)((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);  // to the nearest, ties to even
}
INLINE uint16_t to_f16(float value) {
#if defined(__F16C__)
  return _cvtss_sh(value, 0);
#else
  uint32_t wide;
  memcpy(&wide, &value, 4);
  uint32_t sign = (wide >> 16) & 0x8000;
  float size = std::fabs(value);
  if (value != value) return (uint16_t)(sign | 0x7e00);
  if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00);
  if (size < 6.103515625e-05f) return (uint16_t)(sign | (uint32_t)std::nearbyint(size * 16777216.0f));
  uint32_t rounded = (wide & 0x7fffffff) + 0xfff + ((wide >> 13) & 1);
  return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
#endif
}
INLINE void put(float* p, float v) { *p = v; }
INLINE void put(double* p, float v) { *p = v; }
INLINE void put(bf16* p, float v) { p->bits = to_bf16(v); }
INLINE void put(f16* p, float v) { p->bits = to_f16(v); }
INLINE void put(int8_t* p, whole v) { *p = (int8_t)v; }
INLINE void put(int32_t* p, whole v) { *p = (int32_t)v; }
INLINE void put(int64_t* p, whole v) { *p = v; }
INLINE void put(bool* p, whole v) { *p = v != 0; }

// --- vectors ---------------------------------------------------------------------------------------------------------
INLINE vf lanes(const float* p) { return load(p); }
INLINE vf lanes(const bf16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = get(p + i);
  return v;
#endif
}
INLINE vf lanes(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = get(p + i);
  return v;
#endif
}
INLINE vf lanes(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)p[i];
  return v;
#endif
}
template <typename T>
INLINE vf lanes(const T* p) {  // whole numbers, as floats
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)get(p + i);
  return v;
}
template <typename T>
INLINE vf lanes(const T* p, whole count) {  // the first `count`, then zeros
  vf v = {};
  for (whole i = 0; i < count; i++) v[i] = (float)get(p + i);
  return v;
}
template <typename T>
INLINE vf lanes_apart(const T* p, whole step, whole count) {
  vf v = {};
  for (whole i = 0; i < count; i++) v[i] = (float)get(p + i * step);
  return v;
}
INLINE vf counting(whole first, whole step) {
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)(first + i * step);
  return v;
}
INLINE void put_lanes(float* p, vf v) { store(p, v); }
INLINE void put_lanes(bf16* p, vf v) {
  const vi wide = as_int(v), odd = (wide >> 16) & 1, rounded = (wide + 0x7fff + odd) >> 16, strange = (wide >> 16) | 64;
  typedef uint16_t narrow __attribute__((vector_size(2 * W)));
  const narrow bits = __builtin_convertvector(v != v ? strange : rounded, narrow);
  memcpy(p, &bits, sizeof bits);
}
#if defined(__AVX512F__)
INLINE void put_lanes(f16* p, vf v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0)); }
#elif defined(__AVX2__)
INLINE void put_lanes(f16* p, vf v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0)); }
#endif
template <typename T>
INLINE void put_lanes(T* p, vf v) {
  for (int i = 0; i < W; i++) put(p + i, v[i]);
}
template <typename T>
INLINE void put_lanes(T* p, vf v, whole count) {
  for (whole i = 0; i < count; i++) put(p + i, v[i]);
}
template <typename T>
INLINE void put_apart(T* p, whole step, vf v, whole count) {
  for (whole i = 0; i < count; i++) put(p + i * step, v[i]);
}
INLINE vf wide(vf v) { return v; }
INLINE vf wide(float v) { return fill(v); }

// A sum with one more product: one instruction where there is one, and never a call of the C library's fmaf.
template <class A, class B> INLINE vf plus_product(vf s, A a, B b) { return fma(wide(a), wide(b), s); }
INLINE float plus_product(float s, float a, float b) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, s);
#else
  return s + a * b;
#endif
}

// --- functions, on vectors and on floats. A comparison gives 1 or 0, so that bools are numbers like all others. ---------
#define EACH_LANE(name, call)                       \
  INLINE float name(float x) { return call(x); }    \
  INLINE vf name(vf x) {                            \
    for (int i = 0; i < W; i++) x[i] = call(x[i]);  \
    return x;                                       \
  }
EACH_LANE(g_log, std::log)
EACH_LANE(g_sin, std::sin)
EACH_LANE(g_cos, std::cos)
EACH_LANE(g_erf, std::erf)
EACH_LANE(g_floor, std::floor)
EACH_LANE(g_trunc, std::trunc)
EACH_LANE(g_log1p, std::log1p)
EACH_LANE(g_expm1, std::expm1)
INLINE vf g_pow(vf x, vf y) {
  for (int i = 0; i < W; i++) x[i] = std::pow(x[i], y[i]);
  return x;
}
INLINE float g_pow(float x, float y) { return std::pow(x, y); }

INLINE vf choose(vi mask, vf a, vf b) { return as_float((mask & as_int(a)) | (~mask & as_int(b))); }
INLINE vf g_exp(vf x) {  // vexp where that holds, its square of one half beyond; NaN is kept
  vf e = vexp(x), half = vexp(0.5f * x);
  e = choose(vabs(x) > fill(87.0f), half * half, e);
  return choose(x != x, x, e);
}
INLINE float g_exp(float x) { return std::exp(x); }
// Whole numbers as floats: -0.5 becomes 0, and what is not in [-end, end) becomes -end, as processors have it.
INLINE vf g_whole(vf x, float end) { return choose((x >= -end) & (x < end), g_trunc(x) + 0.0f, fill(-end)); }
INLINE vf g_sqrt(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < W; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
INLINE float g_sqrt(float x) { return std::sqrt(x); }
template <typename V> INLINE V g_rsqrt(V x) { return 1.0f / g_sqrt(x); }
template <typename V> INLINE V g_square(V x) { return x * x; }
template <typename V> INLINE V g_reciprocal(V x) { return 1.0f / x; }
template <typename V> INLINE V g_neg(V x) { return -x; }
INLINE vf g_abs(vf x) { return vabs(x); }
INLINE float g_abs(float x) { return std::fabs(x); }
INLINE whole g_abs(whole x) { return x < 0 ? -x : x; }
INLINE vf g_sigmoid(vf x) { return 1.0f / (1.0f + g_exp(-x)); }
INLINE float g_sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
template <typename V> INLINE V g_silu(V x) { return x * g_sigmoid(x); }
INLINE vf g_gelu(vf x) { return gelu(x); }
INLINE float g_gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); }
template <typename V> INLINE V g_gelu_tanh(V x) { return x * g_sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
INLINE float g_tanh(float x) { return std::tanh(x); }
INLINE vf g_tanh(vf x) {  // near zero by its series, so that the relative error stays small
  vf s = x * x;
  vf near = x * (1.0f + s * (-0.3333333333f + s * (0.1333333333f + s * (-0.0539682540f + s * 0.0218694885f))));
  vf far = 1.0f - 2.0f / (g_exp(2.0f * vabs(x)) + 1.0f);
  far = choose(x < fill(0.0f), -far, far);
  return choose(vabs(x) < fill(0.3f), near, far);
}
// The larger one; not a number if either is not.
INLINE vf g_maximum(vf a, vf b) { return choose(a != a, a, choose(b != b, b, choose(a > b, a, b))); }
INLINE float g_maximum(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
INLINE whole g_maximum(whole a, whole b) { return a > b ? a : b; }
INLINE vf g_minimum(vf a, vf b) { return -g_maximum(-a, -b); }
INLINE float g_minimum(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
INLINE whole g_minimum(whole a, whole b) { return a < b ? a : b; }
// The largest lane; not a number if one of them is not, which `largest` passes over.
INLINE float g_largest(vf v) {
  const float none = largest(choose(v != v, fill(1.0f), fill(0.0f))), top = largest(v);
  return none > 0.0f ? std::numeric_limits<float>::quiet_NaN() : top;
}
template <typename V> INLINE V g_relu(V x) { return g_maximum(x, V{}); }
