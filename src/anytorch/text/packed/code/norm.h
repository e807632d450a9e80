// Layer norm and RMS norm of one row of floats.
#pragma once
#include <cmath>

#include "simd.h"

// `y` may be `x`. `bias` may be null, `weight` if `bias` is, too.
inline void normalise_row(const float* x, float* y, int width, const float* weight, const float* bias, float eps, bool rms) {
  // Widths that are no multiple of the vector are finished by single floats, after the vectors, always in this order.
  int whole = width / W * W;
  float mean = 0.0f;
  if (!rms) {
    vf total = vf{};
    for (int i = 0; i < whole; i += W) total += load(x + i);
    mean = sum(total);
    for (int i = whole; i < width; i++) mean += x[i];
    mean /= width;
  }
  vf squares = vf{};
  for (int i = 0; i < whole; i += W) {
    vf d = load(x + i) - mean;
    squares = fma(d, d, squares);
  }
  float variance = sum(squares);
  for (int i = whole; i < width; i++) variance += (x[i] - mean) * (x[i] - mean);
  float scale = 1.0f / std::sqrt(variance / width + eps);
  if (!weight) {
    for (int i = 0; i < whole; i += W) store(y + i, (load(x + i) - mean) * scale);
    for (int i = whole; i < width; i++) y[i] = (x[i] - mean) * scale;
    return;
  }
  for (int i = 0; i < whole; i += W) {
    vf d = (load(x + i) - mean) * scale;
    store(y + i, bias ? fma(d, load(weight + i), load(bias + i)) : d * load(weight + i));
  }
  for (int i = whole; i < width; i++) y[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}
