@group(0) @binding(0) var<storage, read> b0: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> b1: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> b2: array<vec4<f32>>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32 }
var<immediate> p: Parameters;
fn evaluate(x0: f32, x1: f32) -> f32 { return x0 + x1; }
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  let vectors = p.n / 4u;
  if (thread >= vectors) { return; }
  let j0 = thread;
  let v0_0 = b0[j0 + p.o0 / 4u];
  let v1_0 = b1[j0 + p.o1 / 4u];
  { b2[j0 + p.o2 / 4u] = vec4<f32>(evaluate(f32(v0_0.x), f32(v1_0.x)), evaluate(f32(v0_0.y), f32(v1_0.y)), evaluate(f32(v0_0.z), f32(v1_0.z)), evaluate(f32(v0_0.w), f32(v1_0.w))); }
}
