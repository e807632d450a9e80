"""Matrix products: mm, bmm, addmm, baddbmm and the ops made of them.

Transposed and sliced operands are read in place by their strides. What follows from the geometry alone (the schedule, the
shader, the launch grid) is a plan, found again by a tuple.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, TAG, Buffer
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
from anytorch.gpu.wgsl import matmul as wgsl
from anytorch.gpu.wgsl.types import KINDS, supported
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.direct import unwatched
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import check_devices, to_meta
from anytorch.webgpu.pieces import bindable_copy
from anytorch.webgpu.pointwise import MOST_GROUPS, name_of
from anytorch.webgpu.tensors import aten, new_contiguous, sized_tensor, storage_nbytes
from anytorch.webgpu.threads import Launch
from anytorch.webgpu.tuning import DIRECT, DIRECT_ROW, Choice, Shape, choose

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
        plan = _plans[key] = _make_plan(runtime, a, b, c, d, activation)
    if not pa & pb & (pd or TAG) & TAG:  # an address of the host's
        check_devices("a matrix product", a, b, d)
    if plan.two_steps:
        return _in_two_steps(runtime, plan, a, b, c, d, alpha, beta, activation)
    _dispatch(runtime, plan, pa, pb, pc, pd, alpha, beta)
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


def _dispatch(
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


def _make_plan(
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
        return geometry.plan(runtime, Choice(DIRECT if m > 1 else DIRECT_ROW), swapped)
    shape = Shape(batch, m, n, k, geometry.b_along, half=a.dtype is torch.float16)

    def run(choice: Choice) -> None:
        """The same product with this schedule, into memory of its own: it is only timed."""
        trial = geometry.plan(runtime, choice, swapped)
        beside = trial.splits > 1 or trial.narrow
        size = trial.splits * batch * m * n if beside else _extent(c)
        target = new_contiguous((size,), torch.float32 if beside else c.dtype)
        buffers = [_buffer(runtime, b if swapped else a), _buffer(runtime, a if swapped else b)]
        if d is not None and not beside:
            buffers.append(_buffer(runtime, d))
        head = _HEAD.pack(0, 0, 0, 0, 1.0, 1.0)
        runtime.dispatch(trial.program, [*buffers, _buffer(runtime, target)], head + trial.tail, trial.x, trial.y)
        if beside:  # adding up the parts is part of the price
            finish(target.view(batch, trial.splits, m, n), new_contiguous((batch, m, n), c.dtype))

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

    def plan(self, runtime: Runtime, choice: Choice, swapped: bool) -> Plan:
        schedule, splits = choice.schedule, choice.splits
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
        whole = _finishes[key] = _finisher(parts, target, d, alpha, beta, activation)
    if d is not None:
        whole(parts, d, target)
    else:
        whole(parts, target)
    return on_device(target, c) if narrow else c


def _finisher(
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


# --- ops -----------------------------------------------------------------------------------------------------------


def _usable(*tensors: torch.Tensor) -> bool:
    dtype = tensors[0].dtype
    if any(tensor.dtype is not dtype for tensor in tensors):
        return False
    return dtype in (*FLOATS, *INTEGERS, torch.float64) and supported(name_of(dtype), open_runtime().features)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Operands with a lazy negation carry it as a bit that no kernel looks at."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


_accepted: dict[Any, bool] = {}


def _accepts(op: Any, *tensors: torch.Tensor) -> bool:
    """Can a kernel of ours compute this? Raises torch's own errors about sizes and dtypes; both once per geometry."""
    key = (op, *[(tensor.size(), tensor.dtype) for tensor in tensors])
    found = _accepted.get(key)
    if found is None:
        check_devices(str(op), *tensors)
        op(*[to_meta(tensor) for tensor in tensors])
        found = _accepted[key] = _usable(*tensors)
    return found


def _into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    if out is None:
        return made
    if out.shape != made.shape:
        torch._prims_common.wrappers._maybe_resize_out(out, made.shape)
    return out.copy_(made)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not _accepts(aten.bmm.default, a, b):
        made: torch.Tensor = fallback(aten.bmm.default, a, b)
        return made
    result = new_contiguous((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
    return product(_plain(a), _plain(b), result)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not _accepts(aten.mm.default, a, b):
        made: torch.Tensor = fallback(aten.mm.default, a, b)
        return made
    return product(_plain(a), _plain(b), new_contiguous((a.shape[0], b.shape[1]), a.dtype))


_decomposed_linear = aten.linear.default.decompose


class Linear:
    """A layer's product seen before: its sizes, and the plan of the product of matrices it comes to."""

    __slots__ = ("finish", "nbytes", "parts", "plan", "result")

    def __init__(self, rows: torch.Tensor, made: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> None:
        self.result = (tuple(made.size()), tuple(made.stride()), made.dtype)
        self.nbytes = storage_nbytes(*self.result)
        self.plan = plan
        self.parts: tuple[int, ...] = ()
        self.finish: Launch | None = None
        if plan.two_steps:
            m, n = rows.shape[0], made.shape[-1]
            self.parts = (1, plan.splits, n, m) if plan.swapped else (1, plan.splits, m, n)
            parts = new_contiguous(self.parts, torch.float32)
            swapped = parts.transpose(2, 3) if plan.swapped else parts
            self.finish = _finisher(swapped, made.view(1, m, n), bias, 1.0, 1.0, "")

    def __call__(self, px: int, pw: int, pd: int, bias: torch.Tensor | None) -> torch.Tensor:
        out = sized_tensor(*self.result, self.nbytes)
        if self.finish is None:
            _dispatch(open_runtime(), self.plan, px, pw, out.data_ptr(), pd)
            return out
        parts = new_contiguous(self.parts, torch.float32)
        _dispatch(open_runtime(), self.plan, px, pw, parts.data_ptr(), 0)
        if bias is not None:
            self.finish(parts, bias, out)
        else:
            self.finish(parts, out)
        return out


_linears: dict[Any, Linear | None] = device_memory()  # None: this geometry is left to torch's composition


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch makes this op of views and addmm, each of which costs a trip through Python. Without gradients: one launch."""
    if not unwatched(x, weight, bias):
        composed: torch.Tensor = _decomposed_linear(x, weight, bias)
        return composed
    px, pw = x.data_ptr(), weight.data_ptr()
    key: tuple[Any, ...] = (
        x.dtype,
        x.size(),
        x.stride(),
        weight.dtype,
        weight.size(),
        weight.stride(),
        px & 15,
        pw & 15,
    )
    pd = 0
    ours = px & pw & TAG
    if bias is not None:
        pd = bias.data_ptr()
        ours &= pd
        key = (*key, bias.dtype, bias.size(), bias.stride())
    known = _linears.get(key)
    if known is not None and ours:
        try:
            return known(px, pw, pd, bias)
        except BindingTooLarge:  # the same sizes in larger buffers
            return _decomposed_linear(x, weight, bias)  # type: ignore[no-any-return]
    made: torch.Tensor = _decomposed_linear(x, weight, bias)  # checks sizes and devices
    if key not in _linears:
        _linears[key] = _known_linear(x, weight, bias, made)
    return made


def _known_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, made: torch.Tensor
) -> Linear | None:
    """None where something must be copied or cast before or after."""
    tensors = (x, weight, made) if bias is None else (x, weight, made, bias)
    plain = all(tensor.dtype in FLOATS and tensor.numel() for tensor in tensors)
    whole = x.dim() > 1 and x.is_contiguous() and weight.dim() == 2 and (bias is None or bias.dim() == 1)
    if not (plain and whole and _usable(*tensors)):
        return None
    rows = x.view(-1, x.shape[-1])
    try:
        plan = _make_plan(open_runtime(), rows, weight.t(), made.view(rows.shape[0], -1), bias, "")
    except BindingTooLarge:
        return None
    if plan.two_steps and KINDS[name_of(x.dtype)].lanes > 1:
        return None
    return Linear(rows, made, bias, plan)


def _added(
    op: Any, d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any, activation: str = ""
) -> torch.Tensor | None:
    """beta * d + alpha * a @ b in one kernel for floats; None where the CPU must do it."""
    if not _accepts(op, d, a, b) or isinstance(beta, complex) or isinstance(alpha, complex):
        return None
    dtype = a.dtype
    if dtype not in FLOATS:  # exact in integers: scaled and added by pointwise kernels
        whole = mm(a, b) if a.dim() == 2 else bmm(a, b)
        alpha, beta = int(alpha), int(beta)  # as torch does
        scaled = whole * alpha if alpha != 1 else whole
        return scaled if beta == 0 else torch.add(scaled, d, alpha=beta)
    result = new_contiguous((*a.shape[:-1], b.shape[-1]), dtype)
    added = _plain(d) if beta != 0 else None
    return product(_plain(a), _plain(b), result, added, float(alpha), float(beta), activation)


def addmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    made = _added(aten.addmm.default, d, a, b, beta, alpha)
    return fallback(aten.addmm.default, d, a, b, beta=beta, alpha=alpha) if made is None else made


def baddbmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    made = _added(aten.baddbmm.default, d, a, b, beta, alpha)
    return fallback(aten.baddbmm.default, d, a, b, beta=beta, alpha=alpha) if made is None else made


def addmm_activation(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> torch.Tensor:
    op = aten._addmm_activation.default
    made = _added(aten.addmm.default, d, a, b, beta, alpha, "gelu" if use_gelu else "relu")
    if made is None or a.dtype not in FLOATS:
        made = fallback(op, d, a, b, beta=beta, alpha=alpha, use_gelu=use_gelu)
    return made


def addmv(d: torch.Tensor, a: torch.Tensor, x: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    _accepts(aten.addmv.default, d, a, x)
    made = _added(aten.addmm.default, d.unsqueeze(-1), a, x.unsqueeze(1), beta, alpha)
    return fallback(aten.addmv.default, d, a, x, beta=beta, alpha=alpha) if made is None else made.squeeze(1)


def addbmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    accepted = _accepts(aten.addbmm.default, d, a, b)
    batch, rows, inner = a.shape
    if not accepted or isinstance(beta, complex) or isinstance(alpha, complex):
        made: torch.Tensor = fallback(aten.addbmm.default, d, a, b, beta=beta, alpha=alpha)
        return made
    # The sum over the batch is part of the sum over k.
    left = a.transpose(0, 1).reshape(rows, batch * inner)
    return addmm(d, left, b.reshape(batch * inner, b.shape[2]), beta=beta, alpha=alpha)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not _accepts(aten.dot.default, x, y):
        made: torch.Tensor = fallback(aten.dot.default, x, y)
        return made
    return mm(x.unsqueeze(0), y.unsqueeze(1)).view(())


def vdot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.is_complex() or y.is_complex() or not _usable(x, y):
        made: torch.Tensor = fallback(aten.vdot.default, x, y)
        return made
    return dot(x, y)


def _with_out(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return _into(out, function(*args, **kwargs))

    return kernel


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.copy_(function(self, *args, **kwargs))

    return kernel


def register(library: torch.library.Library) -> None:
    # Both keys: with autograd the op is taken apart before autograd sees it, in inference mode there is no autograd.
    library.impl("linear", linear, "AutogradPrivateUse1")
    library.impl("linear", linear, "PrivateUse1")
    for name, function in (
        ("mm", mm),
        ("bmm", bmm),
        ("addmm", addmm),
        ("baddbmm", baddbmm),
        ("addmv", addmv),
        ("addbmm", addbmm),
        ("_addmm_activation", addmm_activation),
        ("dot", dot),
        ("vdot", vdot),
    ):
        library.impl(name, function, "PrivateUse1")
        if name in ("dot", "vdot"):
            continue
        library.impl(f"{name}.out", _with_out(function), "PrivateUse1")
        if name.startswith(("add", "badd")):
            library.impl(f"{name}_", _in_place(function), "PrivateUse1")
