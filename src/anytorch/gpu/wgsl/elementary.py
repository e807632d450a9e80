"""Exponentials, logarithms, powers, and the circular and hyperbolic functions, in WGSL; see `functions`."""

from __future__ import annotations

TEXT = """
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

fn pow_f32(x: f32, y: f32) -> f32 {
  if (y == 2.0) { return x * x; }
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
