"""Kernels, launched: elementwise expressions, matrix products, and bodies that one thread runs per element.

The WGSL is that of the torch device (`anytorch.gpu.wgsl`); here are the launches alone. Everything is float32; masks are 0.0
and 1.0, indices that a kernel reads or writes are int32.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from anytorch.gpu.wgsl import matmul as wgsl_matmul
from anytorch.gpu.wgsl import threads as wgsl_threads
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP, Elementwise, collapse, render
from anytorch.lite.gpu.memory import Layout, new

MOST_GROUPS = 65_535  # in one dimension of a launch
F32, I32 = "float32", "int32"

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
        steps = tuple(tuple(step % 2**32 for step in each) for each in strides)
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
        # Steps may be negative: in 32 bits, adding 2³² − 1 is taking one away.
        numbers = [*sizes, *(step % 2**32 for steps in strides for step in steps)]
        packed += struct.pack(f"<{len(numbers)}I", *numbers)
    runtime.dispatch(program, tuple(layout.memory.buffer for layout in operands), packed, x, y)
    return out


def copied(source: Layout, out: Layout | None = None) -> Layout:
    """The same numbers in dense memory of their own, or in `out`."""
    return elementwise("x0", [source], [], source.shape, out)


def threads(
    body: str,
    inputs: dict[str, Layout],
    outputs: dict[str, Layout],
    numbers: dict[str, int | float],
    count: int,
    functions: str = "",
    whole: Sequence[str] = (),
) -> None:
    """Run `body` for i in range(count): see `gpu.wgsl.threads`. Names in `whole` are int32, all others float32."""
    if not count:
        return
    typed = [tuple((name, I32 if name in whole else F32) for name in named) for named in (inputs, outputs)]
    parameters = tuple(f"{name}: {'f32' if isinstance(value, float) else 'u32'}" for name, value in numbers.items())
    kernel = wgsl_threads.Threads(typed[0], typed[1], parameters, body, functions)
    operands = [*inputs.values(), *outputs.values()]
    runtime = operands[0].memory.runtime
    program = runtime.programs.make(
        ("lite", kernel),
        lambda: wgsl_threads.render(kernel),
        buffers=len(operands),
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )
    x, y = grid(-(-count // wgsl_threads.WORKGROUP))
    packed = struct.pack(
        f"<{2 + len(operands)}I{''.join('f' if isinstance(value, float) else 'I' for value in numbers.values())}",
        *(count, x * wgsl_threads.WORKGROUP),
        *(layout.offset for layout in operands),
        *numbers.values(),
    )
    runtime.dispatch(program, tuple(layout.memory.buffer for layout in operands), packed, x, y)


def product_grid(
    schedule: wgsl_matmul.Schedule, batch: int, m: int, n: int, k: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """A schedule's parameters, and the launch."""
    step = max(schedule.bk, 4)
    tiles_m, tiles_n = -(-m // schedule.tile_m), -(-n // schedule.tile_n)
    x, y = grid(tiles_m * tiles_n * batch)
    return (m, n, k, -(-k // step) * step, 1, tiles_m, tiles_n, x, batch), (x, y)


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
    numbers, launch = product_grid(schedule, batch, m, n, k)
    packed = struct.pack(
        "<4I2f9I12I",
        *(a.offset, b.offset, 0, 0, 1.0, 0.0),
        *numbers,
        *(*a.strides, *b.strides, 0, 0, 0, *out.strides),
    )
    runtime.dispatch(program, (a.memory.buffer, b.memory.buffer, out.memory.buffer), packed, *launch)
    return out
