@group(0) @binding(0) var<storage, read> b0: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> there: array<array<atomic<u32>, 2>>;
@group(0) @binding(2) var<storage, read> b2: array<vec2<u32>>;
fn index_at_64(w: vec2<u32>) -> i32 { let low = bitcast<i32>(w.x);
  return select(bitcast<i32>(0x80000000u), low, bitcast<i32>(w.y) == (low >> 31u)); }
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32, d0: u32, t0_0: u32, t1_0: u32, t2_0: u32, size0: u32, step0: u32 }
var<immediate> p: Parameters;
fn put(at: u32, value: vec2<u32>) {
  let old = atomicAdd(&there[at][0], value.x);
  atomicAdd(&there[at][1], value.y + select(0u, 1u, old + value.x < old));
}
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread >= p.n) { return; }
  var rest = thread; var a0 = p.o0; var a1 = p.o1; var a2 = p.o2; a0 += rest * p.t0_0; a1 += rest * p.t1_0; a2 += rest * p.t2_0;
  var j0 = index_at_64(b2[a2]);
  if (u32(j0) >= p.size0) { return; } a1 += u32(j0) * p.step0;
  put(a1, b0[a0]);
}
