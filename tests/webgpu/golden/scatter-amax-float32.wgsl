@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> there: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read> b2: array<i32>;
fn index_at_32(w: i32) -> i32 { return w; }
struct Parameters { n: u32, row: u32, o0: u32, o1: u32, o2: u32, d0: u32, t0_0: u32, t1_0: u32, t2_0: u32, size0: u32, step0: u32 }
var<immediate> p: Parameters;
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn put(at: u32, value: f32) {
  var bits = atomicLoad(&there[at]);
  loop {
    let old = bitcast<f32>(bits);
    let new_bits = bitcast<u32>(select(select(select(value, old, old > value), old, is_nan(old)), value, is_nan(value)));
    if (new_bits == bits) { break; }
    let tried = atomicCompareExchangeWeak(&there[at], bits, new_bits);
    if (tried.exchanged) { break; }
    bits = tried.old_value;
  }
}
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let thread = g.x + g.y * p.row;
  if (thread >= p.n) { return; }
  var rest = thread; var a0 = p.o0; var a1 = p.o1; var a2 = p.o2; a0 += rest * p.t0_0; a1 += rest * p.t1_0; a2 += rest * p.t2_0;
  var j0 = index_at_32(b2[a2]);
  if (u32(j0) >= p.size0) { return; } a1 += u32(j0) * p.step0;
  put(a1, b0[a0]);
}
