// Weights in few bits, in groups of 16 inputs that share a factor. All of them become whole numbers times one scale per output, so that a sum over k is a sum of
// integers: exact, and therefore the same in any order and in any batch.
//
//   INT8   w = scale * q,             q in [-127, 127]
//   INT4   w = scale * (m q + z),     q in [0, 15], m (8 bits) and z (16 bits) per output and group of 16 inputs
//   INT2   the same with q in [0, 3]
//   FP4    w = scale * m * v(q),      v one of 0 1 2 3 4 6 8 12 and their negatives (E2M1 doubled)
//
// In memory a panel is [inputs / 2][NR][2]: pairs of neighbouring inputs together, as the multiply-add of pairs wants them.
// Formats below 8 bits put the same place of 2 or 4 consecutive pair rows into one byte.
#pragma once
#include <cmath>

#include "memory.h"
#include "simd.h"

enum Format { F32 = 0, INT8 = 1, INT4 = 2, INT2 = 3, FP4 = 4 };

constexpr int LINE = NR * 2;  // values in a pair row of a panel

INLINE int bits_of(int format) { return format == INT8 ? 8 : format == INT2 ? 2 : 4; }
constexpr int GROUP = 16;

// One output's weights in one format, before they are put in their places.
struct Coded {
  Block<uint8_t> code;  // [padded inputs]
  Block<uint8_t> m;     // [groups]
  Block<int16_t> z;     // [groups]
  Block<float> step, low;
  float scale = 0;
  double heaviest = 0;  // sum of |whole number|: bounds how large activations may be

  void resize(int padded) {
    int groups = padded / GROUP;
    code.at_least(padded), m.at_least(groups), z.at_least(groups), step.at_least(groups), low.at_least(groups);
  }
};

inline int fp4_value(int code) {
  int c = code & 7, v = c + (c > 4 ? c - 4 : 0) + (c > 6 ? 2 * (c - 6) : 0);
  return code & 8 ? -v : v;
}

inline void code_int8(const float* w, int inputs, int padded, Coded& out) {
  float top = 0;
  for (int k = 0; k < inputs; k++) top = std::fabs(w[k]) > top ? std::fabs(w[k]) : top;
  out.scale = top / 127.0f, out.heaviest = 0;
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  for (int k = 0; k < padded; k++) {
    int q = k < inputs ? int(std::lrintf(w[k] * inverse)) : 0;
    out.code[k] = uint8_t(int8_t(q));
    out.heaviest += std::abs(q);
  }
}

// The range [low, high] of a group that gives the least squared error, weighed by importance, when values are rounded to `levels` + 1 steps:
// cutting off the ends a little is often better. Zero stays inside, so that no whole number outgrows 16 bits.
inline void best_range(const float* w, const float* importance, int count, int levels, float* low, float* high) {
  float a = 0, b = 0;
  for (int k = 0; k < count; k++) a = w[k] < a ? w[k] : a, b = w[k] > b ? w[k] : b;
  *low = a, *high = b;
  if (a == b) return;
  float least = INFINITY;
  for (int step = 0; step < 10; step++) {
    float part = 1.0f - (levels > 3 ? 0.04f : 0.06f) * step, l = a * part, size = (b - a) * part / levels, inverse = 1.0f / size;
    float error = 0;
    for (int k = 0; k < count; k++) {
      float q = std::nearbyintf((w[k] - l) * inverse);
      q = q < 0 ? 0 : q > levels ? levels : q;
      float d = q * size + l - w[k];
      error += importance ? importance[k] * d * d : d * d;
    }
    if (error < least) least = error, *low = l, *high = b * part;
  }
}

inline void code_groups(const float* w, const float* importance, int inputs, int padded, int format, Coded& out) {
  int group = GROUP, groups = padded / GROUP, levels = (1 << bits_of(format)) - 1;
  float *step = out.step.data(), *low = out.low.data(), widest = 0;
  for (int g = 0; g < groups; g++) {
    int first = g * group, count = inputs - first < group ? (inputs > first ? inputs - first : 0) : group;
    if (format == FP4) {
      float top = 0;
      for (int k = 0; k < count; k++) top = std::fabs(w[first + k]) > top ? std::fabs(w[first + k]) : top;
      step[g] = top / 12.0f, low[g] = 0;
    } else {
      float l = 0, h = 0;
      best_range(w + first, importance ? importance + first : nullptr, count, levels, &l, &h);
      step[g] = (h - l) / levels, low[g] = l;
    }
    widest = step[g] > widest ? step[g] : widest;
  }
  out.scale = widest / 255.0f, out.heaviest = 0;
  float inverse = widest > 0 ? 255.0f / widest : 0.0f;
  for (int g = 0; g < groups; g++) {
    int m = int(std::lrintf(step[g] * inverse)), z = int(std::lrintf(low[g] * inverse));
    m = m < 1 ? 1 : m;
    out.m[g] = uint8_t(m), out.z[g] = int16_t(z);
    for (int k = g * group; k < (g + 1) * group; k++) {
      float x = k < inputs ? w[k] * inverse : 0.0f;
      int code = 0;
      if (format == FP4) {
        float best = INFINITY;
        for (int c = 0; c < 16; c++) {
          float d = std::fabs(x - float(m * fp4_value(c)));
          if (d < best) best = d, code = c;
        }
      } else {
        code = int(std::lrintf((x - float(z)) / float(m)));
        code = code < 0 ? 0 : code > levels ? levels : code;
      }
      out.code[k] = uint8_t(code);
      if (k < inputs) out.heaviest += std::abs(format == FP4 ? m * fp4_value(code) : m * code + z);
    }
  }
}

// --- panels --------------------------------------------------------------------------------------------------------

struct Panel {  // of one layer, as it rests in memory
  const uint8_t* codes;
  const uint8_t* m;  // [groups][NR]
  const int16_t* z;
};

INLINE size_t panel_nbytes(int format, int padded) { return size_t(padded) * NR * bits_of(format) / 8; }

// Puts one output's codes at `column` of its panel.
inline void put(const Coded& from, int format, int padded, int column, uint8_t* codes, uint8_t* m, int16_t* z) {
  int bits = bits_of(format), together = 8 / bits, group = GROUP;
  for (int k = 0; k < padded; k++) {
    int pair = k / 2;
    size_t at = size_t(pair / together) * LINE + column * 2 + k % 2;
    codes[at] |= uint8_t(from.code[k] << (pair % together * bits));
  }
  if (format == INT8) return;
  for (int g = 0; g < padded / group; g++) m[size_t(g) * NR + column] = from.m[g], z[size_t(g) * NR + column] = from.z[g];
}

// The panel as 16-bit whole numbers, [padded / 2][NR][2]. Plain loops: the compiler makes vectors of them.
inline void unpack(const Panel& panel, int format, int padded, int16_t* __restrict out) {
  int lines = padded / 2;
  if (format == INT8) {
    const int8_t* __restrict codes = reinterpret_cast<const int8_t*>(panel.codes);
    for (long i = 0; i < long(lines) * LINE; i++) out[i] = codes[i];
    return;
  }
  int bits = bits_of(format), together = 8 / bits, mask = (1 << bits) - 1, per_group = GROUP / 2;
  int16_t m[LINE], z[LINE];
  for (int line = 0; line < lines; line++, out += LINE) {
    if (line % per_group == 0) {
      size_t g = size_t(line / per_group) * NR;
      for (int n = 0; n < NR; n++) m[2 * n] = m[2 * n + 1] = panel.m[g + n], z[2 * n] = z[2 * n + 1] = panel.z[g + n];
    }
    const uint8_t* __restrict codes = panel.codes + size_t(line / together) * LINE;
    int shift = line % together * bits;
    if (format == FP4) {
      for (int i = 0; i < LINE; i++) {
        int16_t code = int16_t((codes[i] >> shift) & 15), c = code & 7;
        int16_t v = int16_t(c + (c > 4 ? c - 4 : 0) + (c > 6 ? 2 : 0));
        out[i] = int16_t((code & 8 ? -v : v) * m[i]);
      }
    } else {
      for (int i = 0; i < LINE; i++) out[i] = int16_t(int16_t((codes[i] >> shift) & mask) * m[i] + z[i]);
    }
  }
}
