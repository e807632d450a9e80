// Attention of one head over one sequence, a block of queries against a block of keys at a time, so that what is in use
// stays in the cache however long the text is. The softmax is carried along (largest score so far, sum so far) in float32.
#pragma once
#include <cmath>

#include "memory.h"
#include "simd.h"
#include "tile.h"

constexpr int KEYS = 512;                       // keys in a block; a whole number of panels
constexpr int QUERIES = MR * (48 / MR);         // queries in a block
constexpr float NOTHING = -1e30f;               // a score that no softmax sees

struct Head {
  const float *q, *k, *v;  // [length][width], rows `stride` floats apart; NR floats more can be read after the last row
  long stride;
  int length, width;
  float* out;  // [length][width]
  long out_stride;
  float scale;
  bool causal;
  int window;          // the greatest distance that attends; 0 for all
  const float* bias;   // by distance: bias[j - i]; null for none
};

struct AttentionScratch {
  Block<float> keys, scores, sums;

  void reserve(int length, int width) {
    int wide = (width + NR - 1) / NR * NR;
    int long_ = (length + NR - 1) / NR * NR;
    keys.at_least(size_t(long_) * ((width + W - 1) / W * W));
    scores.at_least(size_t(QUERIES) * KEYS);
    sums.at_least(size_t(QUERIES) * wide);
  }
};

// Scores of one query against the keys [first, first + count) of its block: scaled, biased, masked, then exponentials.
// Returns their sum; `top` is the largest score so far and is raised, `shrink` what earlier sums must be multiplied by.
INLINE float soften(float* s, int count, const Head& h, int i, int first, float* top, float* shrink) {
  int padded = (count + W - 1) / W * W;
  int low = 0, high = count;  // the keys this query sees
  if (h.causal && i - first + 1 < high) high = i - first + 1;
  if (h.window) {
    if (i - h.window - first > low) low = i - h.window - first;
    if (i + h.window - first + 1 < high) high = i + h.window - first + 1;
  }
  const vf none = fill(NOTHING), scale = fill(h.scale);
  vf best = none;
  for (int j = 0; j < padded; j += W) {
    vf x = load(s + j) * scale;
    if (h.bias) x += load(h.bias + first + j - i);
    if (j < low || j + W > high) {
      x = keep_first(x, high - j, none);
      x = keep_first(none, low - j, x);
    }
    store(s + j, x);
    best = vmax(best, x);
  }
  float now = largest(best), before = *top;
  float greater = now > before ? now : before;
  *shrink = before == greater ? 1.0f : before == NOTHING ? 0.0f : vexp(fill(before - greater))[0];
  *top = greater;
  const vf peak = fill(greater);
  vf total = vf{};
  for (int j = 0; j < padded; j += W) {
    vf e = vexp(load(s + j) - peak);
    if (j < low || j + W > high) {
      e = keep_first(e, high - j, vf{});
      e = keep_first(vf{}, low - j, e);
    }
    store(s + j, e);
    total += e;
  }
  return sum(total);
}

// Keys [0, count) as one panel, [width][NR]: W keys and W features at a time.
INLINE void pack_keys(const Head& h, int first, int count, float* panel) {
  for (int j = 0; j < NR; j += W)
    for (int d = 0; d < h.width; d += W) {
      vf rows[W];
      for (int i = 0; i < W; i++) rows[i] = j + i < count ? load(h.k + (first + j + i) * h.stride + d) : vf{};
      transpose(rows);
      int features = h.width - d < W ? h.width - d : W;
      for (int i = 0; i < features; i++) store(panel + (d + i) * NR + j, rows[i]);
    }
}

inline void attend(const Head& h, AttentionScratch& scratch) {
  int wide = (h.width + NR - 1) / NR * NR;
  int panels = (h.length + NR - 1) / NR;
  float* keys = scratch.keys.data();  // [panels][width][NR]
  for (int p = 0; p < panels; p++)
    pack_keys(h, p * NR, h.length - p * NR < NR ? h.length - p * NR : NR, keys + size_t(p) * h.width * NR);
  for (int begin = 0; begin < h.length; begin += QUERIES) {
    int queries = h.length - begin < QUERIES ? h.length - begin : QUERIES;
    float top[QUERIES], total[QUERIES];
    for (int i = 0; i < queries; i++) top[i] = NOTHING, total[i] = 0.0f;
    int from = 0, to = h.length;  // keys that any of these queries sees
    if (h.window) {
      from = begin - h.window > 0 ? (begin - h.window) / NR * NR : 0;
      if (begin + queries + h.window < to) to = begin + queries + h.window;
    }
    if (h.causal && begin + queries < to) to = begin + queries;
    float* sums = scratch.sums.data();
    for (int first = from; first < to; first += KEYS) {
      int count = to - first < KEYS ? to - first : KEYS;
      float* s = scratch.scores.data();
      for (int j = 0; j < count; j += NR)
        for (int i = 0, m; i < queries; i += m) {
          m = tile_rows(queries - i);
          TILES[m](h.q + (begin + i) * h.stride, h.stride, keys + size_t(first + j) * h.width, NR, h.width,
                   s + i * KEYS + j, KEYS, false);
        }
      for (int i = 0; i < queries; i++) {
        float shrink;
        float part = soften(s + i * KEYS, count, h, begin + i, first, &top[i], &shrink);
        total[i] = total[i] * shrink + part;
        if (first > from && shrink != 1.0f)
          for (int d = 0; d < wide; d += W) store(sums + i * wide + d, load(sums + i * wide + d) * shrink);
      }
      for (int d = 0; d < wide; d += NR)
        for (int i = 0, m; i < queries; i += m) {
          m = tile_rows(queries - i);
          TILES[m](s + i * KEYS, KEYS, h.v + first * h.stride + d, h.stride, count, sums + i * wide + d, wide,
                   first > from);
        }
    }
    for (int i = 0; i < queries; i++) {
      float whole = 1.0f / total[i];
      float* out = h.out + (begin + i) * h.out_stride;
      for (int d = 0; d < h.width; d++) out[d] = sums[i * wide + d] * whole;
    }
  }
}
