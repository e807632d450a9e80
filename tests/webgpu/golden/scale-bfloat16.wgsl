@group(0) @binding(0) var<storage, read> b0: array<u32>;
@group(0) @binding(1) var<storage, read_write> b1: array<u32>;
struct Parameters { n: u32, row: u32, s0: u32, o0: u32, o1: u32 }
var<immediate> p: Parameters;
fn bf16_bits(x: f32) -> u32 {
  let b = bitcast<u32>(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) { return (b >> 16u) | 0x40u; }
  return (b + 0x7fffu + ((b >> 16u) & 1u)) >> 16u;
}
fn s0() -> f32 { return bitcast<f32>(p.s0); }
fn evaluate(i: u32) -> f32 { let a0 = i + p.o0; let x0 = bitcast<f32>((b0[(a0) >> 1u] >> (((a0) & 1u) * 16u)) << 16u); return x0 * s0(); }
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  let first = thread * 2u;
  if (first >= p.n) { return; }
  var word = 0u;
  for (var k = 0u; k < 2u; k++) {
    if (first + k < p.n) { word |= bf16_bits(evaluate(first + k)) << (k * 16u); }
  }
  b1[thread + p.o1 / 2u] = word;
}
