@group(0) @binding(0) var<storage, read> b0: array<u32>;
@group(0) @binding(1) var<storage, read> b1: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> b2: array<i32>;
fn index_at_64(w: vec2<u32>) -> i32 { let low = bitcast<i32>(w.x);
  return select(bitcast<i32>(0x80000000u), low, bitcast<i32>(w.y) == (low >> 31u)); }
fn index_at_32(w: i32) -> i32 { return w; }
struct Fault { seen: atomic<u32>, site: u32, which: u32, size: u32, low: u32, high: u32 }
@group(0) @binding(4) var<storage, read_write> fault: Fault;
fn report(which: u32, size: u32, index: vec2<u32>) {
  if (atomicLoad(&fault.seen) != 0u || atomicExchange(&fault.seen, 1u) != 0u) { return; }
  fault.site = p.site; fault.which = which; fault.size = size; fault.low = index.x; fault.high = index.y;
}
@group(0) @binding(3) var<storage, read_write> result: array<u32>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32, d0: u32, d1: u32, t0_0: u32, t0_1: u32, t1_0: u32, t1_1: u32, t2_0: u32, t2_1: u32, size0: u32, step0: u32, size1: u32, step1: u32, site: u32 }
var<immediate> p: Parameters;
fn fetch(i: u32) -> u32 {
  var rest = i; var a0 = p.o0; var a1 = p.o1; var a2 = p.o2; let c1 = rest % p.d1; rest = rest / p.d1; a0 += c1 * p.t0_1; a1 += c1 * p.t1_1; a2 += c1 * p.t2_1; a0 += rest * p.t0_0; a1 += rest * p.t1_0; a2 += rest * p.t2_0;
  var j0 = index_at_64(b1[a1]);
  if (j0 < 0 && j0 >= -i32(p.size0)) { j0 += i32(p.size0); }
  if (u32(j0) >= p.size0) { report(0u, p.size0, b1[a1]); return u32(); } a0 += u32(j0) * p.step0;
  var j1 = index_at_32(b2[a2]);
  if (j1 < 0 && j1 >= -i32(p.size1)) { j1 += i32(p.size1); }
  if (u32(j1) >= p.size1) { report(1u, p.size1, vec2<u32>(bitcast<u32>(b2[a2]), bitcast<u32>(b2[a2] >> 31u))); return u32(); } a0 += u32(j1) * p.step1;
  return b0[a0];
}
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread < p.n) { result[thread] = fetch(thread); }
}
