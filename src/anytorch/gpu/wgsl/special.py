"""Error and gamma functions, and the pieces of activation functions and losses, in WGSL; see `functions`."""

from __future__ import annotations

TEXT = """
fn sigmoid_f32(x: f32) -> f32 { return 1.0 / (1.0 + exp_f32(-x)); }

fn softplus_f32(x: f32) -> f32 {
  if (x > 20.0 || is_nan(x)) { return x; }
  return log1p_f32(exp_f32(x));
}

fn exp_negative_square(x: f32) -> f32 {
  let h = bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);
  return exp_f32(-h * h) * exp_f32((h - x) * (h + x));
}

fn erf_small(x: f32) -> f32 {
  let z = x * x;
  return x * ((((((7.853861353153693e-5 * z - 8.010193625184903e-4) * z + 5.188327685732524e-3) * z
    - 2.685381193529856e-2) * z + 1.128358514861418e-1) * z - 3.761262582423300e-1) * z + 1.128379165726710);
}

fn erfc_scaled_large(a: f32) -> f32 {
  let q = 1.0 / a;
  let y = q * q;
  if (a < 2.0) {
    return q * ((((((((2.326819970068386e-2 * y - 1.387039388740657e-1) * y + 3.687424674597105e-1) * y
      - 5.824733027278666e-1) * y + 6.210004621745983e-1) * y - 4.944515323274145e-1) * y + 3.404879937665872e-1) * y
      - 2.741127028184656e-1) * y + 5.638259427386472e-1);
  }
  return q * (((((((-1.047766399936249e+1 * y + 1.297719955372516e+1) * y - 7.495518717768503) * y
    + 2.921019019210786) * y - 1.015265279202700) * y + 4.218463358204948e-1) * y - 2.820767439740514e-1) * y
    + 5.641895067754075e-1);
}

fn erfc_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a < 1.0) { return 1.0 - erf_small(x); }
  var tail = 0.0;
  if (a < 10.1) { tail = exp_negative_square(a) * erfc_scaled_large(a); }
  return select(tail, 2.0 - tail, x < 0.0);
}

fn erf_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a < 1.0) { return erf_small(x); }
  return copysign_f32(1.0 - erfc_f32(a), x);
}

fn erfinv_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a > 1.0) { return quiet_nan(); }
  if (a == 1.0) { return copysign_f32(infinity(), x); }
  var w = -log_f32((1.0 - a) * (1.0 + a));
  var p: f32;
  if (w < 5.0) {
    w -= 2.5;
    p = (((((((2.81022636e-08 * w + 3.43273939e-07) * w - 3.5233877e-06) * w - 4.39150654e-06) * w + 0.00021858087) * w
      - 0.00125372503) * w - 0.00417768164) * w + 0.246640727) * w + 1.50140941;
  } else {
    w = sqrt(w) - 3.0;
    p = (((((((-0.000200214257 * w + 0.000100950558) * w + 0.00134934322) * w - 0.00367342844) * w + 0.00573950773) * w
      - 0.0076224613) * w + 0.00943887047) * w + 1.00167406) * w + 2.83297682;
  }
  return p * x;
}

fn normal_cdf(x: f32) -> f32 { return 0.5 * erfc_f32(-x * 0.70710678); }

// The same to 2e-7 without a branch, for GELU: threads that go different ways made it the limit. The tail is exp(-x^2/2)
// times a polynomial in 1/(1 + 0.35|x|), fitted to scipy's erfcx over 0 to 14 (3e-8 relative). The exponential is the
// device's own: it may be off by 3 + 2|y| units in the last place of 2^y (WGSL), which is the smaller the more y is below 0,
// so that no tail is off by more than 1e-7.
fn normal_cdf_plain(x: f32) -> f32 {
  let t = abs(x);
  let k = 1.0 / (1.0 + 0.35 * t);
  let g = k * (0.13962140679 + k * (0.13986171782 + k * (0.11983407289 + k * (0.10550276190 + k * (-0.023096365854
    + k * (0.15915308893 + k * (-0.25569453835 + k * (0.14396157861 - 0.029143735766 * k))))))));
  let tail = g * exp2(-0.72134752 * t * t);
  return select(tail, 1.0 - tail, x > 0.0);
}

fn softplus_scaled(x: f32, beta: f32, threshold: f32) -> f32 {
  if (x * beta > threshold) { return x; }
  return softplus_f32(x * beta) / beta;
}

fn elu_unit(x: f32, alpha: f32, input_scale: f32) -> f32 {
  if (x > 0.0) { return x; }
  return alpha * expm1_f32(x * input_scale);
}

fn silu_slope(x: f32) -> f32 {
  let s = sigmoid_f32(x);
  return s * (1.0 + x * (1.0 - s));
}

fn mish_slope(x: f32) -> f32 {
  let t = tanh_f32(softplus_f32(x));
  return t + x * sigmoid_f32(x) * (1.0 - t * t);
}

fn hardswish_slope(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x <= -3.0) { return 0.0; }
  if (x >= 3.0) { return 1.0; }
  return x / 3.0 + 0.5;
}

fn gelu_tanh_slope(x: f32) -> f32 {
  let t = tanh_f32(0.7978845608 * (x + 0.044715 * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608 * (1.0 + 0.134145 * x * x);
}

fn smooth_l1(difference: f32, beta: f32) -> f32 {
  let a = abs(difference);
  if (a < beta) { return 0.5 * a * a / beta; }
  return a - 0.5 * beta;
}

fn smooth_l1_slope(difference: f32, beta: f32) -> f32 {
  if (abs(difference) < beta) { return difference / beta; }
  return select(sign_f32(difference), difference, is_nan(difference));
}

fn huber(difference: f32, delta: f32) -> f32 {
  let a = abs(difference);
  if (a <= delta) { return 0.5 * a * a; }
  return delta * (a - 0.5 * delta);
}

fn binary_cross_entropy(x: f32, t: f32) -> f32 {
  return (t - 1.0) * maximum_f32(log1p_f32(-x), -100.0) - t * maximum_f32(log_f32(x), -100.0);
}

fn lgamma_positive(x: f32) -> f32 {
  var y = x;
  var product = 1.0;
  if (x > 1e30) { return x * (log_f32(x) - 1.0); }
  if (x < 7.0) {
    let steps = i32(ceil(7.0 - x));
    for (var k = 0; k < steps; k++) { product *= y; y += 1.0; }
  }
  let q = 1.0 / (y * y);
  let tail = (8.333333333e-2 + q * (-2.777777778e-3 + q * 7.936507937e-4)) / y;
  let l = log_f32(y);
  return ((y * (l - 1.0) - 0.5 * l) + 0.9189385332 + tail) - log_f32(product);
}

fn lgamma_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (is_inf(x)) { return infinity(); }
  if (x > 0.0) { return lgamma_positive(x); }
  if (x == floor(x)) { return infinity(); }
  let fraction = x - round(x);
  return 1.1447298858 - log_f32(abs(sin_f32(3.14159265 * fraction))) - lgamma_positive(1.0 - x);
}

fn digamma_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x == 0.0) { return copysign_f32(infinity(), -x); }
  var y = x;
  var sum = 0.0;
  if (x < 0.0) {
    if (x == floor(x)) { return quiet_nan(); }
    let fraction = x - round(x);
    sum = -3.14159265 / tan_f32(3.14159265 * fraction);
    y = 1.0 - x;
  }
  if (is_inf(y)) { return y; }
  while (y < 10.0) { sum -= 1.0 / y; y += 1.0; }
  let q = 1.0 / (y * y);
  return sum + log_f32(y) - 0.5 / y - q * (8.333333333e-2 - q * (8.333333333e-3 - q * 3.968253968e-3));
}

fn logaddexp_f32(a: f32, b: f32) -> f32 {
  if (is_inf(a) && a == b) { return a; }
  return max(a, b) + log1p_f32(exp_f32(-abs(a - b)));
}

fn logaddexp2_f32(a: f32, b: f32) -> f32 {
  if (is_inf(a) && a == b) { return a; }
  return max(a, b) + 1.44269504 * log1p_f32(exp2_f32(-abs(a - b)));
}

fn xlogy_f32(x: f32, y: f32) -> f32 {
  if (is_nan(y)) { return y; }
  if (x == 0.0) { return 0.0; }
  return x * log_f32(y);
}

fn xlog1py_f32(x: f32, y: f32) -> f32 {
  if (is_nan(y)) { return y; }
  if (x == 0.0) { return 0.0; }
  return x * log1p_f32(y);
}

fn entropy_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x > 0.0) { return -x * log_f32(x); }
  if (x == 0.0) { return 0.0; }
  return -infinity();
}

fn sinc_f32(x: f32) -> f32 {
  if (x == 0.0) { return 1.0; }
  let a = abs(x);
  if (!is_finite(x)) { return quiet_nan(); }
  let turn = a - 2.0 * floor(0.5 * a);
  return sin_f32(3.14159265 * turn) / (3.14159265 * a);
}

fn trigamma_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (is_inf(x)) { return select(quiet_nan(), 0.0, x > 0.0); }
  var y = x;
  var sum = 0.0;
  var sign = 1.0;
  if (x <= 0.0) {
    if (x == floor(x)) { return infinity(); }
    let s = sin_f32(3.14159265 * (x - round(x)));
    sum = 9.8696044 / (s * s);
    sign = -1.0;
    y = 1.0 - x;
  }
  var steps = 0.0;
  while (y < 8.0) { steps += 1.0 / (y * y); y += 1.0; }
  let q = 1.0 / (y * y);
  let tail = (1.0 + 0.5 / y + q * (1.6666667e-1 - q * (3.3333333e-2 - q * 2.3809524e-2))) / y;
  return sum + sign * (steps + tail);
}
"""
