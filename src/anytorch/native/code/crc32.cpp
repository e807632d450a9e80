// CRC-32 as zlib has it (polynomial 0x04C11DB7, reflected), at the speed of memory: by carry-less products on x86, by the
// processor's own instruction on arm64. Where there is neither, `crc32_is_fast` says so and zlib does it.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define FAST __attribute__((target("pclmul,sse4.1")))

// Asked of the processor itself: __builtin_cpu_supports needs a table that not every compiler's runtime has (zig's has none).
struct Processor {
  bool fast = false, wide = false;
  Processor() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    fast = (c >> 1 & 1) && (c >> 19 & 1);  // PCLMULQDQ, SSE4.1
    if (!(c >> 27 & 1)) return;            // OSXSAVE: else nobody can say which registers the system keeps
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool keeps_wide = (low & 0xe6) == 0xe6;
    wide = keeps_wide && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 16 & 1) && (c >> 10 & 1);  // AVX512F, VPCLMULQDQ
  }
};
static const Processor processor;
static bool is_fast() { return processor.fast; }

FAST static inline __m128i load(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// `x` moved on by the distance that `k` stands for, and added to `next`.
FAST static inline __m128i fold(__m128i x, __m128i k, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

FAST static uint32_t finish(__m128i a, const uint8_t* p, size_t n);

#if __GNUC__ >= 10 || __clang_major__ >= 8  // GCC 9 has no _mm512_zextsi128_si512
#define WIDE __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))
static bool is_wide() { return processor.wide; }

WIDE static inline __m512i fold(__m512i x, __m512i k, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next, 0x96);
}

// The same with four times as wide vectors, for 256 bytes or more.
WIDE static uint32_t wide_blocks(uint32_t value, const uint8_t* p, size_t n) {
  const __m512i by_four = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
  const __m512i by_one = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
  __m512i x[4];
  for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(p + 64 * i);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(value))));
  for (p += 256, n -= 256; n >= 256; p += 256, n -= 256)
    for (int i = 0; i < 4; i++) x[i] = fold(x[i], by_four, _mm512_loadu_si512(p + 64 * i));
  __m512i one = fold(fold(fold(x[0], by_one, x[1]), by_one, x[2]), by_one, x[3]);
  for (; n >= 64; p += 64, n -= 64) one = fold(one, by_one, _mm512_loadu_si512(p));
  const __m128i k = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i a = _mm512_castsi512_si128(one);
  a = fold(a, k, _mm512_extracti32x4_epi32(one, 1));
  a = fold(a, k, _mm512_extracti32x4_epi32(one, 2));
  return finish(fold(a, k, _mm512_extracti32x4_epi32(one, 3)), p, n);
}
#else
static bool is_wide() { return false; }
static uint32_t wide_blocks(uint32_t value, const uint8_t*, size_t) { return value; }
#endif

// The inner value over n bytes: 64 or more, and a multiple of 16. "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ" (Gopal and others, 2009): remainders of x^(4·128±32), x^(128±32) and x^64, then Barrett's reduction.
FAST static uint32_t blocks(uint32_t value, const uint8_t* p, size_t n) {
  if (n >= 256 && is_wide()) return wide_blocks(value, p, n);
  const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i a = _mm_xor_si128(load(p), _mm_cvtsi32_si128(int(value))), b = load(p + 16), c = load(p + 32), d = load(p + 48);
  for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
    a = fold(a, by_four, load(p));
    b = fold(b, by_four, load(p + 16));
    c = fold(c, by_four, load(p + 32));
    d = fold(d, by_four, load(p + 48));
  }
  return finish(fold(fold(fold(a, by_one, b), by_one, c), by_one, d), p, n);
}

// What is left of n bytes, a multiple of 16, and the remainder of it all.
FAST static uint32_t finish(__m128i a, const uint8_t* p, size_t n) {
  const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  for (; n >= 16; p += 16, n -= 16) a = fold(a, by_one, load(p));
  const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_one, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), _mm_cvtsi64_si128(0x0163cd6124), 0x00));
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i t = _mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10);
  t = _mm_clmulepi64_si128(_mm_and_si128(t, low), barrett, 0x00);
  return uint32_t(_mm_extract_epi32(_mm_xor_si128(a, t), 1));
}
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_CRC32) || defined(__linux__))
#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
static bool is_fast() { return true; }
static inline uint32_t next(uint32_t value, uint64_t word) { return __crc32d(value, word); }
#else  // Linux' baseline is ARMv8.0, where it is optional: the kernel says whether this processor has it
#include <sys/auxv.h>
static bool is_fast() { return getauxval(AT_HWCAP) & (1 << 7); }  // HWCAP_CRC32 of <asm/hwcap.h>
// In assembly, because arm_acle.h of older compilers has no __crc32d where no flag asks for it.
static inline uint32_t next(uint32_t value, uint64_t word) {
  __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(value) : "r"(word));
  return value;
}
#endif
static uint32_t blocks(uint32_t value, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    value = next(value, word);
  }
  return value;
}
#else
static bool is_fast() { return false; }
static uint32_t blocks(uint32_t value, const uint8_t*, size_t) { return value; }
#endif

static uint32_t bytes(uint32_t value, const uint8_t* p, size_t n) {
  for (; n; p++, n--) {
    value ^= *p;
    for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ (0xEDB88320u & (0u - (value & 1)));
  }
  return value;
}

API int crc32_is_fast() { return is_fast(); }

// zlib's crc32(value, data, n).
API uint32_t crc32_of(uint32_t value, const uint8_t* data, int64_t n) {
  size_t whole = is_fast() && n >= 64 ? size_t(n) / 16 * 16 : 0;
  value = ~value;
  if (whole) value = blocks(value, data, whole);
  return ~bytes(value, data + whole, size_t(n) - whole);
}

// The sum of every `part` bytes; of the last, shorter part, too.
API void crc32_parts(const uint8_t* data, int64_t n, int64_t part, uint32_t* sums) {
  for (int64_t at = 0; at < n; at += part) *sums++ = crc32_of(0, data + at, n - at < part ? n - at : part);
}
