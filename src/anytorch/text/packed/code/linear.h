// Linear layers over packed weights: y = act(x W^T + b), with W in panels of NR columns that a tile reads in order.
#pragma once
#include "formats.h"
#include "integer.h"
#include "memory.h"
#include "simd.h"
#include "tile.h"

enum Activation { NONE = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SILU = 4 };

template <int ACT>
INLINE vf activate(vf x) {
  if (ACT == GELU) return gelu(x);
  if (ACT == GELU_TANH) return gelu_tanh(x);
  if (ACT == RELU) return vmax(x, vf{});
  if (ACT == SILU) return silu(x);
  return x;
}

INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct Linear {
  int outputs = 0, inputs = 0;  // outputs counts gate and up together
  int padded = 0;               // inputs of a panel in memory: whole groups
  int panels = 0;
  int format = F32;
  bool gated = false;
  bool fours = false;      // 8-bit activations: an INT8 panel is [padded / 4][NR][4] then
  Block<float> weights;    // F32: [panels][inputs][NR]
  Block<uint8_t> codes;    // [panels] of panel_nbytes
  Block<uint8_t> m;        // [panels][groups][NR]
  Block<int16_t> z;
  Block<float> scale;      // [panels * NR], and what follows
  Block<int32_t> sums;     // of the whole numbers, for 8-bit activations
  Block<float> bias;       // zero where there is none
  Block<float> less;       // [inputs]: activations are multiplied by it before they are rounded; may be empty
  Block<float> importance; // [inputs]: how much an error of that input's weights matters; only while rows are filled
  float most = 32767.0f;   // the greatest 16-bit activation: no sum can leave 32 bits

  void prepare(int n, int k, bool is_gated, int f, bool bytes) {
    *this = Linear();
    outputs = n, inputs = k, gated = is_gated, format = f, fours = bytes;
    padded = format == F32 ? inputs : round_up(inputs, 32);
    // A gated layer's panel has NR / 2 columns of `up` and the same columns of `gate`: they meet in one tile.
    panels = gated ? round_up(n / 2, NR / 2) / (NR / 2) : round_up(n, NR) / NR;
    size_t columns = size_t(panels) * NR;
    bias.resize(columns);
    if (format == F32) {
      weights.resize(columns * inputs);
      return;
    }
    codes.resize(size_t(panels) * panel_nbytes(format, padded));
    scale.resize(columns);
    if (fours) sums.resize(columns);
    if (format != INT8) m.resize(columns * (padded / GROUP)), z.resize(columns * (padded / GROUP));
  }
  // Where output `n` is: in panel, column.
  void place(int n, int* panel, int* column) const {
    if (!gated) {
      *panel = n / NR, *column = n % NR;
    } else {
      int half = outputs / 2, c = n % half;
      *panel = c / (NR / 2), *column = c % (NR / 2) + (n < half ? 0 : NR / 2);
    }
  }
  // Takes rows of W, [rows][inputs], as outputs first, first + 1, ...
  void fill_rows(const float* w, const float* b, int rows, int first) {
    Coded coded;
    Block<float> smoothed;
    if (format != F32) coded.resize(padded);
    if (less.size()) smoothed.resize(inputs);
    for (int r = 0; r < rows; r++) {
      int panel, column;
      place(first + r, &panel, &column);
      const float* from = w + size_t(r) * inputs;
      bias[size_t(panel) * NR + column] = b ? b[r] : 0.0f;
      if (format == F32) {
        float* to = weights.data() + size_t(panel) * inputs * NR + column;
        for (int k = 0; k < inputs; k++) to[size_t(k) * NR] = from[k];
        continue;
      }
      if (less.size()) {
        for (int k = 0; k < inputs; k++) smoothed[k] = from[k] / less[k];
        from = smoothed.data();
      }
      if (format == INT8)
        code_int8(from, inputs, padded, coded);
      else
        code_groups(from, importance.data(), inputs, padded, format, coded);
      scale[size_t(panel) * NR + column] = coded.scale;
      uint8_t* to = codes.data() + size_t(panel) * panel_nbytes(format, padded);
      if (fours) {
        int32_t total = 0;
        for (int k = 0; k < padded; k++) {
          to[size_t(k / 4) * NR * 4 + column * 4 + k % 4] = coded.code[k];
          total += int8_t(coded.code[k]);
        }
        sums[size_t(panel) * NR + column] = total;
      } else {
        size_t groups = format == INT8 ? 0 : size_t(panel) * (padded / GROUP) * NR;
        put(coded, format, padded, column, to, m.data() + groups, z.data() + groups);
      }
      float bound = coded.heaviest > 0 ? float(std::floor(2147483000.0 / coded.heaviest)) : 32767.0f;
      if (bound < most) most = bound;
    }
  }
  int columns() const { return gated ? outputs / 2 : outputs; }
  size_t nbytes() const {
    return weights.nbytes() + codes.nbytes() + m.nbytes() + z.nbytes() + scale.nbytes() + sums.nbytes() + bias.nbytes() +
           less.nbytes();
  }
};

// Activations as whole numbers, and the panel in use as 16-bit numbers.
struct Whole {
  Block<int32_t> words;  // [rows][stride]
  Block<float> scale;
  Block<int32_t> zero;
  Block<int16_t> panel;

  void reserve(int rows, int longest) {
    words.at_least(size_t(rows) * (longest / 2 + 16));
    scale.at_least(rows), zero.at_least(rows);
    panel.at_least(size_t(longest) * NR);
  }
};

// What becomes of a finished tile.
struct Finish {
  float* out;
  long stride;
  const float* residual = nullptr;  // added; may be `out`
  long residual_stride = 0;
  int activation = NONE;
};

template <int ACT>
INLINE void finish_rows(const float* t, int rows, const float* bias, bool gated, const Finish& f, int row, int column) {
  for (int m = 0; m < rows; m++, t += NR) {
    float* out = f.out + (row + m) * f.stride + column;
    if (gated) {
      for (int v = 0; v < NV / 2; v++) {
        vf up = load(t + v * W) + load(bias + v * W);
        vf gate = load(t + NR / 2 + v * W) + load(bias + NR / 2 + v * W);
        store(out + v * W, up * activate<ACT>(gate));
      }
      continue;
    }
    for (int v = 0; v < NV; v++) {
      vf x = activate<ACT>(load(t + v * W) + load(bias + v * W));
      if (f.residual) x += load(f.residual + (row + m) * f.residual_stride + column + v * W);
      store(out + v * W, x);
    }
  }
}
INLINE void finish(const float* t, int rows, const float* bias, bool gated, const Finish& f, int row, int column) {
  switch (f.activation) {
    case GELU: return finish_rows<GELU>(t, rows, bias, gated, f, row, column);
    case GELU_TANH: return finish_rows<GELU_TANH>(t, rows, bias, gated, f, row, column);
    case RELU: return finish_rows<RELU>(t, rows, bias, gated, f, row, column);
    case SILU: return finish_rows<SILU>(t, rows, bias, gated, f, row, column);
    default: return finish_rows<NONE>(t, rows, bias, gated, f, row, column);
  }
}

INLINE void apply_float(const Linear& layer, const float* x, long stride, int rows, const Finish& f) {
  alignas(64) float t[MR * NR];
  int width = layer.gated ? NR / 2 : NR;
  for (int p = 0; p < layer.panels; p++) {
    const float* panel = layer.weights.data() + size_t(p) * layer.inputs * NR;
    const float* bias = layer.bias.data() + size_t(p) * NR;
    for (int row = 0; row < rows;) {
      int m = tile_rows(rows - row);
      TILES[m](x + row * stride, stride, panel, NR, layer.inputs, t, NR, false);
      finish(t, m, bias, layer.gated, f, row, p * width);
      row += m;
    }
  }
}

INLINE void apply_whole(const Linear& layer, const float* x, long stride, int rows, const Finish& f, Whole& whole) {
  alignas(64) float t[MR * NR];
  int width = layer.gated ? NR / 2 : NR;
  int count = layer.padded / (layer.fours ? 4 : 2);  // words of a row
  long step = count + 16;
  int32_t* words = whole.words.data();
  for (int r = 0; r < rows; r++) {
    void* to = words + r * step;
    whole.scale[r] = layer.fours ? byte_row(x + r * stride, layer.less.data(), layer.inputs, layer.padded, static_cast<uint8_t*>(to), &whole.zero[r])
                                 : whole_row(x + r * stride, layer.less.data(), layer.inputs, layer.padded, layer.most, static_cast<int16_t*>(to));
  }
  size_t groups = layer.format == INT8 ? 0 : size_t(layer.padded / GROUP) * NR;
  const WholeTile* tiles = layer.fours ? FOUR_TILES : PAIR_TILES;
  for (int p = 0; p < layer.panels; p++) {
    Panel panel{layer.codes.data() + p * panel_nbytes(layer.format, layer.padded), layer.m.data() + p * groups, layer.z.data() + p * groups};
    const int32_t* b = reinterpret_cast<const int32_t*>(panel.codes);
    if (!layer.fours) {
      unpack(panel, layer.format, layer.padded, whole.panel.data());
      b = reinterpret_cast<const int32_t*>(whole.panel.data());
    }
    size_t column = size_t(p) * NR;
    for (int row = 0; row < rows;) {
      int m = tile_rows(rows - row);
      tiles[m](words + row * step, step, b, count, whole.scale.data() + row, whole.zero.data() + row, layer.scale.data() + column,
               layer.sums.data() + column, t);
      finish(t, m, layer.bias.data() + column, layer.gated, f, row, p * width);
      row += m;
    }
  }
}

// Rows [0, rows) of x through the layer. The strides are wide enough for whole panels, so the last tile may write past
// the last column.
inline void apply(const Linear& layer, const float* x, long stride, int rows, const Finish& f, Whole& whole) {
  if (layer.format == F32)
    apply_float(layer, x, stride, rows, f);
  else
    apply_whole(layer, x, stride, rows, f, whole);
}
