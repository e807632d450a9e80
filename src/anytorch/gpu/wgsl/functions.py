"""Functions that WGSL lacks, or promises too little of: the float ones have a relative error near 1e-6 on every adapter.

WGSL allows `sin` an absolute error of 2^-11, `atan2` 4096 units in the last place, and `log` near 1 no correct digit; so
they are written out here. A name ends in the type it computes in, and an expression asks for `exp_{T}(…)`: a type for which
the function does not exist has no kernel (`computable`). No step relies on `(a + b) - a`, which a compiler may fold.
"""

from __future__ import annotations

import re
from functools import lru_cache

from anytorch.gpu.wgsl.types import HELPERS

_TEXTS = """
fn power_of_two(k: i32) -> f32 { return bitcast<f32>(u32(k + 127) << 23u); }

fn scale_exponent(x: f32, k: i32) -> f32 {
  let half = k >> 1u;
  return x * power_of_two(half) * power_of_two(k - half);
}

fn exp_polynomial(r: f32) -> f32 {
  let p = ((((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2) * r
    + 1.6666665459e-1) * r + 5.0000001201e-1;
  return p * r * r + r;
}

fn exp_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x < -104.0) { return 0.0; }
  if (x > 88.8) { return infinity(); }
  let n = round(x * 1.44269504);
  let r = (x - n * 0.693359375) + n * 2.12194440e-4;
  return scale_exponent(exp_polynomial(r) + 1.0, i32(n));
}

fn exp2_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x < -150.0) { return 0.0; }
  if (x >= 128.0) { return infinity(); }
  let n = round(x);
  return scale_exponent(exp_polynomial((x - n) * 0.69314718) + 1.0, i32(n));
}

fn expm1_f32(x: f32) -> f32 {
  if (abs(x) < 0.35) { return exp_polynomial(x); }
  return exp_f32(x) - 1.0;
}

fn log1p_polynomial(f: f32) -> f32 {
  let p = (((((((7.0376836292e-2 * f - 1.1514610310e-1) * f + 1.1676998740e-1) * f - 1.2420140846e-1) * f
    + 1.4249322787e-1) * f - 1.6668057665e-1) * f + 2.0000714765e-1) * f - 2.4999993993e-1) * f + 3.3333331174e-1;
  let z = f * f;
  return f + (f * z * p - 0.5 * z);
}

fn split_exponent(x: f32) -> vec2<f32> {
  var y = x;
  var e = -126.0;
  if (x < 1.17549435e-38) { y = x * 8388608.0; e = -149.0; }
  let bits = bitcast<u32>(y);
  e += f32(bits >> 23u);
  var m = bitcast<f32>((bits & 0x7fffffu) | 0x3f000000u);
  if (m < 0.70710678) { e -= 1.0; m += m; }
  return vec2<f32>(m - 1.0, e);
}

fn log_outside(x: f32) -> f32 {
  if (x == 0.0) { return -infinity(); }
  if (x < 0.0) { return quiet_nan(); }
  return x;
}

fn is_positive_finite(x: f32) -> bool { return bitcast<u32>(x) - 1u < 0x7f7fffffu; }

fn log_f32(x: f32) -> f32 {
  if (!is_positive_finite(x)) { return log_outside(x); }
  let s = split_exponent(x);
  return (log1p_polynomial(s.x) + s.y * -2.12194440e-4) + s.y * 0.693359375;
}

fn log2_f32(x: f32) -> f32 {
  if (!is_positive_finite(x)) { return log_outside(x); }
  let s = split_exponent(x);
  return log1p_polynomial(s.x) * 1.44269504 + s.y;
}

fn log10_f32(x: f32) -> f32 { return log_f32(x) * 0.4342944819; }

fn log1p_f32(x: f32) -> f32 {
  if (x > -0.29289 && x < 0.41421) { return log1p_polynomial(x); }
  return log_f32(1.0 + x);
}

fn sinh_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a < 1e-4) { return x; }
  if (a < 10.0) { let e = expm1_f32(a); return copysign_f32(0.5 * (e + e / (e + 1.0)), x); }
  let half = exp_f32(0.5 * a);
  return copysign_f32((0.5 * half) * half, x);
}

fn cosh_f32(x: f32) -> f32 {
  let a = abs(x);
  if (a < 10.0) { let e = exp_f32(a); return 0.5 * (e + 1.0 / e); }
  let half = exp_f32(0.5 * a);
  return (0.5 * half) * half;
}

fn tanh_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x) || a < 1e-4) { return x; }
  if (a > 10.0) { return copysign_f32(1.0, x); }
  let e = expm1_f32(2.0 * a);
  return copysign_f32(e / (e + 2.0), x);
}

fn asinh_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a > 1e8) { return copysign_f32(log_f32(a) + 0.69314718, x); }
  return copysign_f32(log1p_f32(a + a * (a / (1.0 + sqrt(a * a + 1.0)))), x);
}

fn acosh_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x < 1.0) { return quiet_nan(); }
  if (x > 1e8) { return log_f32(x) + 0.69314718; }
  let t = x - 1.0;
  return log1p_f32(t + sqrt(2.0 * t + t * t));
}

fn atanh_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a > 1.0) { return quiet_nan(); }
  if (a == 1.0) { return copysign_f32(infinity(), x); }
  return copysign_f32(0.5 * log1p_f32(2.0 * (a / (1.0 - a))), x);
}

fn copysign_f32(x: f32, sign: f32) -> f32 {
  return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(sign) & 0x80000000u));
}

fn multiply_wide(a: u32, b: u32) -> vec2<u32> {
  let al = a & 0xffffu; let ah = a >> 16u; let bl = b & 0xffffu; let bh = b >> 16u;
  let low = al * bl; let m1 = ah * bl; let m2 = al * bh;
  let middle = (low >> 16u) + (m1 & 0xffffu) + (m2 & 0xffffu);
  return vec2<u32>((middle << 16u) | (low & 0xffffu), ah * bh + (m1 >> 16u) + (m2 >> 16u) + (middle >> 16u));
}

fn reduce_large(x: f32) -> vec2<f32> {
  var words = array<u32, 6>(0x3c439041u, 0xdb629599u, 0xf534ddc0u, 0xfc2757d1u, 0x4e441529u, 0xa2f9836eu);
  var product: array<u32, 7>;
  let bits = bitcast<u32>(x);
  let mantissa = (bits << 8u) | 0x80000000u;
  var carry = 0u;
  for (var k = 0u; k < 6u; k++) {
    let wide = multiply_wide(words[k], mantissa);
    let low = wide.x + carry;
    product[k] = low;
    carry = wide.y + select(0u, 1u, low < carry);
  }
  product[6] = carry;
  let shift = ((bits >> 23u) & 0xffu) - 128u;
  let top = 6u - (shift >> 5u);
  let part = shift & 31u;
  var high = product[top];
  var low = product[top - 1u];
  if (part > 0u) {
    high = (high << part) | (low >> (32u - part));
    low = (low << part) | (product[top - 2u] >> (32u - part));
  }
  var quadrant = high >> 30u;
  high = (high << 2u) | (low >> 30u);
  low = low << 2u;
  var sign = 1.0;
  if (high >= 0x80000000u) {
    quadrant += 1u;
    sign = -1.0;
    high = ~high; low = ~low;
  }
  let r = sign * (f32(high) * 2.3283064e-10 + f32(low) * 5.4210109e-20) * 1.57079633;
  if ((bits >> 31u) == 1u) { return vec2<f32>(-r, f32((4u - quadrant) & 3u)); }
  return vec2<f32>(r, f32(quadrant & 3u));
}

fn reduce_angle(x: f32) -> vec2<f32> {
  if (abs(x) > 4096.0) { return reduce_large(x); }
  let n = round(x * 0.63661977);
  let r = ((x - n * 1.5703125) - n * 4.837512969970703125e-4) - n * 7.54978995489188216e-8;
  return vec2<f32>(r, f32(i32(n) & 3));
}

fn sin_polynomial(r: f32) -> f32 {
  let z = r * r;
  return r + r * z * ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1);
}

fn cos_polynomial(r: f32) -> f32 {
  let z = r * r;
  return 1.0 - 0.5 * z + z * z * ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2);
}

fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

fn sin_f32(x: f32) -> f32 {
  if (!is_finite(x)) { return quiet_nan(); }
  let a = reduce_angle(x);
  var y: f32;
  if (a.y == 1.0 || a.y == 3.0) { y = cos_polynomial(a.x); } else { y = sin_polynomial(a.x); }
  return select(y, -y, a.y >= 2.0);
}

fn cos_f32(x: f32) -> f32 {
  if (!is_finite(x)) { return quiet_nan(); }
  let a = reduce_angle(x);
  var y: f32;
  if (a.y == 1.0 || a.y == 3.0) { y = sin_polynomial(a.x); } else { y = cos_polynomial(a.x); }
  return select(y, -y, a.y == 1.0 || a.y == 2.0);
}

fn tan_f32(x: f32) -> f32 {
  if (!is_finite(x)) { return quiet_nan(); }
  let a = reduce_angle(x);
  let s = sin_polynomial(a.x);
  let c = cos_polynomial(a.x);
  if (a.y == 1.0 || a.y == 3.0) { return -c / s; }
  return s / c;
}

fn atan_f32(x: f32) -> f32 {
  var a = abs(x);
  if (is_nan(x)) { return x; }
  var base = 0.0;
  if (a > 2.414213562) { base = 1.57079633; a = -1.0 / min(a, 1e30); }
  else if (a > 0.414213562) { base = 0.785398163; a = (a - 1.0) / (a + 1.0); }
  let z = a * a;
  let p = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1) * z * a + a;
  return copysign_f32(base + p, x);
}

fn atan2_f32(y: f32, x: f32) -> f32 {
  if (is_nan(x) || is_nan(y)) { return quiet_nan(); }
  var ay = abs(y);
  var ax = abs(x);
  if (is_inf(x) && is_inf(y)) { ay = 1.0; ax = 1.0; }
  var r: f32;
  if (ay > ax) { r = 1.57079633 - atan_f32(ax / ay); }
  else if (ax == 0.0) { r = 0.0; }
  else { r = atan_f32(ay / ax); }
  if ((bitcast<u32>(x) >> 31u) == 1u) { r = 3.14159265 - r; }
  return copysign_f32(r, y);
}

fn asin_polynomial(x: f32) -> f32 {
  let z = x * x;
  return ((((4.2163199048e-2 * z + 2.4181311049e-2) * z + 4.5470025998e-2) * z + 7.4953002686e-2) * z
    + 1.6666752422e-1) * z * x + x;
}

fn asin_f32(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a > 1.0) { return quiet_nan(); }
  if (a <= 0.5) { return asin_polynomial(x); }
  return copysign_f32(1.57079633 - 2.0 * asin_polynomial(sqrt(0.5 * (1.0 - a))), x);
}

fn acos_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (abs(x) > 1.0) { return quiet_nan(); }
  if (x > 0.5) { return 2.0 * asin_polynomial(sqrt(0.5 * (1.0 - x))); }
  if (x < -0.5) { return 3.14159265 - 2.0 * asin_polynomial(sqrt(0.5 * (1.0 + x))); }
  return 1.57079633 - asin_polynomial(x);
}

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

fn hypot_f32(a: f32, b: f32) -> f32 {
  if (is_inf(a) || is_inf(b)) { return infinity(); }
  if (is_nan(a) || is_nan(b)) { return quiet_nan(); }
  let large = max(abs(a), abs(b));
  if (large == 0.0) { return 0.0; }
  let ratio = min(abs(a), abs(b)) / large;
  return large * sqrt(1.0 + ratio * ratio);
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

fn fmod_f32(x: f32, y: f32) -> f32 {
  if (is_nan(x) || is_nan(y) || is_inf(x) || y == 0.0) { return quiet_nan(); }
  if (is_inf(y)) { return x; }
  var rest = abs(x);
  let divisor = abs(y);
  if (rest >= divisor) {
    let highest = i32((bitcast<u32>(rest) >> 23u)) - i32((bitcast<u32>(divisor) >> 23u));
    for (var k = highest; k >= 0; k--) {
      let multiple = scale_exponent(divisor, k);
      if (rest >= multiple) { rest -= multiple; }
    }
  }
  return copysign_f32(rest, x);
}

fn remainder_f32(x: f32, y: f32) -> f32 {
  let m = fmod_f32(x, y);
  if (m != 0.0 && (m < 0.0) != (y < 0.0)) { return m + y; }
  return m;
}

fn floor_divide_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) { return divide_f32(x, y); }
  let m = fmod_f32(x, y);
  var quotient = (x - m) / y;
  if (m != 0.0 && (m < 0.0) != (y < 0.0)) { quotient -= 1.0; }
  if (quotient == 0.0) { return copysign_f32(0.0, x / y); }
  let down = floor(quotient);
  return select(down, down + 1.0, quotient - down > 0.5);
}

fn divide_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) {
    if (x == 0.0 || is_nan(x)) { return quiet_nan(); }
    return bitcast<f32>(0x7f800000u | ((bitcast<u32>(x) ^ bitcast<u32>(y)) & 0x80000000u));
  }
  return x / y;
}

fn trunc_divide_f32(x: f32, y: f32) -> f32 { return trunc(divide_f32(x, y)); }

fn maximum_f32(a: f32, b: f32) -> f32 {
  if (is_nan(a)) { return a; }
  if (is_nan(b)) { return b; }
  return max(a, b);
}

fn minimum_f32(a: f32, b: f32) -> f32 {
  if (is_nan(a)) { return a; }
  if (is_nan(b)) { return b; }
  return min(a, b);
}

fn fmax_f32(a: f32, b: f32) -> f32 {
  if (is_nan(a)) { return b; }
  if (is_nan(b)) { return a; }
  return max(a, b);
}

fn fmin_f32(a: f32, b: f32) -> f32 {
  if (is_nan(a)) { return b; }
  if (is_nan(b)) { return a; }
  return min(a, b);
}

fn equal_f32(a: f32, b: f32) -> bool { return a == b && !is_nan(a) && !is_nan(b); }

fn at_most_f32(a: f32, b: f32) -> bool { return a <= b && !is_nan(a) && !is_nan(b); }

fn sign_f32(x: f32) -> f32 {
  if (x > 0.0) { return 1.0; }
  return select(0.0, -1.0, x < 0.0);
}

fn pow_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0 || x == 1.0) { return 1.0; }
  if (is_nan(x) || is_nan(y)) { return quiet_nan(); }
  let a = abs(x);
  if (is_inf(y)) {
    if (a == 1.0) { return 1.0; }
    if ((a > 1.0) == (y > 0.0)) { return infinity(); }
    return 0.0;
  }
  let whole = floor(y) == y;
  let odd = whole && abs(y) < 16777216.0 && (i32(y) & 1) != 0;
  let negative = (bitcast<u32>(x) >> 31u) == 1u;
  let sign = select(1.0, -1.0, negative && odd);
  if (a == 0.0) {
    if (y < 0.0) { return sign * infinity(); }
    return sign * 0.0;
  }
  if (is_inf(x)) {
    if (y > 0.0) { return sign * infinity(); }
    return sign * 0.0;
  }
  if (negative && !whole) { return quiet_nan(); }
  return sign * pow_positive(a, y);
}

fn pow_positive(a: f32, y: f32) -> f32 {
  let s = split_exponent(a);
  let l = log1p_polynomial(s.x) * 1.44269504;
  let yh = bitcast<f32>(bitcast<u32>(y) & 0xffff0000u);
  let first = yh * s.y;
  if (abs(first) > 400.0 && abs(y * (s.y + l)) > 300.0) { return select(0.0, infinity(), y * (s.y + l) > 0.0); }
  let n1 = round(first);
  let second = (y - yh) * s.y + y * l;
  let n2 = round(second);
  let r = (first - n1) + (second - n2);
  let n = n1 + n2;
  if (n > 300.0) { return infinity(); }
  if (n < -300.0) { return 0.0; }
  let value = exp_polynomial(r * 0.69314718) + 1.0;
  let k = i32(n);
  let third = k / 3;
  return value * power_of_two(third) * power_of_two(third) * power_of_two(k - 2 * third);
}
"""

# The same in every integer type. A division by zero has no answer; what is returned must only not stop the device.
_INTEGER = """
fn divide_T(x: T, y: T) -> T {
  if (y == T(0)) { return T(-1); }
  if (y == T(-1)) { return -x; }
  return x / y;
}

fn trunc_divide_T(x: T, y: T) -> T { return divide_T(x, y); }

fn fmod_T(x: T, y: T) -> T {
  if (y == T(0)) { return x; }
  if (y == T(-1)) { return T(0); }
  return x - (x / y) * y;
}

fn remainder_T(x: T, y: T) -> T {
  let m = fmod_T(x, y);
  if (m != T(0) && (m < T(0)) != (y < T(0))) { return m + y; }
  return m;
}

fn floor_divide_T(x: T, y: T) -> T {
  let q = divide_T(x, y);
  let m = fmod_T(x, y);
  if (m != T(0) && y != T(0) && (m < T(0)) != (y < T(0))) { return q - T(1); }
  return q;
}

fn pow_T(x: T, y: T) -> T {
  if (y < T(0)) {
    if (x == T(1)) { return T(1); }
    if (x == T(-1)) { return select(T(1), T(-1), (y & T(1)) != T(0)); }
    return T(0);
  }
  var result = T(1);
  var base = x;
  var exponent = y;
  while (exponent > T(0)) {
    if ((exponent & T(1)) != T(0)) { result *= base; }
    base *= base;
    exponent = exponent >> 1u;
  }
  return result;
}

fn gcd_T(x: T, y: T) -> T {
  var a = abs(x);
  var b = abs(y);
  while (b != T(0)) { let r = fmod_T(a, b); a = b; b = r; }
  return a;
}

fn lcm_T(x: T, y: T) -> T {
  let g = gcd_T(x, y);
  if (g == T(0)) { return T(0); }
  return abs((x / g) * y);
}

fn shift_left_T(x: T, y: T) -> T {
  if (y < T(0) || y >= T(BITS)) { return T(0); }
  return x << u32(y);
}

fn shift_right_T(x: T, y: T) -> T {
  if (y < T(0) || y >= T(BITS)) { return x >> (BITSu - 1u); }
  return x >> u32(y);
}
"""

# What is the builtin, or nothing at all, in some of the types.
_PLAIN = """
fn sign_T(x: T) -> T {
  if (x > T(0)) { return T(1); }
  if (x < T(0)) { return T(-1); }
  return T(0);
}

fn equal_T(a: T, b: T) -> bool { return a == b; }

fn at_most_T(a: T, b: T) -> bool { return a <= b; }
"""

_INTEGER_PLAIN = """
fn maximum_T(a: T, b: T) -> T { return select(a, b, b > a); }

fn minimum_T(a: T, b: T) -> T { return select(a, b, b < a); }

fn fmax_T(a: T, b: T) -> T { return select(a, b, b > a); }

fn fmin_T(a: T, b: T) -> T { return select(a, b, b < a); }

fn floor_T(x: T) -> T { return x; }

fn ceil_T(x: T) -> T { return x; }

fn trunc_T(x: T) -> T { return x; }

fn round_T(x: T) -> T { return x; }
"""

_FLOAT_PLAIN = """
fn floor_T(x: T) -> T { return floor(x); }

fn ceil_T(x: T) -> T { return ceil(x); }

fn trunc_T(x: T) -> T { return trunc(x); }

fn round_T(x: T) -> T { return round(x); }
"""


def _split(text: str) -> dict[str, str]:
    found = {}
    for part in re.split(r"\n(?=fn )", text):
        matched = re.match(r"fn (\w+)\(", part)
        if matched:
            found[matched.group(1)] = part.strip() + "\n"
    return found


def _typed(text: str, name: str, bits: int) -> str:
    return re.sub(r"\bT\b", name, text.replace("_T(", f"_{name}(").replace("BITS", str(bits)))


FUNCTIONS: dict[str, str] = {**HELPERS, **_split(_TEXTS)}
for _name, _bits in (("i32", 32), ("i64", 64)):
    FUNCTIONS.update(_split(_typed(_INTEGER + _PLAIN + _INTEGER_PLAIN, _name, _bits)))
FUNCTIONS.update(_split(_typed(_FLOAT_PLAIN, "f32", 32)))
FUNCTIONS.update(_split(_typed(_PLAIN + _FLOAT_PLAIN, "f64", 64)))
FUNCTIONS["divide_f64"] = "fn divide_f64(x: f64, y: f64) -> f64 { return x / y; }\n"

# Functions without a type in their name take floats.
_FLOAT_ONLY = {name for name in _split(_TEXTS) if not name.endswith("_f32")}

_CALL = re.compile(r"\b(\w+)\(")
_TYPED = re.compile(r"_(f32|f64|i32|i64)$")
# Builtins that have no 64-bit form.
_SINGLE = frozenset(
    ["exp", "exp2", "log", "log2", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "pow", "inverseSqrt", "is_nan", "is_inf", "quiet_nan", "infinity", "bf16_bits"]
)


def computable(expression: str, kind: str) -> bool:
    """Can `expression` be computed in WGSL type `kind`? False where it names a function that type has no form of."""
    called = set(_CALL.findall(expression))
    if any(_TYPED.search(name) and name not in FUNCTIONS for name in called):
        return False
    if kind in ("f64", "i64", "i32") and any(name in _FLOAT_ONLY for name in called):
        return False
    return kind != "f64" or not (called & _SINGLE)


@lru_cache(maxsize=1024)
def needed(text: str) -> str:
    """The definitions of every function of ours that `text` calls, directly or not."""
    wanted: list[str] = []
    queue = [text]
    while queue:
        for name in _CALL.findall(queue.pop()):
            if name in FUNCTIONS and name not in wanted:
                wanted.append(name)
                queue.append(FUNCTIONS[name].partition("{")[2])
    return "".join(FUNCTIONS[name] for name in wanted)
