@group(0) @binding(0) var<storage, read> b0: array<i64>;
@group(0) @binding(1) var<storage, read> b1: array<i64>;
@group(0) @binding(2) var<storage, read_write> b2: array<u32>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32 }
var<immediate> p: Parameters;
fn evaluate(i: u32) -> i32 { let a0 = i + p.o0; let a1 = i + p.o1; let x0 = b0[a0]; let x1 = b1[a1]; return select(0, 1, x0 < x1); }
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  let first = thread * 4u;
  if (first >= p.n) { return; }
  var word = 0u;
  for (var k = 0u; k < 4u; k++) {
    if (first + k < p.n) { word |= (bitcast<u32>(evaluate(first + k)) & 0xffu) << (k * 8u); }
  }
  b2[thread + p.o2 / 4u] = word;
}
