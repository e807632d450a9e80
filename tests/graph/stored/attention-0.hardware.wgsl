@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
struct Parameters { row: u32, size_b: u32, size_n: u32, size_t: u32, o0: u32, o1: u32, o2: u32 }
var<immediate> p: Parameters;
fn maximum_f32(a: f32, b: f32) -> f32 {
  if (is_nan(a)) { return a; }
  if (is_nan(b)) { return b; }
  return max(a, b);
}
fn infinity() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }
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
var<workgroup> stage16: array<f32, 64>;
var<workgroup> held_f32: array<f32, 64>;
fn fold_max_f32(mine: f32, lane: u32) -> f32 {
  held_f32[lane] = mine;
  workgroupBarrier();
  for (var d = 32u; d > 0u; d = d >> 1u) {
    if (lane < d) { held_f32[lane] = maximum_f32(held_f32[lane], held_f32[lane + d]); }
    workgroupBarrier();
  }
  let all = held_f32[0];
  workgroupBarrier();
  return all;
}
fn fold_sum_f32(mine: f32, lane: u32) -> f32 {
  held_f32[lane] = mine;
  workgroupBarrier();
  for (var d = 32u; d > 0u; d = d >> 1u) {
    if (lane < d) { held_f32[lane] = (held_f32[lane] + held_f32[lane + d]); }
    workgroupBarrier();
  }
  let all = held_f32[0];
  workgroupBarrier();
  return all;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let worker = w.x + w.y * p.row;
  if (worker >= (p.size_b) * 2u * 2u * (p.size_n)) { return; }
  let i3 = worker % (p.size_n);
  let n1 = worker / (p.size_n);
  let i2 = n1 % 2u;
  let n2 = n1 / 2u;
  let i1 = n2 % 2u;
  let n3 = n2 / 2u;
  let i0 = n3;
  var s4 = (-infinity());
  var s5: array<f32, 1>;
  for (var j = 0u; j < 1u; j++) { s5[j] = f32(0); }
  var s6 = f32(0);
  for (var base = 0u; base < (p.size_t); base += 64u) {
    let live = base + lane < (p.size_t);
    let r0 = min(base + lane, (p.size_t) - 1u);
    var s7 = f32(0);
    for (var r1 = 0u; r1 < 16u; r1++) {
      let v8 = b0[p.o0 + (i0 * (64u*p.size_n) + i1 * (32u*p.size_n) + i2 * (16u*p.size_n) + i3 * 16u + r1)];
      let v9 = b1[p.o1 + (i0 * (32u*p.size_t) + i1 * (16u*p.size_t) + r0 * 16u + r1)];
      s7 = s7 + v8 * v9;
    }
    let v10 = (s7 * f32(0.25));
    let m11 = maximum_f32(s4, fold_max_f32(select((-infinity()), v10, live), lane));
    let m12 = select(m11, 0.0, is_inf(m11) && m11 < 0.0);
    let m13 = exp_f32(s4 - m12);
    s4 = m11;
    let v14 = (v10 - m12);
    let v15 = exp_f32(v14);
    s6 = s6 * m13 + select(f32(0), v15, live);
    stage16[lane] = v15;
    workgroupBarrier();
    for (var j = 0u; j < 1u; j++) {
      let own = j * 64u + lane;
      let i4 = min(own, 16u - 1u);
      s5[j] = s5[j] * m13;
    }
    for (var t = 0u; t < min(0u + 64u, (p.size_t) - base); t++) {
      let r0 = (base + t);
      for (var j = 0u; j < 1u; j++) {
        let own = j * 64u + lane;
        let i4 = min(own, 16u - 1u);
        let v17 = b2[p.o2 + (i0 * (32u*p.size_t) + i1 * (16u*p.size_t) + i4 + r0 * 16u)];
        s5[j] = s5[j] + stage16[t] * v17;
      }
    }
    workgroupBarrier();
  }
  let s18 = fold_sum_f32(s6, lane);
  for (var j = 0u; j < 1u; j++) {
    let own = j * 64u + lane;
    let i4 = min(own, 16u - 1u);
    if (own < 16u) {
      let v19 = divide_f32(s5[j], s18);
      b3[(i0 * (64u*p.size_n) + i1 * (32u*p.size_n) + i2 * (16u*p.size_n) + i3 * 16u + i4)] = v19;
    }
  }
}
