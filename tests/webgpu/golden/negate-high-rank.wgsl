enable f16;
@group(0) @binding(0) var<storage, read> b0: array<f16>;
@group(0) @binding(1) var<storage, read_write> b1: array<f16>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32 }
var<immediate> p: Parameters;
fn evaluate(i: u32) -> f32 { var rest = i; var a0 = p.o0; let c2 = rest % 4u; rest = rest / 4u; a0 += c2 * 6u; let c1 = rest % 3u; rest = rest / 3u; a0 += c1 * 2u; a0 += rest * 1u; let x0 = f32(b0[a0]); return -x0; }
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread >= p.n) { return; }
  var rest = thread; var a1 = p.o1; let c2 = rest % 4u; rest = rest / 4u; a1 += c2 * 1u; let c1 = rest % 3u; rest = rest / 3u; a1 += c1 * 4u; a1 += rest * 12u;
  b1[a1] = f16(evaluate(thread));
}
