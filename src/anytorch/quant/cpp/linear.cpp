// y = x·Wᵀ + b with W packed in 8, 4 or 2 bits.
//
// A row of x becomes 16-bit integers with one scale per row; a packed weight is a small integer (a table turns codes into
// it). Their products are added up exactly in 32 bits within one group of columns, and the group's float scale is applied
// to the sum. Integer sums have no order, and the few float operations come in the same order in both kernels below, so a
// row's result is the same bits whatever stands beside it in the batch, and whichever kernel computed it.
//
//   dot    columns in the lanes, 8 weight rows at a time: reads packed bytes once, for a few rows of x
//   panel  weight rows in the lanes: unpacks a panel of rows once, then uses it for many rows of x
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 in its own avx512fintrin.h, bug 105593

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Weight {  // mirrored by kernels/cpp.py
    const uint8_t *codes;
    const void *scale;          // rows × stored groups
    const void *offset;         // the same, or null
    const float *scale_values;  // of the 256 bytes, for scale_kind 2
    const int16_t *table;       // 2^bits integers; null for 8 bits
    const float *values;        // 2^bits floats: the exact values, for `unpack`; null for 8 bits
    int64_t rows, columns, row_bytes;
    int64_t stored_groups;  // per row
    int64_t group;          // columns whose products are added up before a scale is applied
    int64_t group_size;     // columns that share a stored scale; 0: all
    int32_t bits, scale_kind;  // 0 float32, 1 float16, 2 byte
    int32_t x_top;             // largest integer an input may become
    float unit;                // what one integer step is worth, before scale
    float tensor_scale;
};

// torch's own OpenMP, whose functions kernels/cpp.py finds and gives us: so the same threads compute, whichever compiler built
// this file and wherever it did. A second OpenMP would fight the first for the cores, and pragmas tie a library to the OpenMP
// of its compiler. Without it, one thread computes.
struct OpenMP {  // mirrored by kernels/cpp.py
    int (*max_threads)();    // omp_get_max_threads
    int (*thread_number)();  // omp_get_thread_num
    int (*team_size)();      // omp_get_num_threads
    void (*barrier)();       // GOMP_barrier
    void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);  // GOMP_parallel
};

namespace {

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = uint32_t(bits >> 15) << 31, exponent = (bits >> 10) & 31, mantissa = bits & 1023, whole;
    if (exponent == 0) {
        float small = std::ldexp(float(mantissa), -24);
        return sign ? -small : small;
    }
    whole = sign | (exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13));
    float value;
    std::memcpy(&value, &whole, 4);
    return value;
#endif
}

inline float stored(const Weight &w, const void *values, int64_t index) {
    switch (w.scale_kind) {
        case 0: return static_cast<const float *>(values)[index];
        case 1: return half_to_float(static_cast<const uint16_t *>(values)[index]);
        default: return w.scale_values[static_cast<const uint8_t *>(values)[index]];
    }
}

// `count` stored scales (or offsets) times a factor, as floats.
void read_scales(const Weight &w, const void *values, int64_t start, int64_t count, float factor, float *out) {
    int64_t g = 0;
#if defined(__AVX2__)
    const __m256 wide = _mm256_set1_ps(factor);
    for (; g + 8 <= count; g += 8) {
        __m256 eight;
        if (w.scale_kind == 0) {
            eight = _mm256_loadu_ps(static_cast<const float *>(values) + start + g);
        } else if (w.scale_kind == 1) {
            const auto *from = reinterpret_cast<const __m128i *>(static_cast<const uint16_t *>(values) + start + g);
            eight = _mm256_cvtph_ps(_mm_loadu_si128(from));
        } else {
            const auto *from = reinterpret_cast<const __m128i *>(static_cast<const uint8_t *>(values) + start + g);
            eight = _mm256_i32gather_ps(w.scale_values, _mm256_cvtepu8_epi32(_mm_loadl_epi64(from)), 4);
        }
        _mm256_storeu_ps(out + g, _mm256_mul_ps(eight, wide));
    }
#endif
    for (; g < count; g++) out[g] = stored(w, values, start + g) * factor;
}

// What one integer step of a row is worth in each stored group, and the group's offset.
void row_scales(const Weight &w, int64_t row, float *scale, float *offset) {
    read_scales(w, w.scale, row * w.stored_groups, w.stored_groups, w.tensor_scale * w.unit, scale);
    if (w.offset) read_scales(w, w.offset, row * w.stored_groups, w.stored_groups, w.tensor_scale, offset);
}

inline int64_t stored_group(const Weight &w, int64_t g) { return w.group_size == 0 ? 0 : g * w.group / w.group_size; }

struct Sizes {
    int64_t padded;  // columns of the integer matrices: whole blocks of every kernel, filled with zeros
    int64_t groups;  // sums per row
};

inline Sizes sizes(const Weight &w) {
    const int64_t padded = round_up(w.columns, std::max<int64_t>(w.group, 128));
    return {padded, (w.columns + w.group - 1) / w.group};
}

// groups × width floats from `width` rows of `stride` floats, one per stored group: the lanes of both kernels are rows.
void across_rows(const Weight &w, const Sizes &size, const float *rows, int64_t stride, int64_t width, float *out) {
    int64_t g = 0;
#if defined(__AVX2__)
    if (w.group_size != 0)
        for (; g + 8 <= size.groups; g += 8)
            for (int64_t r = 0; r < width; r += 8) {
                __m256 a[8], t[8];
                for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows + (r + i) * stride + g);
                for (int i = 0; i < 4; i++) {
                    t[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
                    t[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
                }
                for (int i = 0; i < 2; i++) {
                    a[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
                    a[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
                    a[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
                    a[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
                }
                for (int i = 0; i < 4; i++) {
                    _mm256_storeu_ps(out + (g + i) * width + r, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                    _mm256_storeu_ps(out + (g + i + 4) * width + r, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
                }
            }
#endif
    for (; g < size.groups; g++)
        for (int64_t r = 0; r < width; r++) out[g * width + r] = rows[r * stride + stored_group(w, g)];
}

// --- inputs ---------------------------------------------------------------------------------------------------------

struct Inputs {
    std::vector<int16_t> integers;  // rows × padded, in column order
    std::vector<int16_t> arranged;  // the same in the order that the kernel meets them in
    std::vector<float> sums;        // rows × groups: of the integers, for offsets
    std::vector<float> steps;       // rows: what one integer is worth
};

thread_local Inputs inputs_of_thread;

inline float largest_of(const float *x, int64_t n) {
    float largest = 0;
    for (int64_t k = 0; k < n; k++) largest = std::max(largest, std::fabs(x[k]));
    return largest;
}

// Not-a-number and infinity have no integer: the row's step becomes not-a-number, and so does every output of the row.
inline float round_row(const float *x, int64_t n, int64_t padded, int32_t top, int16_t *out) {
    bool finite = true;
    for (int64_t k = 0; k < n; k++) finite &= std::fabs(x[k]) <= 3.4028235e38f;
    if (!finite) {
        std::fill(out, out + padded, int16_t(0));
        return NAN;
    }
    const float largest = largest_of(x, n);
    const float factor = largest > 0 ? float(top) / largest : 0.0f;
    if (largest > 0 && !(factor <= 3.4028235e38f)) {  // so small that its reciprocal is none: count it as zero
        std::fill(out, out + padded, int16_t(0));
        return 0.0f;
    }
    int64_t k = 0;
#if defined(__AVX2__)
    const __m256 wide = _mm256_set1_ps(factor);
    for (; k + 16 <= n; k += 16) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), wide));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k + 8), wide));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + k), both);
    }
#endif
    for (; k < n; k++) out[k] = int16_t(std::lrintf(x[k] * factor));
    std::fill(out + n, out + padded, int16_t(0));
    return largest / float(top);
}

void add_up(const Weight &w, const Sizes &size, const int16_t *row, float *sums) {
    for (int64_t g = 0; g < size.groups; g++) {
        int32_t sum = 0;
        for (int64_t k = g * w.group; k < (g + 1) * w.group && k < size.padded; k++) sum += row[k];
        sums[g] = float(sum);
    }
}

// `dot` takes 32 packed bytes at a time. Their codes come out by place in the byte (low bits first), and each vector of 32
// codes as two of 16-bit numbers: bytes 0–7 and 16–23, then 8–15 and 24–31. The inputs are laid out to match.
void arrange(const Weight &w, int64_t padded, const int16_t *row, int16_t *out) {
    const int64_t per_byte = 8 / w.bits, block = 32 * per_byte;
    for (int64_t start = 0; start < padded; start += block)
        for (int64_t place = 0; place < per_byte; place++)
            for (int64_t half = 0; half < 2; half++)
                for (int64_t lane = 0; lane < 2; lane++)
                    for (int64_t i = 0; i < 8; i++) {
                        const int64_t column = start + (lane * 16 + half * 8 + i) * per_byte + place;
                        *out++ = column < padded ? row[column] : int16_t(0);
                    }
}

// `panel` takes tiles of rows: for each pair of columns, the pairs of the tile's rows side by side.
void tile(const int16_t *rows, int64_t count, int64_t tile_rows, int64_t padded, int16_t *out) {
    for (int64_t m = 0; m < tile_rows; m++)
        for (int64_t p = 0; p < padded / 2; p++) {
            int32_t both = 0;
            if (m < count) std::memcpy(&both, rows + m * padded + 2 * p, 4);
            std::memcpy(out + 2 * (p * tile_rows + m), &both, 4);
        }
}

// --- unpacking ------------------------------------------------------------------------------------------------------

// One row's integers in column order; `out` has room for whole blocks.
void integers_of_row(const Weight &w, int64_t row, int64_t padded, int16_t *out) {
    const uint8_t *codes = w.codes + row * w.row_bytes;
    int64_t byte = 0;
    if (w.bits == 8) {
#if defined(__AVX2__)
        for (; byte + 16 <= w.row_bytes; byte += 16) {
            __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + byte));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + byte), _mm256_cvtepi8_epi16(eight));
        }
#endif
        for (; byte < w.row_bytes; byte++) out[byte] = int8_t(codes[byte]);
        std::fill(out + w.row_bytes, out + padded, int16_t(0));
        return;
    }
    const int64_t per_byte = 8 / w.bits;
#if defined(__AVX2__)
    alignas(16) uint8_t low[16] = {0}, high[16] = {0};
    for (int i = 0; i < (1 << w.bits); i++) {
        low[i] = uint8_t(w.table[i]);
        high[i] = uint8_t(uint16_t(w.table[i]) >> 8);
    }
    const __m128i lows = _mm_load_si128(reinterpret_cast<const __m128i *>(low));
    const __m128i highs = _mm_load_si128(reinterpret_cast<const __m128i *>(high));
    auto put = [&](int16_t *to, __m128i sixteen) {  // 16 codes in column order
        __m128i a = _mm_shuffle_epi8(lows, sixteen), b = _mm_shuffle_epi8(highs, sixteen);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm_unpacklo_epi8(a, b));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 8), _mm_unpackhi_epi8(a, b));
    };
    for (; byte + 16 <= w.row_bytes; byte += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + byte));
        int16_t *to = out + byte * per_byte;
        if (w.bits == 4) {
            const __m128i four = _mm_set1_epi8(15);
            __m128i even = _mm_and_si128(bytes, four), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), four);
            put(to, _mm_unpacklo_epi8(even, odd));
            put(to + 16, _mm_unpackhi_epi8(even, odd));
        } else {
            const __m128i two = _mm_set1_epi8(3);
            __m128i a = _mm_and_si128(bytes, two), b = _mm_and_si128(_mm_srli_epi16(bytes, 2), two);
            __m128i c = _mm_and_si128(_mm_srli_epi16(bytes, 4), two), d = _mm_and_si128(_mm_srli_epi16(bytes, 6), two);
            __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d);
            put(to, _mm_unpacklo_epi16(ab, cd));
            put(to + 16, _mm_unpackhi_epi16(ab, cd));
            ab = _mm_unpackhi_epi8(a, b), cd = _mm_unpackhi_epi8(c, d);
            put(to + 32, _mm_unpacklo_epi16(ab, cd));
            put(to + 48, _mm_unpackhi_epi16(ab, cd));
        }
    }
#endif
    const int mask = (1 << w.bits) - 1;
    for (; byte < w.row_bytes; byte++)
        for (int64_t place = 0; place < per_byte; place++)
            out[byte * per_byte + place] = w.table[(codes[byte] >> (w.bits * place)) & mask];
    if (w.row_bytes * per_byte < padded) std::fill(out + w.row_bytes * per_byte, out + padded, int16_t(0));
}

// --- products -------------------------------------------------------------------------------------------------------

#if defined(__AVX2__)

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
inline __m256i multiply_add(__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
inline __m256i multiply_add(__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#else
inline __m256i multiply_add(__m256i sum, __m256i a, __m256i b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#endif

// Eight vectors to one that holds, for each, the sum of its lower four lanes (low) and upper four (high).
inline void add_lanes(const __m256i *v, __m256i &low, __m256i &high) {
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    low = _mm256_permute2x128_si256(a, b, 0x20);
    high = _mm256_permute2x128_si256(a, b, 0x31);
}

struct DotState {
    __m256 sum;
    inline void add(__m256i integers, const float *scale, const float *offset, float x_sum) {
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), _mm256_loadu_ps(scale), sum);
        if (offset) sum = _mm256_fmadd_ps(_mm256_loadu_ps(offset), _mm256_set1_ps(x_sum), sum);
    }
};

template <int BITS>
struct Codes {  // 32 packed bytes → pairs of 16-bit vectors, one pair per place in the byte
    static constexpr int PLACES = 8 / BITS;
    __m256i lows, highs;
    explicit Codes(const int16_t *table) {
        alignas(32) uint8_t low[32] = {0}, high[32] = {0};
        if (BITS < 8)
            for (int i = 0; i < (1 << BITS); i++) {
                low[i] = low[i + 16] = uint8_t(table[i]);
                high[i] = high[i + 16] = uint8_t(uint16_t(table[i]) >> 8);
            }
        lows = _mm256_load_si256(reinterpret_cast<const __m256i *>(low));
        highs = _mm256_load_si256(reinterpret_cast<const __m256i *>(high));
    }
    inline void pair(__m256i bytes, int place, __m256i &first, __m256i &second) const {
        __m256i a, b;
        if constexpr (BITS == 8) {
            a = bytes;
            b = _mm256_cmpgt_epi8(_mm256_setzero_si256(), bytes);
        } else {
            __m256i shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(BITS * place));
            __m256i code = _mm256_and_si256(shifted, _mm256_set1_epi8((1 << BITS) - 1));
            a = _mm256_shuffle_epi8(lows, code);
            b = _mm256_shuffle_epi8(highs, code);
        }
        first = _mm256_unpacklo_epi8(a, b);
        second = _mm256_unpackhi_epi8(a, b);
    }
};

// Eight weight rows times MR rows of x. SPLIT: groups within 32 packed bytes (1: a group is 32 bytes or more).
template <int BITS, int SPLIT, int MR>
void dot_rows(const Weight &w, const Sizes &size, const uint8_t *const *rows, const int16_t *x, int64_t x_stride,
              const float *sums, const float *scale, const float *offset, float *out /* MR × 8 */) {
    const Codes<BITS> codes(w.table);
    constexpr int PLACES = Codes<BITS>::PLACES;
    constexpr int64_t BLOCK = 32 * PLACES;
    const int64_t blocks = (w.columns + BLOCK - 1) / BLOCK;
    const int64_t per_group = SPLIT == 1 ? w.group / BLOCK : 1;
    DotState state[MR];
#pragma GCC unroll 4
    for (int m = 0; m < MR; m++) state[m].sum = _mm256_setzero_ps();
    alignas(32) uint8_t tail[32];
    for (int64_t b0 = 0; b0 < blocks; b0 += per_group) {
        const int64_t b1 = std::min(blocks, b0 + per_group);
        __m256i first[MR][8], second[MR][8];
        for (int r = 0; r < 8; r++) {
            __m256i f[MR], s[MR];
#pragma GCC unroll 4
            for (int m = 0; m < MR; m++) f[m] = s[m] = _mm256_setzero_si256();
            for (int64_t b = b0; b < b1; b++) {
                const uint8_t *from = rows[r] + b * 32;
                if (__builtin_expect((b + 1) * 32 > w.row_bytes, 0)) {
                    std::memset(tail, 0, 32);
                    std::memcpy(tail, from, w.row_bytes - b * 32);
                    from = tail;
                }
                const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
#pragma GCC unroll 4
                for (int place = 0; place < PLACES; place++) {
                    __m256i p, q;
                    codes.pair(bytes, place, p, q);
#pragma GCC unroll 4
                    for (int m = 0; m < MR; m++) {
                        const __m256i *xs =
                            reinterpret_cast<const __m256i *>(x + m * x_stride + b * BLOCK + place * 32);
                        f[m] = multiply_add(f[m], p, _mm256_loadu_si256(xs));
                        s[m] = multiply_add(s[m], q, _mm256_loadu_si256(xs + 1));
                    }
                }
            }
#pragma GCC unroll 4
            for (int m = 0; m < MR; m++) {
                if (SPLIT == 4) {
                    first[m][r] = f[m];
                    second[m][r] = s[m];
                } else {
                    first[m][r] = _mm256_add_epi32(f[m], s[m]);
                }
            }
        }
        const int64_t g = SPLIT == 1 ? b0 / per_group : b0 * SPLIT;
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) {
            const float *xs = sums + m * size.groups + g;
            const int64_t left = size.groups - g;
            __m256i low, high;
            add_lanes(first[m], low, high);
            auto add = [&](int64_t i, __m256i integers) {
                if (i < left)
                    state[m].add(integers, scale + (g + i) * 8, offset ? offset + (g + i) * 8 : nullptr, xs[i]);
            };
            if (SPLIT == 1) {
                add(0, _mm256_add_epi32(low, high));
            } else if (SPLIT == 2) {
                add(0, low);
                add(1, high);
            } else {  // a block's bytes 0–7 and 16–23 are in `first`, 8–15 and 24–31 in `second`
                __m256i low2, high2;
                add_lanes(second[m], low2, high2);
                add(0, low);
                add(1, low2);
                add(2, high);
                add(3, high2);
            }
        }
    }
    for (int m = 0; m < MR; m++) _mm256_storeu_ps(out + m * 8, state[m].sum);
}

template <int BITS, int SPLIT>
void dot_split(int mr, const Weight &w, const Sizes &size, const uint8_t *const *rows, const int16_t *x, int64_t stride,
               const float *sums, const float *scale, const float *offset, float *out) {
    switch (mr) {
        case 1: return dot_rows<BITS, SPLIT, 1>(w, size, rows, x, stride, sums, scale, offset, out);
        case 2: return dot_rows<BITS, SPLIT, 2>(w, size, rows, x, stride, sums, scale, offset, out);
        default: return dot_rows<BITS, SPLIT, 4>(w, size, rows, x, stride, sums, scale, offset, out);
    }
}

template <int BITS>
void dot_bits(int split, int mr, const Weight &w, const Sizes &size, const uint8_t *const *rows, const int16_t *x,
              int64_t stride, const float *sums, const float *scale, const float *offset, float *out) {
    if (split == 1) return dot_split<BITS, 1>(mr, w, size, rows, x, stride, sums, scale, offset, out);
    if (split == 2) return dot_split<BITS, 2>(mr, w, size, rows, x, stride, sums, scale, offset, out);
    return dot_split<BITS, 4>(mr, w, size, rows, x, stride, sums, scale, offset, out);
}

// The panel kernel's vectors: 16 weight rows with AVX-512, 8 without, two of them side by side.
#if defined(__AVX512BW__)
using Vec = __m512i;
constexpr int LANES = 16, MR_PANEL = 8;
inline Vec zero() { return _mm512_setzero_si512(); }
inline Vec load(const int32_t *p) { return _mm512_loadu_si512(p); }
inline Vec pair_of(const int16_t *x) {
    int32_t both;
    std::memcpy(&both, x, 4);
    return _mm512_set1_epi32(both);
}
#if defined(__AVX512VNNI__)
inline Vec step(Vec sum, Vec a, Vec b) { return _mm512_dpwssd_epi32(sum, a, b); }
#else
inline Vec step(Vec sum, Vec a, Vec b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
#endif
inline void flush(float *acc, Vec integers, const float *scale, const float *offset, float x_sum) {
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), _mm512_loadu_ps(scale), _mm512_loadu_ps(acc));
    if (offset) sum = _mm512_fmadd_ps(_mm512_loadu_ps(offset), _mm512_set1_ps(x_sum), sum);
    _mm512_storeu_ps(acc, sum);
}
#else
using Vec = __m256i;
constexpr int LANES = 8, MR_PANEL = 4;
inline Vec zero() { return _mm256_setzero_si256(); }
inline Vec load(const int32_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline Vec pair_of(const int16_t *x) {
    int32_t both;
    std::memcpy(&both, x, 4);
    return _mm256_set1_epi32(both);
}
inline Vec step(Vec sum, Vec a, Vec b) { return multiply_add(sum, a, b); }
inline void flush(float *acc, Vec integers, const float *scale, const float *offset, float x_sum) {
    __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), _mm256_loadu_ps(scale), _mm256_loadu_ps(acc));
    if (offset) sum = _mm256_fmadd_ps(_mm256_loadu_ps(offset), _mm256_set1_ps(x_sum), sum);
    _mm256_storeu_ps(acc, sum);
}
#endif
constexpr int NR = 2 * LANES;

// `x` holds a tile of MR_PANEL rows, pair of columns by pair of columns: rows apart by a power of two would share cache sets.
template <int MR>
void panel_rows(const Weight &w, const Sizes &size, const int32_t *panel, const int16_t *x, const float *sums,
                const float *scale, const float *offset, float *acc /* MR × NR */) {
    const int64_t pairs = w.group / 2, all_pairs = size.padded / 2;
    std::fill(acc, acc + MR * NR, 0.0f);
    for (int64_t g = 0; g < size.groups; g++) {
        Vec sum[MR][2];
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) sum[m][0] = sum[m][1] = zero();
        const int64_t end = std::min((g + 1) * pairs, all_pairs);
        for (int64_t p = g * pairs; p < end; p++) {
            const Vec a = load(panel + p * NR), b = load(panel + p * NR + LANES);
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++) {
                const Vec xs = pair_of(x + 2 * (p * MR_PANEL + m));
                sum[m][0] = step(sum[m][0], xs, a);
                sum[m][1] = step(sum[m][1], xs, b);
            }
        }
#pragma GCC unroll 8  // with an index left, GCC keeps the sums in memory
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                flush(acc + m * NR + half * LANES, sum[m][half], scale + g * NR + half * LANES,
                      offset ? offset + g * NR + half * LANES : nullptr, sums[m * size.groups + g]);
    }
}

// Eight rows of 16-bit integers → pairs of columns in which the eight rows lie side by side.
void interleave(const int16_t *rows, int64_t padded, int32_t *panel) {
    for (int64_t p = 0; p < padded / 2; p += 8) {
        __m256i r[8], t[8];
        for (int i = 0; i < 8; i++)
            r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(rows + i * padded + 2 * p));
        for (int i = 0; i < 4; i++) {
            t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
            r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
            r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
            r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            int32_t *to = panel + (p + i) * NR;
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
            to = panel + (p + i + 4) * NR;
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
        }
    }
}

#endif  // __AVX2__

// The same arithmetic in plain C++, for other processors.
[[maybe_unused]] void plain_row(const Weight &w, const Sizes &size, const int16_t *integers, const int16_t *x, const float *sums,
               const float *scale, const float *offset, float *out) {
    float sum = 0;
    for (int64_t g = 0; g < size.groups; g++) {
        int32_t products = 0;
        const int64_t end = std::min((g + 1) * w.group, size.padded);
        for (int64_t k = g * w.group; k < end; k++) products += int32_t(integers[k]) * int32_t(x[k]);
        const int64_t place = stored_group(w, g);
        sum = std::fma(float(products), scale[place], sum);
        if (offset) sum = std::fma(offset[place], sums[g], sum);
    }
    *out = sum;
}

OpenMP openmp = {};

int thread_count(int64_t tasks) {
    if (!openmp.parallel) return 1;
    return int(std::max<int64_t>(1, std::min<int64_t>(openmp.max_threads(), tasks)));
}

// One of the threads that do a piece of work together.
struct Member {
    int number, team;

    // This thread's share of `count` items, in one piece; returns when all threads have done theirs.
    template <typename Body>
    void share(int64_t count, Body &&body) const {
        const int64_t each = count / team, more = count % team;
        const int64_t first = number * each + std::min<int64_t>(number, more);
        const int64_t last = first + each + (number < more);
        for (int64_t i = first; i < last; i++) body(i);
        if (team > 1) openmp.barrier();
    }
};

// Calls body(member) on that many threads, or fewer where OpenMP has no more; returns when all have returned.
template <typename Body>
void together(int threads, Body &&body) {
    if (threads <= 1) return body(Member{0, 1});
    openmp.parallel(
        [](void *given) {
            const Member member = {openmp.thread_number(), openmp.team_size()};
            (*static_cast<std::remove_reference_t<Body> *>(given))(member);
        },
        &body, unsigned(threads), 0);
}

// Room for every thread of a parallel region, each one's on cache lines of its own. It is allocated before the region begins:
// an exception that leaves one ends the process. Not cleared: its thread writes a place before it reads it, and gets the pages
// from its own part of the machine by doing so.
class Scratch {
    static constexpr int64_t LINE = 64;
    int64_t stride = 0;
    std::unique_ptr<char[]> memory;
    char *start = nullptr;

public:
    // Where `count` elements of a thread's share begin. All places come before `allocate`.
    template <typename T>
    int64_t place(int64_t count) {
        const int64_t at = stride;
        stride += round_up(count * int64_t(sizeof(T)), LINE);
        return at;
    }

    void allocate(int threads) {
        memory.reset(new char[size_t(stride) * size_t(threads) + LINE]);
        start = memory.get() + (LINE - reinterpret_cast<uintptr_t>(memory.get()) % LINE);
    }

    template <typename T>
    T *get(int64_t at, Member member) const {
        return reinterpret_cast<T *>(start + member.number * stride + at);
    }
};

constexpr int NO_DOT = 1, NO_MEMORY = 2;  // what a call returns; mirrored by kernels/cpp.py

}  // namespace

// The OpenMP to compute with from now on. Call it before the other functions, from one thread.
EXPORT void quant_use_openmp(const OpenMP *functions) { openmp = *functions; }

// The groups a 32-byte block of codes holds for `dot`; 0: this format is for `panel` alone.
EXPORT int dot_split_of(const Weight *w) {
#if defined(__AVX2__)
    const int64_t group_bytes = w->group * w->bits / 8;
    if (group_bytes >= 32 && group_bytes % 32 == 0) return 1;
    if (group_bytes == 16) return 2;
    if (group_bytes == 8) return 4;
#else
    (void)w;
#endif
    return 0;
}

// out (m × rows) = x (m × columns) · Wᵀ + bias. kind: 0 dot, 1 panel. Returns 0, NO_DOT where `dot` cannot serve the format,
// or NO_MEMORY, which leaves `out` as it was.
EXPORT int quant_linear(const Weight *weight, const float *x, int64_t m, const float *bias, float *out, int kind) try {
    const Weight &w = *weight;
    const Sizes size = sizes(w);
    const int split = dot_split_of(weight);
    if (kind == 0 && split == 0) return NO_DOT;
    Inputs &in = inputs_of_thread;
    in.integers.resize(m * size.padded);
    in.sums.resize(round_up(m, 8) * size.groups);  // a tile's missing rows are read, and their results dropped
    in.steps.resize(m);
    const int64_t per_byte = 8 / w.bits, dot_padded = round_up(size.padded, 32 * per_byte);
#if defined(__AVX2__)
    const int64_t tile_rows = MR_PANEL;
#else
    const int64_t tile_rows = 1;
#endif
    const int64_t tiles = (m + tile_rows - 1) / tile_rows;
    in.arranged.resize(kind == 0 ? m * dot_padded : tiles * tile_rows * size.padded);
    int16_t *integers = in.integers.data(), *arranged = in.arranged.data();
    float *sums = in.sums.data(), *steps = in.steps.data();
#if defined(__AVX2__)
    const int64_t width = kind == 0 ? 8 : NR;
#else
    const int64_t width = 16;
#endif
    const int64_t blocks = (w.rows + width - 1) / width;
    // Few panels and many rows of x: cut x as well, so that every core has work; a panel is then unpacked more than once.
    const int64_t wanted = thread_count(1 << 20);
    const int64_t cuts = kind == 0 ? 1 : std::max<int64_t>(1, std::min<int64_t>(m / 32, (2 * wanted + blocks - 1) / blocks));
    const int64_t share = round_up((m + cuts - 1) / cuts, tile_rows);
    const int threads = w.rows * w.columns * m < (1 << 15) ? 1 : thread_count(blocks * cuts);
    Scratch scratch;
    const int64_t scale_at = scratch.place<float>(size.groups * width);
    const int64_t offset_at = scratch.place<float>(w.offset ? size.groups * width : 0);
    const int64_t row_scale_at = scratch.place<float>(w.stored_groups * width);
    const int64_t row_offset_at = scratch.place<float>(w.offset ? w.stored_groups * width : 0);
    const int64_t acc_at = scratch.place<float>(16 * 32);
#if defined(__AVX2__)
    const int64_t rows_at = scratch.place<int16_t>(kind == 1 ? 8 * size.padded : 0);
    const int64_t panel_at = scratch.place<int32_t>(kind == 1 ? size.padded / 2 * NR : 0);
#else
    const int64_t rows_at = scratch.place<int16_t>(size.padded);
#endif
    scratch.allocate(threads);
    together(threads, [&](Member member) {
        member.share(m, [&](int64_t i) {
            int16_t *row = integers + i * size.padded;
            steps[i] = round_row(x + i * w.columns, w.columns, size.padded, w.x_top, row);
            if (w.offset) add_up(w, size, row, sums + i * size.groups);
            if (kind == 0) arrange(w, dot_padded, row, arranged + i * dot_padded);
        });
#if defined(__AVX2__)
        if (kind == 1)
            member.share(tiles, [&](int64_t t) {
                tile(integers + t * tile_rows * size.padded, m - t * tile_rows, tile_rows, size.padded,
                     arranged + t * tile_rows * size.padded);
            });
#endif
        float *scale = scratch.get<float>(scale_at, member), *offset = scratch.get<float>(offset_at, member);
        float *row_scale = scratch.get<float>(row_scale_at, member), *row_offset = scratch.get<float>(row_offset_at, member);
        [[maybe_unused]] float *acc = scratch.get<float>(acc_at, member);
        const float *offsets = w.offset ? offset : nullptr;
        int16_t *rows = scratch.get<int16_t>(rows_at, member);
#if defined(__AVX2__)
        int32_t *panel = scratch.get<int32_t>(panel_at, member);
#endif
        member.share(blocks * cuts, [&](int64_t task) {
            const int64_t block = task / cuts, m0 = (task % cuts) * share, m1 = std::min(m, m0 + share);
            const int64_t r0 = block * width, count = std::min(width, w.rows - r0);
            for (int64_t r = 0; r < width; r++)
                row_scales(w, std::min(r0 + r, w.rows - 1), row_scale + r * w.stored_groups,
                           row_offset + (w.offset ? r * w.stored_groups : 0));
            across_rows(w, size, row_scale, w.stored_groups, width, scale);
            if (w.offset) across_rows(w, size, row_offset, w.stored_groups, width, offset);
            auto finish = [&](int64_t i, const float *sum) {
                for (int64_t r = 0; r < count; r++)
                    out[i * w.rows + r0 + r] = std::fma(sum[r], steps[i], bias ? bias[r0 + r] : 0.0f);
            };
#if defined(__AVX2__)
            if (kind == 0) {
                const uint8_t *from[8];
                for (int64_t r = 0; r < 8; r++) from[r] = w.codes + std::min(r0 + r, w.rows - 1) * w.row_bytes;
                for (int64_t i = m0; i < m1;) {
                    const int mr = m1 - i >= 4 ? 4 : m1 - i >= 2 ? 2 : 1;
                    auto run = w.bits == 8 ? dot_bits<8> : w.bits == 4 ? dot_bits<4> : dot_bits<2>;
                    run(split, mr, w, size, from, arranged + i * dot_padded, dot_padded, sums + i * size.groups,
                        scale, offsets, acc);
                    for (int j = 0; j < mr; j++) finish(i + j, acc + j * 8);
                    i += mr;
                }
                return;
            }
            for (int64_t part = 0; part < NR; part += 8) {
                for (int64_t r = 0; r < 8; r++)
                    integers_of_row(w, std::min(r0 + part + r, w.rows - 1), size.padded, rows + r * size.padded);
                interleave(rows, size.padded, panel + part);
            }
            for (int64_t i = m0; i < m1;) {
                const int mr = int(std::min<int64_t>(MR_PANEL, m1 - i));
                auto run = mr > 4 ? panel_rows<MR_PANEL> : mr > 2 ? panel_rows<4> : mr == 2 ? panel_rows<2> : panel_rows<1>;
                run(w, size, panel, arranged + i * size.padded, sums + i * size.groups, scale, offsets, acc);
                for (int j = 0; j < mr; j++) finish(i + j, acc + j * NR);
                i += mr;
            }
#else
            for (int64_t r = 0; r < count; r++) {
                integers_of_row(w, r0 + r, size.padded, rows);
                const float *scales = row_scale + r * w.stored_groups;
                const float *shifts = w.offset ? row_offset + r * w.stored_groups : nullptr;
                for (int64_t i = m0; i < m1; i++) {
                    float sum;
                    plain_row(w, size, rows, integers + i * size.padded, sums + i * size.groups, scales, shifts, &sum);
                    out[i * w.rows + r0 + r] = std::fma(sum, steps[i], bias ? bias[r0 + r] : 0.0f);
                }
            }
            (void)finish;
            (void)offsets;
#endif
        });
    });
    return 0;
} catch (const std::exception &) {  // bad_alloc, or length_error for more than could ever be had
    return NO_MEMORY;
}

// The weight's rows from first to first + count as float32, exactly as the format defines them. Returns 0, or NO_MEMORY.
EXPORT int quant_unpack(const Weight *weight, int64_t first, int64_t count, float *out) try {
    const Weight &w = *weight;
    const int64_t per_byte = 8 / w.bits;
    const int mask = (1 << w.bits) - 1;
    std::vector<float> values(w.bits == 8 ? 0 : 256 * per_byte);  // of whole bytes: one read gives two or four weights
    for (int64_t byte = 0; byte * per_byte < int64_t(values.size()); byte++)
        for (int64_t place = 0; place < per_byte; place++)
            values[byte * per_byte + place] = w.values[(byte >> (w.bits * place)) & mask];
    const int64_t size = w.group_size == 0 ? w.columns : w.group_size;
    const int threads = count * w.columns < (1 << 16) ? 1 : thread_count(count);
    Scratch scratch;
    const int64_t row_at = scratch.place<float>(w.row_bytes * per_byte);
    scratch.allocate(threads);
    together(threads, [&](Member member) {
        float *row = scratch.get<float>(row_at, member);
        member.share(count, [&](int64_t r) {
            const uint8_t *codes = w.codes + (first + r) * w.row_bytes;
            if (w.bits == 8)
                for (int64_t k = 0; k < w.row_bytes; k++) row[k] = float(int8_t(codes[k]));
            else
                for (int64_t k = 0; k < w.row_bytes; k++)
                    std::memcpy(&row[k * per_byte], &values[codes[k] * per_byte], 4 * per_byte);
            float *to = out + r * w.columns;
            for (int64_t g = 0; g < w.stored_groups; g++) {
                const int64_t place = (first + r) * w.stored_groups + g;
                const float scale = stored(w, w.scale, place) * w.tensor_scale;
                const float offset = w.offset ? stored(w, w.offset, place) * w.tensor_scale : 0.0f;
                const int64_t end = std::min(w.columns, (g + 1) * size);
                for (int64_t k = g * size; k < end; k++) to[k] = row[k] * scale;
                // A loop of its own, so that no compiler fuses the two roundings into one: these are the format's values.
                if (w.offset)
                    for (int64_t k = g * size; k < end; k++) to[k] += offset;
            }
        });
    });
    return 0;
} catch (const std::exception &) {
    return NO_MEMORY;
}
