@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read_write> b2: array<f32>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32, d0: u32, d1: u32, t0_0: u32, t0_1: u32, t1_0: u32, t1_1: u32, t2_0: u32, t2_1: u32 }
var<immediate> p: Parameters;
fn evaluate(i: u32) -> f32 { var rest = i; var a0 = p.o0; var a1 = p.o1; let c1 = rest % p.d1; rest = rest / p.d1; a0 += c1 * p.t0_1; a1 += c1 * p.t1_1; a0 += rest * p.t0_0; a1 += rest * p.t1_0; let x0 = b0[a0]; let x1 = b1[a1]; return x0 + x1; }
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread >= p.n) { return; }
  var rest = thread; var a2 = p.o2; let c1 = rest % p.d1; rest = rest / p.d1; a2 += c1 * p.t2_1; a2 += rest * p.t2_0;
  b2[a2] = evaluate(thread);
}
