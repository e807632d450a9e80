@group(0) @binding(0) var<storage, read> mask: array<u32>;
@group(0) @binding(1) var<storage, read> counts: array<i32>;
@group(0) @binding(2) var<storage, read_write> positions: array<vec2<u32>>;
struct Parameters { n: u32, row: u32, o_mask: u32, o_counts: u32, d0: u32, d1: u32 }
var<immediate> p: Parameters;
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread >= p.n) { return; }
  let at = thread + p.o_mask;
  if (((mask[at >> 2u] >> ((at & 3u) * 8u)) & 255u) == 0u) { return; }
  let base = (u32(counts[thread + p.o_counts]) - 1u) * 2u;
  var rest = thread;
  positions[base + 1u] = vec2<u32>(rest % p.d1, 0u); rest = rest / p.d1;
  positions[base + 0u] = vec2<u32>(rest, 0u); 
}
