// Products of whole numbers: 16-bit activations with 16-bit weights in pairs, or, where the processor has the instruction,
// 8-bit activations with 8-bit weights in fours. The sums are exact, so that order does not matter at all.
#pragma once
#include <cmath>

#include "products.h"

INLINE void store_short(int16_t* p, vi v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
#else
  typedef int16_t shorts __attribute__((vector_size(W * 2)));
  shorts s = __builtin_convertvector(v, shorts);
  memcpy(p, &s, sizeof s);
#endif
}
INLINE void store_byte(uint8_t* p, vi v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  typedef uint8_t bytes __attribute__((vector_size(W)));
  bytes b = __builtin_convertvector(v, bytes);
  memcpy(p, &b, sizeof b);
#endif
}

// t[m][n] = row_scale[m] * column_scale[n] * (sum over k of a[m][k] w[k][n]  -  zero[m] * column_sum[n])
// `a` has `stride` 32-bit words to a row, each a pair or four of activations; `b` is [words][NR] such words.
template <int M, bool FOURS>
INLINE void whole_tile(const int32_t* a, long stride, const int32_t* b, int words, const float* row_scale, const int32_t* zero,
                       const float* column_scale, const int32_t* column_sum, float* t) {
  vi sums[M][NV];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = vi{};
  constexpr int POINTERS = (M + 2) / 3;
  const int32_t* rows[POINTERS];
#pragma GCC unroll 4
  for (int i = 0; i < POINTERS; i++) rows[i] = a + 3 * i * stride;
#pragma GCC unroll AT_ONCE
  for (int k = 0; k < words; k++) {
    vi column[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) column[v] = load_int(b + v * W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vi x = fill_int(rows[m / 3][(m % 3) * stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++)
        sums[m][v] = FOURS ? multiply_fours(sums[m][v], x, column[v]) : multiply_pairs(sums[m][v], x, column[v]);
    }
    b += NR;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      vi total = FOURS ? sums[m][v] - load_int(column_sum + v * W) * zero[m] : sums[m][v];
      store(t + m * NR + v * W, to_float(total) * (load(column_scale + v * W) * row_scale[m]));
    }
}

template <int M, bool FOURS>
__attribute__((noinline)) void whole_tile_of(const int32_t* a, long stride, const int32_t* b, int words, const float* row_scale,
                                             const int32_t* zero, const float* column_scale, const int32_t* column_sum, float* t) {
  whole_tile<M, FOURS>(a, stride, b, words, row_scale, zero, column_scale, column_sum, t);
}

typedef void (*WholeTile)(const int32_t*, long, const int32_t*, int, const float*, const int32_t*, const float*, const int32_t*,
                          float*);
#define SIX(FOURS) \
  nullptr, whole_tile_of<1, FOURS>, whole_tile_of<2, FOURS>, nullptr, whole_tile_of<4, FOURS>, nullptr, whole_tile_of<6, FOURS>
#define TWELVE(FOURS) \
  SIX(FOURS), nullptr, whole_tile_of<8, FOURS>, nullptr, nullptr, nullptr, whole_tile_of<12, FOURS>
#if defined(__AVX512F__)
constexpr WholeTile PAIR_TILES[] = {TWELVE(false)};
#else
constexpr WholeTile PAIR_TILES[] = {SIX(false)};
#endif
#if defined(__AVX512VNNI__)
constexpr WholeTile FOUR_TILES[] = {TWELVE(true)};
#elif HAS_FOURS
constexpr WholeTile FOUR_TILES[] = {SIX(true)};
#else
constexpr const WholeTile* FOUR_TILES = PAIR_TILES;  // never reached
#endif

// --- activations ---------------------------------------------------------------------------------------------------

// Not-a-number and infinity have no whole number: the scale of such a row is not-a-number, and so is all that comes of it.

// A row as it is rounded: times `less`, where there is one.
INLINE vf scaled(const float* x, const float* less, int k) { return less ? load(x + k) * load(less + k) : load(x + k); }

// One row to 16 bits: q = round(y * most / |y|max) with y = x * less. Returns the scale. Beyond `inputs` it is zero.
INLINE float whole_row(const float* x, const float* less, int inputs, int padded, float most, int16_t* q) {
  vf top = vf{}, apart = vf{};
  int vectors = inputs / W * W;
  for (int k = 0; k < vectors; k += W) {
    vf y = scaled(x, less, k);
    top = vmax(top, vabs(y)), apart += y - y;  // 0, or not-a-number
  }
  float greatest = largest(top), strange = sum(apart);
  for (int k = vectors; k < inputs; k++) {
    float y = std::fabs(less ? x[k] * less[k] : x[k]);
    greatest = y > greatest ? y : greatest, strange += y - y;
  }
  float inverse = most / greatest;
  if (!(greatest > 0) || strange != 0 || !std::isfinite(inverse)) {
    memset(q, 0, padded * sizeof(int16_t));
    return strange != 0 ? NAN : 0.0f;  // so small that it counts as nothing, where it is finite
  }
  const vf magic = fill(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded number
  for (int k = 0; k < vectors; k += W) {
    vi whole = as_int(fma(scaled(x, less, k), fill(inverse), magic)) - as_int(magic);
    store_short(q + k, whole);
  }
  for (int k = vectors; k < inputs; k++) q[k] = int16_t(std::lrintf((less ? x[k] * less[k] : x[k]) * inverse));
  for (int k = inputs; k < padded; k++) q[k] = 0;
  return greatest / most;
}

// One row to 8 bits without sign: x * less = scale * (q - zero).
INLINE float byte_row(const float* x, const float* less, int inputs, int padded, uint8_t* q, int32_t* zero) {
  float low = 0, high = 0;
  int vectors = inputs / W * W;
  vf a = vf{}, b = vf{}, apart = vf{};
  for (int k = 0; k < vectors; k += W) {
    vf y = scaled(x, less, k);
    a = vmin(a, y), b = vmax(b, y), apart += y - y;
  }
  low = -largest(-a), high = largest(b);
  float strange = sum(apart);
  for (int k = vectors; k < inputs; k++) {
    float y = less ? x[k] * less[k] : x[k];
    low = y < low ? y : low, high = y > high ? y : high, strange += y - y;
  }
  float scale = (high - low) / 255.0f, inverse = 255.0f / (high - low);
  strange += scale - scale;  // two numbers so far apart that nothing counts the distance
  if (!(scale > 0) || strange != 0 || !std::isfinite(inverse)) {
    memset(q, 0, padded);
    *zero = 0;
    return strange != 0 ? NAN : 0.0f;
  }
  int shift = int(-low * inverse + 0.5f);
  *zero = shift;
  float half = float(shift) + 0.5f;
  for (int k = 0; k < vectors; k += W) {
    vf y = scaled(x, less, k);
    store_byte(q + k, to_int(vmin(vmax(fma(y, fill(inverse), fill(half)), vf{}), fill(255.0f))));
  }
  for (int k = vectors; k < inputs; k++) {
    float y = (less ? x[k] * less[k] : x[k]) * inverse + half;
    q[k] = uint8_t(y < 0 ? 0 : y > 255 ? 255 : y);
  }
  for (int k = inputs; k < padded; k++) q[k] = uint8_t(shift);  // zero; its weights are zero too
  return scale;
}
