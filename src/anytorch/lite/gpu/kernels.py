"""Device memory, and kernels, launched: elementwise expressions, bodies that one thread runs per element, rows by number.

The WGSL is that of the torch device (`anytorch.gpu.wgsl`); here are the launches alone. Everything is float32; masks are 0.0
and 1.0, indices that a kernel reads or writes are int32. What is known of a geometry is kept: the second time is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import per_element as wgsl_per_element
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP, Elementwise, collapse, render
from anytorch.gpu.wgsl.indexing import Gather, Scatter, Walk, render_gather, render_scatter
from anytorch.gpu.wgsl.types import dense_strides
from anytorch.lite.dtypes import Array

F32, I32 = "float32", "int32"
STREAM = 1 << 22  # numbers from which memory is the limit, and several loads per thread keep more of it busy
Number = int | float


# --- device memory, and how an array lies in it ----------------------------------------------------------------------


class Memory:
    """One buffer of the pool; it goes back when the last array that lies in it is gone."""

    __slots__ = ("buffer", "runtime")

    def __init__(self, nbytes: int) -> None:
        self.runtime = open_runtime()
        self.buffer = self.runtime.take(max(nbytes, 4))

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self.runtime.give(self.buffer)


@dataclass(slots=True, eq=False)
class Layout:
    """Numbers of four bytes in a memory: strides and offset count numbers, not bytes. Never changed once made."""

    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def address(self) -> int:
        """As `gpu.launch` names a place: the buffer, and the first number in it."""
        return self.memory.buffer.address + 4 * self.offset

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def dense(self) -> bool:
        return all(s == t for s, t, n in zip(self.strides, dense_strides(self.shape), self.shape, strict=True) if n > 1)


def new(shape: tuple[int, ...]) -> Layout:
    return Layout(Memory(4 * prod(shape)), shape, dense_strides(shape))


def write(host: Array, dtype: type = np.float32) -> Layout:
    """`host` on the device, as float32 (or int32, for kernels that take indices)."""
    host = np.ascontiguousarray(host, dtype).reshape(host.shape)
    layout = new(host.shape)
    if host.size:
        layout.memory.runtime.write(layout.memory.buffer, 0, host.ctypes.data, host.nbytes)
    return layout


def read(layout: Layout, dtype: type = np.float32) -> Array:
    """A copy on the host; `layout` must be dense."""
    host: Array = np.empty(layout.shape, dtype)
    if host.size:
        layout.memory.runtime.read(layout.memory.buffer, 4 * layout.offset, host.ctypes.data, host.nbytes)
    return host


# --- element by element ----------------------------------------------------------------------------------------------


class Elements:
    """An elementwise expression for operands of one geometry: the shape of its result, and how it is launched."""

    __slots__ = ("launch", "nbytes", "shape", "strides")

    def __init__(
        self,
        expression: str,
        inputs: Sequence[Layout],
        names: Sequence[str],
        shape: tuple[int, ...],
        out: Layout | None,
        shared: bool,
        aligned: bool,
    ) -> None:
        self.shape, self.strides = shape, dense_strides(shape)
        size = prod(shape)
        self.nbytes = 4 * size
        self.launch: Plan | None = None
        if not size:
            return
        written = self.strides if out is None else out.strides
        sizes, strides = collapse(shape, [*(broadcast_strides(each, shape) for each in inputs), written])
        plain = not sizes or (len(sizes) == 1 and all(steps == [1] for steps in strides))
        text = re.sub(r"\bx(\d)", lambda found: names[int(found[1])], expression)
        scalars = len(names) - len(inputs)
        kernel = Elementwise(
            text,
            (F32,) * len(inputs),
            F32,
            ("f32",) * scalars,
            0 if plain else len(sizes),
            vector=plain and aligned and size % 4 == 0 and bool(inputs),
            unroll=4 if size >= STREAM and not open_runtime().adapter.software else 1,
            in_place=shared,
        )
        geometry = [*sizes, *(step for steps in strides for step in steps)] if kernel.rank else []
        if kernel.words > MOST_WORDS:  # too many for parameters: written into the shader
            steps = tuple(tuple(step % 2**32 for step in each) for each in strides)
            kernel, geometry = replace(kernel, shape=tuple(sizes), strides=steps), []
        x, y = grid(-(-size // (WORKGROUP * kernel.per_thread)))
        places, head, numbers = [4] * (len(inputs) + 1), (size, x * WORKGROUP), "f" * scalars
        self.launch = Plan(kernel, render, (x, y), places, kernel.writable, head=head, numbers=numbers, tail=geometry)


def elementwise(
    expression: str, operands: Sequence[Layout | float], shape: tuple[int, ...] | None = None, out: Layout | None = None
) -> Layout:
    """`expression` of x0, x1, …, which are arrays (broadcast to each other) or numbers, into `out` or into new memory."""
    inputs: list[Layout] = []
    changing: list[Number] = []
    key: list[Any] = ["lite elementwise", expression, shape]
    alignment, shared = 0, False
    for operand in operands:
        if isinstance(operand, Layout):
            inputs.append(operand)
            key.append((operand.shape, operand.strides))
            alignment |= operand.offset & 3
            if out is not None and operand.memory is out.memory:
                if operand.strides != out.strides or operand.shape != out.shape or operand.offset != out.offset:
                    return copied(elementwise(expression, operands, shape), out)  # they overlap, and not exactly
                shared = True
        else:
            changing.append(operand)
            key.append(None)
    if out is not None:
        key.append((out.shape, out.strides, shared))
        alignment |= out.offset & 3
    key.append(alignment == 0)
    plan = plans[whole := tuple(key)]
    if plan is None:
        full = shape or (out.shape if out is not None else np.broadcast_shapes(*(each.shape for each in inputs)))
        plan = plans[whole] = Elements(expression, inputs, operand_names(operands), full, out, shared, alignment == 0)
    if out is None:
        out = Layout(Memory(plan.nbytes), plan.shape, plan.strides)
    if plan.launch is not None:
        plan.launch([*[layout.address for layout in inputs], out.address], *changing)
    return out


def operand_names(operands: Sequence[Layout | float]) -> list[str]:
    """What the kernel calls each operand: arrays x0, x1, …, numbers s0(), s1(), …"""
    names, arrays, numbers = [], 0, 0
    for operand in operands:
        if isinstance(operand, Layout):
            names.append(f"x{arrays}")
            arrays += 1
        else:
            names.append(f"s{numbers}()")
            numbers += 1
    return names


def broadcast_strides(x: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of `x` seen as `shape`: 0 along what is repeated."""
    if np.broadcast_shapes(x.shape, shape) != tuple(shape):
        raise ValueError(f"{x.shape} cannot be broadcast to {shape}")
    extra = len(shape) - len(x.shape)
    return (0,) * extra + tuple(0 if n == 1 else step for n, step in zip(x.shape, x.strides, strict=True))


def copied(source: Layout, out: Layout | None = None) -> Layout:
    """The same numbers in dense memory of their own, or in `out`."""
    return elementwise("x0", [source], source.shape if out is None else out.shape, out)


# --- a body per thread -----------------------------------------------------------------------------------------------


def threads(
    body: str,
    inputs: dict[str, Layout],
    outputs: dict[str, Layout],
    numbers: Mapping[str, Number],
    count: int,
    functions: str = "",
    whole: Sequence[str] = (),
) -> None:
    """Run `body` for i in range(count): see `gpu.wgsl.per_element`. Names in `whole` are int32, all others float32."""
    if not count:
        return
    layouts = [*inputs.values(), *outputs.values()]
    key = ("lite threads", body, count, *inputs, *outputs, *numbers.values())
    plan = plans[key]
    if plan is None:
        typed = [tuple((name, I32 if name in whole else F32) for name in named) for named in (inputs, outputs)]
        names = tuple(f"{name}: {'f32' if isinstance(value, float) else 'u32'}" for name, value in numbers.items())
        kernel = wgsl_per_element.PerElement(typed[0], typed[1], names, body, functions)
        x, y = grid(-(-count // wgsl_per_element.WORKGROUP))
        head, tail = (count, x * wgsl_per_element.WORKGROUP), [*numbers.values()]
        plan = plans[key] = Plan(
            kernel, wgsl_per_element.render, (x, y), [4] * len(layouts), kernel.writable, head=head, tail=tail
        )
    plan([layout.address for layout in layouts])


# --- rows by number: embeddings, `x[[2, 0, 2]]` and their gradients ----------------------------------------------------


def take_rows(x: Layout, numbers: Array) -> Layout:
    """(n, …) and numbers (…) → (…, …): row by row. `x` is dense; the numbers are from 0 to n − 1."""
    out = new((*numbers.shape, *x.shape[1:]))
    # The result is walked as (rows, width): the source moves along the width, the numbers along the rows.
    by_number(Gather(4, Walk(1, (I32,), 2)), render_gather, (x,), numbers, (out,), ((0, 1), (1, 0)), x)
    return out


def add_rows(target: Layout, numbers: Array, values: Layout) -> None:
    """target[numbers[i]] += values[i], also where a number comes twice. Both are dense."""
    steps = ((prod(target.shape[1:]), 1), (0, 1), (1, 0))
    kernel = Scatter(4, Walk(2, (I32,), 2), "sum", F32)
    by_number(kernel, render_scatter, (values, target), numbers, (), steps, target)


def by_number(
    kernel: Gather | Scatter,
    render: Any,
    walked: tuple[Layout, ...],
    numbers: Array,
    written: tuple[Layout, ...],
    steps: tuple[tuple[int, int], ...],
    table: Layout,
) -> None:
    """`steps` are those of the walked operands and of the numbers of the table's rows, over (rows, width)."""
    rows, width = numbers.size, prod(table.shape[1:])
    if not rows * width:
        return
    bound = (*walked, write(numbers.reshape(-1), np.int32), *written)
    x, y = grid(-(-rows * width // WORKGROUP))
    plan = Plan(
        kernel,
        render,
        (x, y),
        [4] * (len(walked) + 1),
        kernel.writable,
        unplaced=len(written),
        head=(rows * width, x * WORKGROUP),
        tail=(rows, width, *(step for each in steps for step in each), table.shape[0], width),
    )
    plan([layout.address for layout in bound])
