@group(0) @binding(0) var<storage, read> b0: array<u32>;
@group(0) @binding(1) var<storage, read> b1: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> b2: array<i32>;
fn index_at_64(w: vec2<u32>) -> i32 { let low = bitcast<i32>(w.x);
  return select(bitcast<i32>(0x80000000u), low, bitcast<i32>(w.y) == (low >> 31u)); }
fn index_at_32(w: i32) -> i32 { return w; }
@group(0) @binding(3) var<storage, read_write> result: array<u32>;
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32 }
var<immediate> p: Parameters;
fn fetch(i: u32) -> u32 {
  var rest = i; var a0 = p.o0; var a1 = p.o1; var a2 = p.o2; let c1 = rest % 5u; rest = rest / 5u; a0 += c1 * 4294967289u; a1 += c1 * 0u; a2 += c1 * 0u; a0 += rest * 0u; a1 += rest * 1u; a2 += rest * 1u;
  var j0 = index_at_64(b1[a1]);
  if (j0 < 0 && j0 >= -i32(4u)) { j0 += i32(4u); }
  if (u32(j0) >= 4u) { return u32(); } a0 += u32(j0) * 35u;
  var j1 = index_at_32(b2[a2]);
  if (j1 < 0 && j1 >= -i32(5u)) { j1 += i32(5u); }
  if (u32(j1) >= 5u) { return u32(); } a0 += u32(j1) * 7u;
  return ((b0[a0 >> 2u] >> ((a0 & 3u) * 8u)) & 0xffu);
}
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  let first = thread * 4u;
  if (first >= p.n) { return; }
  var word = 0u;
  for (var k = 0u; k < 4u; k++) {
    if (first + k < p.n) { word |= fetch(first + k) << (k * 8u); }
  }
  result[thread] = word;
}
