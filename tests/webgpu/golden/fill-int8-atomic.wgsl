@group(0) @binding(0) var<storage, read_write> b0: array<atomic<u32>>;
struct Parameters { n: u32, row: u32, s0: u32, o0: u32, d0: u32, t0_0: u32 }
var<immediate> p: Parameters;
fn s0() -> i32 { return bitcast<i32>(p.s0); }
fn evaluate(i: u32) -> i32 {   return s0(); }
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread >= p.n) { return; }
  var rest = thread; var a0 = p.o0; a0 += rest * p.t0_0;
  let bits = (bitcast<u32>(evaluate(thread)) & 0xffu);
  atomicAnd(&b0[a0 >> 2u], ~(0xffu << ((a0 & 3u) * 8u)));
  atomicOr(&b0[a0 >> 2u], bits << ((a0 & 3u) * 8u));
}
