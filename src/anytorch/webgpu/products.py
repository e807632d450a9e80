"""One matrix product on the GPU, of any two matrices or batches of them; `ops.matmul` and attention are made of it.

Transposed and sliced operands are read in place by their strides. What follows from the geometry alone (the schedule, the
shader, the launch grid) is a plan, found again by a tuple.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, TAG, Buffer
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
from anytorch.gpu.wgsl import matmul as wgsl
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.kernels import check_devices
from anytorch.webgpu.pieces import bindable_copy
from anytorch.webgpu.pointwise import MOST_GROUPS, name_of
from anytorch.webgpu.tensors import new_contiguous
from anytorch.webgpu.threads import Launch
from anytorch.webgpu.tuning import DIRECT, DIRECT_ROW, Shape, Tiling, choose

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_HEAD = struct.Struct("<4I2f")

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Operand:
    """A matrix as the generator sees it: strides of batch, row and column in elements, and how its address is aligned."""

    dtype: torch.dtype
    strides: Strides
    aligned: bool  # its first element is at a multiple of four elements

    @property
    def transposed(self) -> Operand:
        batch, row, column = self.strides
        return Operand(self.dtype, (batch, column, row), self.aligned)


@dataclass(frozen=True, slots=True)
class Plan:
    program: Program
    x: int
    y: int
    tail: bytes
    swapped: bool  # A and B have changed places: C transposed is computed
    splits: int
    narrow: bool  # C is computed in 32 bits and cast
    two_steps: bool
    shifts: tuple[int, int, int]  # log2 of the element sizes of a, d and c


_plans: dict[Any, Plan] = device_memory()


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "",
) -> torch.Tensor:
    """c = activation(alpha * a @ b + beta * d), for floats, or for integers with no d, alpha or activation.

    a, b and c are all matrices or all batches of them. `d` broadcasts to c. c may be of 32 bits where a and b are of 16;
    none of a, b, d may share its buffer.
    """
    try:
        return _whole(a, b, c, d, alpha, beta, activation)
    except BindingTooLarge:
        return _halved(a, b, c, d, alpha, beta, activation)


def _whole(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
) -> torch.Tensor:
    pa, pb, pc, pd = a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr() if d is not None else 0
    if pc == 0:
        return c
    key = (
        a.dtype,
        c.dtype,
        a.size(),
        a.stride(),
        b.size(),
        b.stride(),
        c.stride(),
        (d.dtype, d.size(), d.stride()) if d is not None else None,
        (pa & 15, pb & 15, pc & 15),
        activation,
    )
    plan = _plans.get(key)
    runtime = open_runtime()
    if plan is None:
        if a.shape[-1] == 0:
            return _nothing_to_sum(c, d, beta, activation)
        plan = _plans[key] = make_plan(runtime, a, b, c, d, activation)
    if not pa & pb & (pd or TAG) & TAG:  # an address of the host's
        check_devices("a matrix product", a, b, d)
    if plan.two_steps:
        return _in_two_steps(runtime, plan, a, b, c, d, alpha, beta, activation)
    dispatch(runtime, plan, pa, pb, pc, pd, alpha, beta)
    return c


def _halved(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
) -> torch.Tensor:
    """The product by halves of its batch, rows or columns, until each can be bound. No sum is taken apart."""
    near = bindable_copy(a), bindable_copy(b), bindable_copy(d) if d is not None else None
    try:
        made = _whole(near[0], near[1], new_contiguous(c.shape, c.dtype), near[2], alpha, beta, activation)
    except BindingTooLarge:
        batch, rows, columns = c.dim() - 3, c.dim() - 2, c.dim() - 1
        if batch == 0 and c.shape[0] > 1:
            dim = batch
        else:  # the larger operand is the one to halve
            dim = columns if b.numel() >= a.numel() else rows
            if c.shape[dim] < 2:
                dim = rows + columns - dim
        if c.shape[dim] < 2:
            raise
    else:
        return c.copy_(made)
    whole = d.expand(c.shape) if d is not None else None
    half = c.shape[dim] // 2
    for start, length in ((0, half), (half, c.shape[dim] - half)):
        _halved(
            a if dim == columns else a.narrow(dim, start, length),
            b if dim == rows else b.narrow(dim, start, length),
            c.narrow(dim, start, length),
            whole.narrow(dim, start, length) if whole is not None else None,
            alpha,
            beta,
            activation,
        )
    return c


def dispatch(
    runtime: Runtime, plan: Plan, pa: int, pb: int, pc: int, pd: int, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """Launch a plan of one step, given addresses; pd is 0 if there is no d."""
    table = runtime.buffers
    if plan.swapped:
        pa, pb = pb, pa
    one, other, own = plan.shifts
    buffers: tuple[Buffer, ...]
    if pd:
        buffers = (table[pa >> SHIFT], table[pb >> SHIFT], table[pd >> SHIFT], table[pc >> SHIFT])
    else:
        buffers = (table[pa >> SHIFT], table[pb >> SHIFT], table[pc >> SHIFT])
    head = _HEAD.pack(
        (pa & OFFSET_MASK) >> one,
        (pb & OFFSET_MASK) >> one,
        (pd & OFFSET_MASK) >> other,
        (pc & OFFSET_MASK) >> own,
        alpha,
        beta,
    )
    runtime.dispatch(plan.program, buffers, head + plan.tail, plan.x, plan.y)


def _nothing_to_sum(c: torch.Tensor, d: torch.Tensor | None, beta: float, activation: str) -> torch.Tensor:
    if d is None:
        return c.zero_()
    c.copy_(d * beta)
    return c.copy_(_activated(c, activation))


def _activated(value: torch.Tensor, activation: str) -> torch.Tensor:
    if not activation:
        return value
    return torch.relu(value) if activation == "relu" else torch.nn.functional.gelu(value, approximate="tanh")


def _batched(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor if tensor.dim() == 3 else tensor.unsqueeze(0) for tensor in tensors)


def _strides(tensor: torch.Tensor) -> Strides:
    """Strides with those of dimensions of one element made harmless."""
    batch, row, column = tensor.stride()
    sizes = tensor.shape
    return (batch if sizes[0] > 1 else 0, row if sizes[1] > 1 else 0, column if sizes[2] > 1 else 1)


def _operand(tensor: torch.Tensor) -> Operand:
    aligned = (tensor.data_ptr() & OFFSET_MASK) // tensor.dtype.itemsize % 4 == 0
    return Operand(tensor.dtype, _strides(tensor), aligned)


def make_plan(
    runtime: Runtime, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor | None, activation: str
) -> Plan:
    a, b, c = _batched(a, b, c)
    batch, m, k = a.shape
    n = b.shape[2]
    left, right, result = _operand(a), _operand(b), _operand(c)
    added = _operand(d.expand(c.shape)) if d is not None else None
    swapped = n <= 8 < m or (n == 1 and m > 1)
    if swapped:
        left, right, result = right.transposed, left.transposed, result.transposed
        added = added.transposed if added is not None else None
        m, n = n, m
    geometry = Geometry(batch, m, n, k, left, right, result, added, activation)
    if a.dtype not in FLOATS:
        return geometry.plan(runtime, Tiling(DIRECT if m > 1 else DIRECT_ROW), swapped)
    shape = Shape(batch, m, n, k, geometry.b_along, half=a.dtype is torch.float16)

    def run(tiling: Tiling) -> torch.Tensor:
        """The same product with this schedule, into memory of its own."""
        trial = geometry.plan(runtime, tiling, swapped)
        beside = new_contiguous((_extent(c),), c.dtype).as_strided(c.shape, c.stride())
        if trial.two_steps:
            return _in_two_steps(runtime, trial, a, b, beside, d, 1.0, 1.0, activation)
        dispatch(runtime, trial, a.data_ptr(), b.data_ptr(), beside.data_ptr(), 0 if d is None else d.data_ptr())
        return beside

    return geometry.plan(runtime, choose(runtime, shape, name_of(a.dtype), run), swapped)


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))


def _buffer(runtime: Runtime, tensor: torch.Tensor) -> Buffer:
    return runtime.buffers[tensor.data_ptr() >> SHIFT]


@dataclass(frozen=True)
class Geometry:
    """A product whose operands have taken their places: m rows, n columns, k steps."""

    batch: int
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    c: Operand
    d: Operand | None
    activation: str

    @property
    def a_along(self) -> str:
        return "k" if self.a.strides[2] == 1 or self.a.strides[1] != 1 else "m"

    @property
    def b_along(self) -> str:
        return "n" if self.b.strides[2] == 1 and (self.n > 1 or self.b.strides[1] != 1) else "k"

    def whole_vectors(self, operand: Operand, length: int, *, across: bool = False) -> bool:
        """Is every run of four along the contiguous index one aligned vec4? `across`: the contiguous index is the row's."""
        batch, row, column = operand.strides
        step, other = (row, column) if across else (column, row)
        return operand.aligned and step == 1 and length % 4 == 0 and other % 4 == 0 and batch % 4 == 0

    def plan(self, runtime: Runtime, tiling: Tiling, swapped: bool) -> Plan:
        schedule, splits = tiling.schedule, tiling.splits
        form = schedule.form
        names = [name_of(operand.dtype) for operand in (self.a, self.b, self.c)]
        wide = all(KINDS[name].nbytes in (2, 4) and KINDS[name].floating for name in names[:2])
        a_along, b_along = self.a_along, self.b_along
        a_vector = (
            wide
            and form != "columns"
            and (
                self.whole_vectors(self.a, self.k)
                if a_along == "k"
                else self.whole_vectors(self.a, self.m, across=True)
            )
        )
        b_vector = wide and (
            self.whole_vectors(self.b, self.n) if b_along == "n" else self.whole_vectors(self.b, self.k, across=True)
        )
        if form in ("direct", "rows") and a_along == "m":
            a_vector = False
        dense: Strides = (self.m * self.n, self.n, 1)
        vectors = form != "rows" and wide
        c_vector = vectors and self.whole_vectors(self.c, self.n)
        # A thread must own the whole words it writes.
        narrow = KINDS[names[2]].lanes > 1 and not c_vector
        beside = splits > 1 or narrow
        stored, c_strides = names[2], self.c.strides
        if beside:
            stored, c_strides, c_vector = _accumulator(self.c.dtype), dense, vectors and self.n % 4 == 0
        spec = wgsl.Matrices(
            names[0],
            names[1],
            stored,
            name_of(self.d.dtype) if self.d is not None and not beside else "",
            a_along,
            b_along,
            a_vector,
            b_vector,
            c_vector,
            "" if beside else self.activation,
            split=beside,
        )
        program = compiled(runtime, spec, schedule)
        tail, x, y = grid(schedule, self.batch, self.m, self.n, self.k, splits)
        d_strides = self.d.strides if self.d is not None else (0, 0, 0)
        strides = struct.pack("<12I", *self.a.strides, *self.b.strides, *d_strides, *c_strides)
        added = self.d.dtype if self.d is not None else self.c.dtype
        sizes = [dtype.itemsize.bit_length() - 1 for dtype in (self.a.dtype, added, self.c.dtype)]
        shifts = (sizes[0], sizes[1], sizes[2])
        return Plan(program, x, y, tail + strides, swapped, splits, narrow, beside, shifts)


def _accumulator(dtype: torch.dtype) -> str:
    """The dtype in which a product of `dtype` is kept before it is cast."""
    return {"f32": "float32", "i32": "int32", "i64": "int64", "f64": "float64"}[KINDS[name_of(dtype)].compute]


def compiled(runtime: Runtime, spec: wgsl.Matrices, schedule: wgsl.Schedule) -> Program:
    def text() -> str:
        return wgsl.render(wgsl.matrices(spec), schedule)

    buffers = 4 if spec.d else 3
    return runtime.programs.make(
        (spec, schedule), text, buffers=buffers, writable=1 << (buffers - 1), immediates=4 * len(wgsl.MATRIX_PARAMETERS)
    )


def grid(schedule: wgsl.Schedule, batch: int, m: int, n: int, k: int, splits: int) -> tuple[bytes, int, int]:
    """The schedule's parameters, packed, and the launch grid."""
    step = max(schedule.bk, 4)
    part = -(-k // splits)
    chunk = -(-part // step) * step
    tiles_m = 1 if schedule.form in ("rows", "columns") else -(-m // schedule.tile_m)
    tiles_n = -(-n // schedule.tile_n)
    groups = tiles_m * tiles_n * batch * splits
    x = min(groups, MOST_GROUPS)
    packed = struct.pack("<9I", m, n, k, chunk, splits, tiles_m, tiles_n, x, batch * splits)
    return packed, x, -(-groups // x)


def _in_two_steps(
    runtime: Runtime,
    plan: Plan,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
) -> torch.Tensor:
    """Compute parts in 32 bits, then add them up, scale, add d and cast in a second kernel."""
    given = c
    a, b, c = _batched(a, b, c)
    batch, m, n = c.shape
    kept = getattr(torch, _accumulator(c.dtype))
    parts = new_contiguous((batch, plan.splits, n, m) if plan.swapped else (batch, plan.splits, m, n), kept)
    left, right = (b, a) if plan.swapped else (a, b)
    offsets = [(t.data_ptr() & OFFSET_MASK) // t.dtype.itemsize for t in (left, right)]
    head = _HEAD.pack(*offsets, 0, 0, 1.0, 1.0)
    buffers = [_buffer(runtime, left), _buffer(runtime, right), _buffer(runtime, parts)]
    runtime.dispatch(plan.program, buffers, head + plan.tail, plan.x, plan.y)
    finish(parts.transpose(2, 3) if plan.swapped else parts, c, d, alpha, beta, activation)
    return given


_finishes: dict[Any, Launch] = device_memory()


def finish(
    parts: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "",
) -> torch.Tensor:
    """c[b] = activation(alpha * sum over s of parts[b, s] + beta * d[b]), cast to c's dtype."""
    if not parts.is_floating_point():
        assert parts.shape[1] == 1 and d is None
        return on_device(parts[:, 0], c)
    narrow = KINDS[name_of(c.dtype)].lanes > 1
    target = new_contiguous(c.shape, torch.float32) if narrow else c
    key = (
        *(parts.size(), parts.stride(), target.dtype, target.stride(), activation, alpha, beta),
        (d.dtype, d.size(), d.stride()) if d is not None else None,
    )
    whole = _finishes.get(key)
    if whole is None:
        whole = _finishes[key] = finisher(parts, target, d, alpha, beta, activation)
    if d is not None:
        whole(parts, d, target)
    else:
        whole(parts, target)
    return on_device(target, c) if narrow else c


def finisher(
    parts: torch.Tensor, target: torch.Tensor, d: torch.Tensor | None, alpha: float, beta: float, activation: str
) -> Launch:
    batch, splits, m, n = parts.shape
    inputs = [("parts", parts)]
    numbers: list[tuple[str, str, Any]] = [("m", "u32", m), ("columns", "u32", n), ("splits", "u32", splits)]
    numbers += [(f"q{i}", "u32", step) for i, step in enumerate(parts.stride())]
    numbers += [(f"c{i}", "u32", step) for i, step in enumerate(target.stride())]
    value = "sum * p.alpha"
    if d is not None:
        expanded = d.expand(target.shape)
        inputs.append(("d", expanded))
        numbers += [(f"d{i}", "u32", step) for i, step in enumerate(expanded.stride())]
        numbers.append(("beta", "f32", beta))
        value += " + p.beta * load_d(batch * p.d0 + y * p.d1 + x * p.d2)"
    numbers.append(("alpha", "f32", alpha))
    active = wgsl.ACTIVATIONS[activation].replace("{0}", "v").replace("vec4<f32>(", "f32(")
    body = (
        "  let x = i % p.columns; let y = (i / p.columns) % p.m; let batch = i / (p.columns * p.m);\n"
        "  var sum = 0.0;\n"
        "  for (var s = 0u; s < p.splits; s++) { sum += load_parts(batch * p.q0 + s * p.q1 + y * p.q2 + x * p.q3); }\n"
        f"  let v = {value};\n  store_c(batch * p.c0 + y * p.c1 + x * p.c2, {active});"
    )
    return Launch(inputs, [("c", target)], numbers, batch * m * n, body)
