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
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let worker = g.x + g.y * p.row;
  if (worker >= 45u) { return; }
  let i1 = worker;
  var s1 = f32(0);
  var s2 = f32(0);
  for (var r0 = 0u; r0 < 100u; r0++) {
    let v3 = b0[p.o0 + (r0)];
    let v4 = b1[p.o1 + (r0)];
    let v5 = (v3 * v4);
    let v6 = b2[p.o2 + (i1 + r0 * 45u)];
    s1 = s1 + v5 * v6;
    let v7 = (v3 * v3);
    s2 = s2 + v7;
  }
  let v8 = f32(i32((100u)));
  let v9 = divide_f32(s2, v8);
  let v10 = (v9 + f32(1e-06));
  let v11 = divide_f32(1.0, sqrt(v10));
  let v12 = (s1 * v11);
  b3[(i1)] = v12;
}
