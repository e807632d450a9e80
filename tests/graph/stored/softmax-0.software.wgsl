@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
struct Parameters { row: u32, size_b: u32, o0: u32 }
var<immediate> p: Parameters;
fn infinity() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }
fn maximum_f32(a: f32, b: f32) -> f32 {
  if (is_nan(a)) { return a; }
  if (is_nan(b)) { return b; }
  return max(a, b);
}
fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }
fn exp_f32(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x < -104.0) { return 0.0; }
  if (x > 88.8) { return infinity(); }
  let n = round(x * 1.44269504);
  let r = (x - n * 0.693359375) + n * 2.12194440e-4;
  return scale_exponent(exp_polynomial(r) + 1.0, i32(n));
}
fn divide_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) {
    if (x == 0.0 || is_nan(x)) { return quiet_nan(); }
    return bitcast<f32>(0x7f800000u | ((bitcast<u32>(x) ^ bitcast<u32>(y)) & 0x80000000u));
  }
  return x / y;
}
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn quiet_nan() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
fn scale_exponent(x: f32, k: i32) -> f32 {
  let half = k >> 1u;
  return x * power_of_two(half) * power_of_two(k - half);
}
fn exp_polynomial(r: f32) -> f32 {
  let p = ((((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2) * r
    + 1.6666665459e-1) * r + 5.0000001201e-1;
  return p * r * r + r;
}
fn power_of_two(k: i32) -> f32 { return bitcast<f32>(u32(k + 127) << 23u); }
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let worker = g.x + g.y * p.row;
  if (worker >= (p.size_b)) { return; }
  let i0 = worker;
  var s1 = (-infinity());
  var s2 = f32(0);
  for (var r0 = 0u; r0 < 100u; r0++) {
    let v3 = b0[p.o0 + (i0 * 100u + r0)];
    let m4 = maximum_f32(s1, v3);
    let m5 = select(m4, 0.0, is_inf(m4) && m4 < 0.0);
    let m6 = exp_f32(s1 - m5);
    s1 = m4;
    let v7 = (v3 - m5);
    let v8 = exp_f32(v7);
    s2 = s2 * m6 + v8;
  }
  for (var i1 = 0u; i1 < 100u; i1++) {
    let v9 = b0[p.o0 + (i0 * 100u + i1)];
    let v10 = (v9 - s1);
    let v11 = exp_f32(v10);
    let v12 = divide_f32(v11, s2);
    b1[(i0 * 100u + i1)] = v12;
  }
}
