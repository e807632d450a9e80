"""Kernels, launched: elementwise expressions, reductions of rows, matrix products. Float32 throughout."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from anytorch.gpu.programs import Program
from anytorch.gpu.wgsl import matmul as wgsl_matmul
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP, Elementwise, collapse, render
from anytorch.gpu.wgsl.functions import needed
from anytorch.lite.gpu.memory import Layout, new

MOST_GROUPS = 65_535  # in one dimension of a launch
F32 = "float32"

# Tiles in workgroup memory on GPUs; a CPU that plays GPU (llvmpipe) is faster without.
TILED = wgsl_matmul.Schedule("tiled", 64, 64, 16, 4, 4)
DIRECT = wgsl_matmul.Schedule("direct", tm=4, tn=8)
DIRECT_ROW = wgsl_matmul.Schedule("direct", tm=1, tn=4)


def grid(groups: int) -> tuple[int, int]:
    x = min(groups, MOST_GROUPS)
    return x, -(-groups // x)


def elementwise(
    expression: str,
    inputs: Sequence[Layout],
    scalars: Sequence[float],
    shape: tuple[int, ...],
    out: Layout | None = None,
) -> Layout:
    """`expression` of x0, x1, … (already broadcast to `shape`) and s0(), s1(), …, into `out` or into new memory."""
    out = out or new(shape)
    operands = [*inputs, out]
    size = out.size
    if not size:
        return out
    sizes, strides = collapse(shape, [layout.strides for layout in operands])
    plain = not sizes or (len(sizes) == 1 and all(steps == [1] for steps in strides))
    kernel = Elementwise(expression, (F32,) * len(inputs), F32, ("f32",) * len(scalars), 0 if plain else len(sizes))
    if kernel.words > MOST_WORDS:  # too many for parameters: written into the shader
        steps = tuple(tuple(each) for each in strides)
        kernel = Elementwise(
            expression, kernel.inputs, F32, kernel.scalars, len(sizes), shape=tuple(sizes), strides=steps
        )
    runtime = out.memory.runtime
    program = runtime.programs.make(
        ("lite", kernel),
        lambda: render(kernel),
        buffers=len(operands),
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )
    x, y = grid(-(-size // WORKGROUP))
    packed = struct.pack(
        f"<2I{len(scalars)}f{len(operands)}I", size, x * WORKGROUP, *scalars, *(layout.offset for layout in operands)
    )
    if kernel.rank and not kernel.shape:
        numbers = [*sizes, *(step for steps in strides for step in steps)]
        packed += struct.pack(f"<{len(numbers)}I", *numbers)
    runtime.dispatch(program, tuple(layout.memory.buffer for layout in operands), packed, x, y)
    return out


def copied(source: Layout, out: Layout | None = None) -> Layout:
    """The same numbers in dense memory of their own, or in `out`."""
    return elementwise("x0", [source], [], source.shape, out)


# A workgroup per row: 64 threads take every 64th number each, then the halves meet.
ROWS = """@group(0) @binding(0) var<storage, read> b0: array<f32>;
@group(0) @binding(1) var<storage, read_write> b1: array<f32>;
struct Parameters {{ rows: u32, n: u32, at: u32, row: u32 }}
var<immediate> p: Parameters;
var<workgroup> parts: array<f32, 64>;
{functions}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) t: u32) {{
  let r = w.x + w.y * p.row;
  var v = {start};
  if (r < p.rows) {{
    for (var k = t; k < p.n; k += 64u) {{ let x = b0[p.at + r * p.n + k]; v = {step}; }}
  }}
  parts[t] = v;
  for (var h = 32u; h > 0u; h /= 2u) {{
    workgroupBarrier();
    if (t < h) {{ let x = parts[t + h]; v = parts[t]; parts[t] = {step}; }}
  }}
  if (t == 0u && r < p.rows) {{ b1[r] = parts[0]; }}
}}
"""
FIRST = "b0[p.at + r * p.n]"  # of the row; taking it twice does not change an extreme
REDUCTIONS = {
    "sum": ("0.0", "v + x"),
    "max": (FIRST, "maximum_f32(v, x)"),
    "min": (FIRST, "minimum_f32(v, x)"),
}


def reduce_rows(name: str, source: Layout, rows: int, n: int) -> Layout:
    """(rows, n), dense → (rows,)"""
    start, step = REDUCTIONS[name]
    out = new((rows,))
    if not rows:
        return out
    runtime = out.memory.runtime
    program: Program = runtime.programs.make(
        ("lite rows", name),
        lambda: ROWS.format(start=start, step=step, functions=needed(step)),
        buffers=2,
        writable=0b10,
        immediates=16,
    )
    x, y = grid(rows)
    packed = struct.pack("<4I", rows, n, source.offset, x)
    runtime.dispatch(program, (source.memory.buffer, out.memory.buffer), packed, x, y)
    return out


def batches(a: Layout, b: Layout, batch: int, m: int, n: int, k: int) -> Layout:
    """(batch, m, k) @ (batch, k, n), strided → (batch, m, n), dense."""
    out = new((batch, m, n))
    runtime = out.memory.runtime
    schedule = (DIRECT_ROW if m == 1 else DIRECT) if runtime.adapter.software or m <= 4 else TILED
    spec = wgsl_matmul.Matrices(F32, F32, F32, "", "k" if a.strides[2] == 1 else "m", "n" if b.strides[2] == 1 else "k")
    program = runtime.programs.make(
        ("lite", spec, schedule),
        lambda: wgsl_matmul.render(wgsl_matmul.matrices(spec), schedule),
        buffers=3,
        writable=0b100,
        immediates=4 * len(wgsl_matmul.MATRIX_PARAMETERS),
    )
    step = max(schedule.bk, 4)
    tiles_m, tiles_n = -(-m // schedule.tile_m), -(-n // schedule.tile_n)
    x, y = grid(tiles_m * tiles_n * batch)
    packed = struct.pack(
        "<4I2f9I12I",
        *(a.offset, b.offset, 0, 0, 1.0, 0.0),
        *(m, n, k, -(-k // step) * step, 1, tiles_m, tiles_n, x, batch),
        *(*a.strides, *b.strides, 0, 0, 0, *out.strides),
    )
    runtime.dispatch(program, (a.memory.buffer, b.memory.buffer, out.memory.buffer), packed, x, y)
    return out
