@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read> b1: array<f32>;
@group(0) @binding(2) var<storage, read> b2: array<f32>;
@group(0) @binding(3) var<storage, read_write> b3: array<f32>;
struct Parameters { row: u32, size_b: u32, size_s: u32, o0: u32, o1: u32, o2: u32 }
var<immediate> p: Parameters;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let worker = g.x + g.y * p.row;
  if (worker >= (p.size_b) * 4u * (p.size_s) * 16u) { return; }
  let i3 = worker % 16u;
  let n1 = worker / 16u;
  let i2 = n1 % (p.size_s);
  let n2 = n1 / (p.size_s);
  let i1 = n2 % 4u;
  let n3 = n2 / 4u;
  let i0 = n3;
  let v5 = i64(i32((i3)));
  let v6 = i64(i32((8u)));
  let v7 = (v5 < v6);
  var c4: f32;
  if (v7) {
    let v8 = b0[p.o0 + (i0 * (64u*p.size_s) + i1 * (16u*p.size_s) + i2 * 16u + i3)];
    let v9 = b1[p.o1 + (i2 * 8u + i3)];
    let v10 = (v8 * v9);
    let v11 = b0[p.o0 + (i0 * (64u*p.size_s) + i1 * (16u*p.size_s) + i2 * 16u + i3 + 8u)];
    let v12 = b2[p.o2 + (i2 * 8u + i3)];
    let v13 = (v11 * v12);
    let v14 = (v10 - v13);
    c4 = v14;
  }
  if (!(v7)) {
    let v15 = b0[p.o0 + (i0 * (64u*p.size_s) + i1 * (16u*p.size_s) + i2 * 16u + i3)];
    let v16 = b1[p.o1 + (i2 * 8u + i3 + 4294967288u)];
    let v17 = (v15 * v16);
    let v18 = b0[p.o0 + (i0 * (64u*p.size_s) + i1 * (16u*p.size_s) + i2 * 16u + i3 + 4294967288u)];
    let v19 = b2[p.o2 + (i2 * 8u + i3 + 4294967288u)];
    let v20 = (v18 * v19);
    let v21 = (v17 + v20);
    c4 = v21;
  }
  b3[(i0 * (64u*p.size_s) + i1 * (16u*p.size_s) + i2 * 16u + i3)] = c4;
}
