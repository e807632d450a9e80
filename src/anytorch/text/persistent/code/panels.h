// Linear layers with weights in 8 or 4 bits, in panels of 16 rows; the inputs are rounded to 8 bits, 32 columns at a time.
//
// A panel has its 16 rows in the lanes, so that no sum goes across a vector. For each group of 32 columns there are 16 float16
// scales, and the codes in vectors of 64 bytes: four neighbouring columns of 16 rows. With 4 bits such a vector has columns 4j to
// 4j + 3 of the group in its low halves and 16 + 4j to 16 + 4j + 3 in its high ones. A code is the weight's whole number plus 128 or 8,
// as the instructions want one factor without a sign; 128 or 8 times the inputs' sum is taken off again.
//
// Sums within a group are whole numbers, so exact, and groups are added up in order: a value has the same bits in every batch.
#pragma once
#include <cfloat>
#include <vector>

#include "lanes.h"
#include "products.h"

constexpr int PANEL = 16, GROUP = 32, QUADS = GROUP / 4;

// Inputs of some texts, rounded: x = step * whole number, with a step for every group. Texts are side by side: [groups, texts, …].
struct Rounded {
  int64_t groups = 0, texts = 0;
  std::vector<int8_t> bytes;
  std::vector<int32_t> pairs;  // columns 4j and 4j + 2, then 4j + 1 and 4j + 3, as 16-bit numbers: where bytes have no instruction
  std::vector<int32_t> sums;   // of a group's whole numbers
  std::vector<float> steps;

  void make_room(int64_t texts, int64_t columns) {
    const int64_t all = texts * ((columns + GROUP - 1) / GROUP);
    bytes.resize(all * GROUP), sums.resize(all), steps.resize(all);
    if (!HAS_FOURS) pairs.resize(all * GROUP / 2);
  }
};

// Not-a-number and infinity have no whole number: the step of such a group is not-a-number, and so is all that comes of it.
INLINE void round_group(const float* x, int8_t* bytes, int32_t* pairs, int32_t& total, float& step) {
  vf top = {}, apart = {};
  for (int i = 0; i < GROUP; i += W) {
    const vf v = load(x + i);
    top = vmax(top, vabs(v)), apart += v - v;  // 0, or not-a-number
  }
  const float greatest = largest(top), inverse = 127.0f / greatest;
  const bool strange = sum(apart) != 0.0f;
  if (strange || !(greatest > 0.0f) || inverse > FLT_MAX) {  // the last: so small that it counts as nothing
    memset(bytes, 0, GROUP);
    if (!HAS_FOURS) memset(pairs, 0, GROUP * 2);
    total = 0, step = strange ? NOT_A_NUMBER : 0.0f;
    return;
  }
  const vf magic = fill(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded number
  vi totals = {};
  for (int i = 0; i < GROUP; i += W) {
    const vi whole = as_int(fma(load(x + i), fill(inverse), magic)) - as_int(magic);
    totals += whole;
    typedef int8_t narrow __attribute__((vector_size(W)));
    const narrow few = __builtin_convertvector(whole, narrow);
    memcpy(bytes + i, &few, W);
  }
  total = 0;
  for (int i = 0; i < W; i++) total += totals[i];
  step = greatest / 127.0f;
  if (!HAS_FOURS)
    for (int j = 0; j < QUADS; j++) {
      const int8_t* four = bytes + 4 * j;
      pairs[2 * j] = (int32_t)((uint32_t)(uint16_t)four[0] | (uint32_t)(uint16_t)four[2] << 16);
      pairs[2 * j + 1] = (int32_t)((uint32_t)(uint16_t)four[1] | (uint32_t)(uint16_t)four[3] << 16);
    }
}

inline void round_inputs(const float* x, int64_t texts, int64_t columns, Rounded& out) {
  out.groups = (columns + GROUP - 1) / GROUP, out.texts = texts;
  for (int64_t b = 0; b < texts; b++)
    for (int64_t g = 0; g < out.groups; g++) {
      const int64_t slot = g * texts + b, left = columns - g * GROUP;
      const float* from = x + b * columns + g * GROUP;
      float filled[GROUP] = {};
      if (left < GROUP) from = (const float*)memcpy(filled, from, left * sizeof(float));
      round_group(from, out.bytes.data() + slot * GROUP, HAS_FOURS ? nullptr : out.pairs.data() + slot * GROUP / 2, out.sums[slot],
                  out.steps[slot]);
    }
}

INLINE vi load_codes(const uint8_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE int32_t word(const int8_t* p) {
  int32_t w;
  memcpy(&w, p, 4);
  return w;
}

// GCC computes all products of a group before it adds any, and keeps all inputs for the next vector: more than there are registers,
// at half the speed. These tell it that a sum is needed now, and that memory may have changed.
INLINE void add_now(vi& sum) {
#if defined(__x86_64__)
  asm("" : "+v"(sum));
#endif
}
INLINE void forget_inputs() { asm volatile("" ::: "memory"); }

#if !HAS_FOURS && defined(__AVX2__)
// The products of bytes, below 16 on one side, added up in 16 bits: 8 pairs of at most 2 * 15 * 127 fit.
#if defined(__AVX512BW__)
INLINE vi plus_short(vi sum, vi codes, vi x) {
  return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, (__m512i)x));
}
#else
INLINE vi plus_short(vi sum, vi codes, vi x) {
  return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
}
#endif
#endif

// sums[b] + the products of one group: W rows' codes, 64 bytes from vector to vector, by the group's inputs of B texts.
template <int BITS, int B>
INLINE void plus_group(const uint8_t* codes, const int8_t* bytes, const int32_t* pairs, vi (&sums)[B]) {
  constexpr int LINE = PANEL * 4;
#if HAS_FOURS
  for (int j = 0; j < QUADS * BITS / 8; j++) {
    const vi both = load_codes(codes + j * LINE), low = BITS == 8 ? both : both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
    for (int b = 0; b < B; b++) {
      const int8_t* in = bytes + b * GROUP + 4 * j;
      sums[b] = multiply_fours(sums[b], low, fill_int(word(in)));
      if (BITS == 4) sums[b] = multiply_fours(sums[b], high, fill_int(word(in + GROUP / 2)));
    }
  }
#else
#if defined(__AVX2__)
  if (BITS == 4) {
    vi shorts[B] = {};
    for (int j = 0; j < QUADS / 2; j++) {
      const vi both = load_codes(codes + j * LINE), low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
      for (int b = 0; b < B; b++) {
        const int8_t* in = bytes + b * GROUP + 4 * j;
        shorts[b] = plus_short(shorts[b], low, fill_int(word(in)));
        shorts[b] = plus_short(shorts[b], high, fill_int(word(in + GROUP / 2)));
        if (B > 1) add_now(shorts[b]);
      }
    }
    for (int b = 0; b < B; b++) sums[b] = multiply_pairs(sums[b], fill_int(0x00010001), shorts[b]);
    return;
  }
#endif
  constexpr int MASK = BITS == 8 ? 0x00ff00ff : 0x000f000f;
  for (int j = 0; j < QUADS * BITS / 8; j++) {
    const vi both = load_codes(codes + j * LINE), even = both & MASK, odd = (both >> 8) & MASK;
    const vi high_even = (both >> 4) & MASK, high_odd = (both >> 12) & MASK;
    for (int b = 0; b < B; b++) {
      const int32_t* in = pairs + b * GROUP / 2 + 2 * j;
      sums[b] = multiply_pairs(multiply_pairs(sums[b], fill_int(in[0]), even), fill_int(in[1]), odd);
      if (BITS == 4)
        sums[b] = multiply_pairs(multiply_pairs(sums[b], fill_int(in[GROUP / 4]), high_even), fill_int(in[GROUP / 4 + 1]), high_odd);
      if (B > 1) add_now(sums[b]);
    }
  }
#endif
}

// A panel by B texts, the first of which is `first`.
template <int BITS, int B>
__attribute__((noinline)) void panel_by(const uint8_t* codes, const f16* scales, const Rounded& x, int64_t first,
                                        float (&found)[PANEL][B]) {
  constexpr int VECTORS = PANEL / W, NBYTES = PANEL * GROUP * BITS / 8;
  vf totals[VECTORS][B] = {};
  const int8_t* bytes = x.bytes.data() + first * GROUP;
  const int32_t *pairs = x.pairs.data() + (HAS_FOURS ? 0 : first * GROUP / 2), *taken = x.sums.data() + first;
  const float* steps = x.steps.data() + first;
  for (int64_t g = 0; g < x.groups; g++) {
    for (int v = 0; v < VECTORS; v++) {
      vi sums[B];
      if (B > 1 && VECTORS > 1) forget_inputs();
      for (int b = 0; b < B; b++) sums[b] = fill_int(-(1 << (BITS - 1)) * taken[b]);
      plus_group<BITS, B>(codes + v * W * 4, bytes, pairs, sums);
      const vf scale = lanes(scales + v * W);
      for (int b = 0; b < B; b++) totals[v][b] = fma(to_float(sums[b]), scale * steps[b], totals[v][b]);
    }
    codes += NBYTES, scales += PANEL, bytes += x.texts * GROUP, taken += x.texts, steps += x.texts;
    if (!HAS_FOURS) pairs += x.texts * GROUP / 2;
  }
  for (int b = 0; b < B; b++)
    for (int v = 0; v < VECTORS; v++)
      for (int i = 0; i < W; i++) found[v * W + i][b] = totals[v][b][i];
}
