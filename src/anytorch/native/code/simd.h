// Vectors of floats as wide as the processor has them, and the few functions an encoder needs on them.
//
// Written with the vector extensions of GCC and Clang, so that the same code is SSE2, AVX2, AVX-512 or NEON. Every function
// computes each lane alone and in a fixed order: what a row gives never depends on the rows beside it.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

constexpr int W = VECTOR_BYTES / 4;  // floats in a vector
typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));

// A tile of the matrix product: MR rows by NR columns, held in registers. 32 registers hold 24 sums, 16 hold 12.
#if defined(__AVX512F__)
constexpr int MR = 12, NR = 32;
#elif defined(__AVX2__)
constexpr int MR = 6, NR = 16;
#elif defined(__aarch64__)
constexpr int MR = 6, NR = 16;
#else
constexpr int MR = 6, NR = 8;
#endif
constexpr int NV = NR / W;  // vectors across a tile

// Steps along a tile's sums that are written out one after the other. Clang would load the inputs of both before it adds up any,
// and then has no register left for some of the sums: 1.4 to 1.9 times as slow.
#if defined(__clang__)
constexpr int AT_ONCE = 1;
#else
constexpr int AT_ONCE = 2;
#endif

// Rows of the next tile when `left` rows are to be done: few sizes, so that there is little code to compile.
inline int tile_rows(int left) {
  return left >= MR ? MR : left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

#define INLINE inline __attribute__((always_inline))

INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vi load_int(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE vf fill(float x) { return x - vf{}; }
INLINE vi as_int(vf v) { return (vi)v; }
INLINE vf as_float(vi v) { return (vf)v; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi to_int(vf v) { return __builtin_convertvector(v, vi); }  // towards zero

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
INLINE vf vabs(vf a) { return as_float(as_int(a) & 0x7fffffff); }

// The lanes from `left` on replaced by `other`; `left` may be beyond the vector on either side.
INLINE vf keep_first(vf v, int left, vf other) {
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return lane < left ? v : other;
}
// Across the lanes, by halves: the same tree everywhere.
INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
INLINE float largest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
  float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}

// W rows become W columns. Interleaving the first half of the rows with the second, log2(W) times, transposes.
INLINE void transpose(vf* rows) {
  vi low, high;
  for (int i = 0; i < W; i++) {
    low[i] = i / 2 + (i % 2 ? W : 0);
    high[i] = W / 2 + i / 2 + (i % 2 ? W : 0);
  }
  for (int stage = 1; stage < W; stage *= 2) {
    vf next[W];
    for (int i = 0; i < W / 2; i++) {
#if defined(__clang__)
      for (int j = 0; j < W; j++) {
        next[2 * i][j] = rows[i + j % 2 * (W / 2)][j / 2];
        next[2 * i + 1][j] = rows[i + j % 2 * (W / 2)][W / 2 + j / 2];
      }
#else
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + W / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + W / 2], high);
#endif
    }
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
}

// The sums across W vectors, one in each lane: by halves, as `sum` has it.
INLINE vf sums_of(vf* rows) {
  vi low, high;
  for (int i = 0; i < W; i++) {
    low[i] = i / 2 + (i % 2 ? W : 0);
    high[i] = W / 2 + i / 2 + (i % 2 ? W : 0);
  }
  for (int left = W / 2; left > 0; left /= 2)
    for (int i = 0; i < left; i++) {
#if defined(__clang__)
      vf first, second;
      for (int j = 0; j < W; j++) {
        first[j] = rows[i + j % 2 * left][j / 2];
        second[j] = rows[i + j % 2 * left][W / 2 + j / 2];
      }
      rows[i] = first + second;
#else
      rows[i] = __builtin_shuffle(rows[i], rows[i + left], low) + __builtin_shuffle(rows[i], rows[i + left], high);
#endif
    }
  return rows[0];
}

// e^x for x in [-87, 88]; below, a number that is as good as nothing. 2^n times a polynomial on half a power of two either
// side, our own fit with a relative error of 1.05e-7.
INLINE vf vexp(vf x) {
  x = vmin(vmax(x, fill(-87.0f)), fill(88.0f));
  const vf magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  vf shifted = fma(x, fill(1.44269504088896341f), magic);
  vf n = shifted - magic;
  vf r = fma(n, fill(-0.693145751953125f), x);
  r = fma(n, fill(-1.42860682030941723e-6f), r);
  vf p = fill(8.312501466e-03f);
  p = fma(p, r, fill(4.189033235e-02f));
  p = fma(p, r, fill(1.666711539e-01f));
  p = fma(p, r, fill(4.999923030e-01f));
  p = fma(p, r, fill(1.0f));
  p = fma(p, r, fill(1.0f));
  return as_float(as_int(p) + (as_int(shifted) << 23));
}

// x * Phi(x), the GELU by the error function: Phi(x) - 1/2 = x P(x^2) / Q(x^2) on |x| <= 5.6, our own fit, error 1e-8.
// Below -5.6 it is zero, where x * Phi(x) is more than -6e-8: the error of Phi must not be multiplied by a huge x.
INLINE vf gelu(vf x) {
  vf c = vmin(vmax(x, fill(-5.6f)), fill(5.6f));
  vf u = c * c;
  vf p = fill(2.21448434e-08f);
  p = fma(p, u, fill(6.35654168e-06f));
  p = fma(p, u, fill(1.73855106e-04f));
  p = fma(p, u, fill(4.70728600e-03f));
  p = fma(p, u, fill(3.43765561e-02f));
  p = fma(p, u, fill(3.98942222e-01f));
  vf q = fill(1.18019894e-06f);
  q = fma(q, u, fill(7.51032138e-05f));
  q = fma(q, u, fill(1.91300320e-03f));
  q = fma(q, u, fill(2.89403422e-02f));
  q = fma(q, u, fill(2.52834961e-01f));
  q = fma(q, u, fill(1.0f));
  vi low = x < fill(-5.6f);  // a NaN is not, and stays
  return x * as_float(~low & as_int(fma(c, p / q, fill(0.5f))));
}
INLINE vf silu(vf x) { return x / (1.0f + vexp(-x)); }
INLINE vf gelu_tanh(vf x) {  // x / (1 + e^(-2y)), y = sqrt(2/pi) (x + 0.044715 x^3)
  vf y = 1.5957691216057308f * fma(x * x * x, fill(0.044715f), x);
  return x / (1.0f + vexp(-y));
}
