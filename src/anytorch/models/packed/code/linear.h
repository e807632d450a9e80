// Linear layers over packed weights: y = act(x W^T + b), with W in panels of NR columns that a tile reads in order.
#pragma once
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
  int panels = 0;
  bool gated = false;
  Block<float> weights;  // [panels][inputs][NR]
  Block<float> bias;     // [panels * NR], zero where there is none

  void prepare(int n, int k, bool is_gated) {
    outputs = n, inputs = k, gated = is_gated;
    // A gated layer's panel has NR / 2 columns of `up` and the same columns of `gate`: they meet in one tile.
    panels = gated ? round_up(n / 2, NR / 2) / (NR / 2) : round_up(n, NR) / NR;
    bias.resize(size_t(panels) * NR);
    weights.resize(size_t(panels) * inputs * NR);
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
    for (int r = 0; r < rows; r++) {
      int panel, column;
      place(first + r, &panel, &column);
      float* to = weights.data() + size_t(panel) * inputs * NR + column;
      const float* from = w + size_t(r) * inputs;
      for (int k = 0; k < inputs; k++) to[size_t(k) * NR] = from[k];
      bias[size_t(panel) * NR + column] = b ? b[r] : 0.0f;
    }
  }
  int columns() const { return gated ? outputs / 2 : outputs; }
  size_t nbytes() const { return weights.nbytes() + bias.nbytes(); }
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

// Rows [0, rows) of x through the layer. The strides are wide enough for whole panels, so the last tile may write past
// the last column.
inline void apply(const Linear& layer, const float* x, long stride, int rows, const Finish& f) {
  alignas(64) float t[MR * NR];
  int width = layer.gated ? NR / 2 : NR;
  for (int p = 0; p < layer.panels; p++) {
    const float* panel = layer.weights.data() + size_t(p) * layer.inputs * NR;
    const float* bias = layer.bias.data() + size_t(p) * NR;
    for (int row = 0; row < rows; row += MR) {
      int m = rows - row < MR ? rows - row : MR;
      TILES[m](x + row * stride, stride, panel, NR, layer.inputs, t, NR, false);
      finish(t, m, bias, layer.gated, f, row, p * width);
    }
  }
}
