// Products of whole numbers in vectors, as encoders and decoders with packed weights add them up. The sums are exact.
#pragma once
#include "simd.h"

INLINE vi fill_int(int32_t x) { return x - vi{}; }

// sum + a.low * b.low + a.high * b.high in every lane; `a` holds one pair in all lanes.
INLINE vi multiply_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__) && defined(__clang__)
  // By name: clang makes a product and an addition of the intrinsic, which is sooner done once, and 1.4 times as slow in a tile.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#elif defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && defined(__clang__)
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return sum + (vi)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_FOURS 1
// sum + the four products of unsigned bytes of `a` with signed bytes of `b`
INLINE vi multiply_fours(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (vi)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#elif defined(__ARM_FEATURE_DOTPROD)
  // Both sides have signs here: a = (a - 128) + 64 + 64, and what is added for the two 64s is exact, too.
  const int8x16_t y = (int8x16_t)b, half = vdupq_n_s8(64);
  const int32x4_t shifted = vdotq_s32((int32x4_t)sum, vreinterpretq_s8_u8(veorq_u8((uint8x16_t)a, vdupq_n_u8(128))), y);
  return (vi)vdotq_s32(vdotq_s32(shifted, half, y), half, y);
#else
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#endif
}
#else
#define HAS_FOURS 0
INLINE vi multiply_fours(vi sum, vi, vi) { return sum; }
#endif
