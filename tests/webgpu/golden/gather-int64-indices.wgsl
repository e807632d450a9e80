@group(0) @binding(0) var<storage, read> b0: array<u32>;
@group(0) @binding(1) var<storage, read> b1: array<vec2<u32>>;
fn index_at_64(w: vec2<u32>) -> i32 { let low = bitcast<i32>(w.x);
  return select(bitcast<i32>(0x80000000u), low, bitcast<i32>(w.y) == (low >> 31u)); }
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, d0: u32, d1: u32, t0_0: u32, t0_1: u32, t1_0: u32, t1_1: u32, size0: u32, step0: u32 }
var<immediate> p: Parameters;
fn fetch(i: u32) -> u32 {
  var rest = i; var a0 = p.o0; var a1 = p.o1; let c1 = rest % p.d1; rest = rest / p.d1; a0 += c1 * p.t0_1; a1 += c1 * p.t1_1; a0 += rest * p.t0_0; a1 += rest * p.t1_0;
  var j0 = index_at_64(b1[a1]);
  if (u32(j0) >= p.size0) { return u32(); } a0 += u32(j0) * p.step0;
  return b0[a0];
}
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread < p.n) { result[thread] = fetch(thread); }
}
