@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
struct Parameters { row: u32, o0: u32, o1: u32, o2: u32 }
var<immediate> p: Parameters;
fn divide_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) {
    if (x == 0.0 || is_nan(x)) { return quiet_nan(); }
    return bitcast<f32>(0x7f800000u | ((bitcast<u32>(x) ^ bitcast<u32>(y)) & 0x80000000u));
  }
  return x / y;
}
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn quiet_nan() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
var<workgroup> stage5: array<f32, 256>;
var<workgroup> held_f32: array<f32, 256>;
fn fold_sum_f32(mine: f32, lane: u32) -> f32 {
  held_f32[lane] = mine;
  workgroupBarrier();
  for (var d = 128u; d > 0u; d = d >> 1u) {
    if (lane < d) { held_f32[lane] = (held_f32[lane] + held_f32[lane + d]); }
    workgroupBarrier();
  }
  let all = held_f32[0];
  workgroupBarrier();
  return all;
}
fn across_slices(mine: f32, lane: u32) -> f32 {
  held_f32[lane] = mine;
  workgroupBarrier();
  var all = 0.0;
  for (var d = 0u; d < 256u; d += 32u) { all += held_f32[lane % 32u + d]; }
  workgroupBarrier();
  return all;
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let worker = w.x + w.y * p.row;
  if (worker >= 2u) { return; }
  let tile = worker;
  let own = tile * 32u + lane % 32u;
  let i1 = min(own, 45u - 1u);
  var s1 = f32(0);
  var s2 = f32(0);
  for (var base = 0u; base < 100u; base += 256u) {
    let live = base + lane < 100u;
    let r0 = min(base + lane, 100u - 1u);
    let v3 = b0[p.o0 + (r0)];
    let v4 = (v3 * v3);
    s2 = s2 + select(f32(0), v4, live);
    let v6 = b1[p.o1 + (r0)];
    let v7 = (v3 * v6);
    stage5[lane] = v7;
    workgroupBarrier();
    var s8 = f32(0);
    for (var t = (lane / 32u) * 32u; t < min((lane / 32u) * 32u + 32u, 100u - base); t++) {
      let r0 = (base + t);
      let v9 = b2[p.o2 + (i1 + r0 * 45u)];
      s8 = s8 + stage5[t] * v9;
    }
    s1 = s1 + s8;
    workgroupBarrier();
  }
  s1 = across_slices(s1, lane);
  let s10 = fold_sum_f32(s2, lane);
  let v11 = f32(i32((100u)));
  let v12 = divide_f32(s10, v11);
  let v13 = (v12 + f32(1e-06));
  let v14 = divide_f32(1.0, sqrt(v13));
  let v15 = (s1 * v14);
  if (own < 45u && lane < 32u) { b3[(i1)] = v15; }
}
