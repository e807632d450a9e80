"""One matrix product on the GPU, of any two matrices or batches of them; `ops.matmul` and attention are made of it.

Transposed and sliced operands are read in place by their strides. What follows from the geometry alone (the schedule, the
shader, the launch grid) is a plan, found again by a tuple.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, TAG
from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import matmul as wgsl
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu import matrix_products
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.dtypes import FLOATS, name_of
from anytorch.webgpu.launch import check_devices
from anytorch.webgpu.matrix_products import MatrixTiling
from anytorch.webgpu.per_element import per_element_plan
from anytorch.webgpu.tensors import new_contiguous
from anytorch.webgpu.tuning import DIRECT, DIRECT_ROW, AnyTiling, Shape, Tiling, choose

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Operand:
    """A matrix as the generator sees it: strides of batch, row and column in elements, and how its address is aligned."""

    dtype: torch.dtype
    strides: Strides
    aligned: bool  # its first element is at a multiple of four elements
    eights: bool = False  # … of 16 bytes

    @property
    def transposed(self) -> Operand:
        batch, row, column = self.strides
        return Operand(self.dtype, (batch, column, row), self.aligned, self.eights)


class Product:
    """The plan of a product, and what to do with what it writes."""

    __slots__ = ("beside", "plan", "splits", "swapped")

    def __init__(self, plan: Plan, swapped: bool, splits: int, beside: bool) -> None:
        self.plan = plan
        self.swapped = swapped  # A and B have changed places: C transposed is computed
        self.splits = splits
        self.beside = beside  # C is computed in 32 bits, in `splits` parts, which `finish` adds up and casts

    def __call__(self, a: int, b: int, c: int, d: int = 0, alpha: float = 1.0, beta: float = 1.0) -> None:
        """Launch, given the addresses; d is 0 if there is none."""
        if self.swapped:
            a, b = b, a
        self.plan((a, b, d, c) if d else (a, b, c), alpha, beta)

    def parts(self, m: int, n: int, batch: int = 1) -> tuple[int, int, int, int]:
        """The size of what a product of batches of m rows and n columns is computed in beside."""
        return (batch, self.splits, n, m) if self.swapped else (batch, self.splits, m, n)


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
    pa, pb, pc, pd = a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr() if d is not None else 0
    if pc == 0:
        return c
    key = (
        *("product", activation, a.dtype, c.dtype, a.size(), a.stride(), b.size(), b.stride(), c.stride()),
        (d.dtype, d.size(), d.stride()) if d is not None else None,
        (pa & 15, pb & 15, pc & 15),
    )
    known = plans[key]
    if known is None:
        if a.shape[-1] == 0:
            return _nothing_to_sum(c, d, beta, activation)
        known = plans[key] = make_product(a, b, c, d, activation)
    if not pa & pb & (pd or TAG) & TAG:  # an address of the host's
        check_devices("a matrix product", a, b, d)
    if not known.beside:
        known(pa, pb, pc, pd, alpha, beta)
        return c
    return _computed(known, a, b, c, d, alpha, beta, activation)


def _computed(
    known: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
) -> torch.Tensor:
    """c, computed by this product: at once, or in parts beside it that are added up."""
    pa, pb = a.data_ptr(), b.data_ptr()
    if not known.beside:
        known(pa, pb, c.data_ptr(), d.data_ptr() if d is not None else 0, alpha, beta)
        return c
    batched = c if c.dim() == 3 else c.unsqueeze(0)
    batch, m, n = batched.shape
    parts = new_contiguous(known.parts(m, n, batch), getattr(torch, _accumulator(c.dtype)))
    known(pa, pb, parts.data_ptr())
    finish(parts.transpose(2, 3) if known.swapped else parts, batched, d, alpha, beta, activation)
    return c


def _nothing_to_sum(c: torch.Tensor, d: torch.Tensor | None, beta: float, activation: str) -> torch.Tensor:
    if d is None:
        return c.zero_()
    value = d * beta
    if activation:
        value = torch.relu(value) if activation == "relu" else torch.nn.functional.gelu(value, approximate="tanh")
    return c.copy_(value)


def _strides(tensor: torch.Tensor) -> Strides:
    """Strides with those of dimensions of one element made harmless."""
    batch, row, column = tensor.stride()
    sizes = tensor.shape
    return (batch if sizes[0] > 1 else 0, row if sizes[1] > 1 else 0, column if sizes[2] > 1 else 1)


def _operand(tensor: torch.Tensor) -> Operand:
    place = tensor.data_ptr() & OFFSET_MASK
    return Operand(tensor.dtype, _strides(tensor), place // tensor.dtype.itemsize % 4 == 0, place % 16 == 0)


def make_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor | None, activation: str) -> Product:
    runtime = open_runtime()
    a, b, c = (tensor if tensor.dim() == 3 else tensor.unsqueeze(0) for tensor in (a, b, c))
    batch, m, k = a.shape
    n = b.shape[2]
    left, right, result = _operand(a), _operand(b), _operand(c)
    added = _operand(d.expand(c.shape)) if d is not None else None
    swapped = n <= 8 < m or (n == 1 and m > 1)
    if min(m, n) > 8 and matrix_products.in_use(runtime, a.dtype):  # they write rows of neighbours
        swapped = result.strides[1] == 1 != result.strides[2]
    if swapped:
        left, right, result = right.transposed, left.transposed, result.transposed
        added = added.transposed if added is not None else None
        m, n = n, m
    geometry = Geometry(batch, m, n, k, left, right, result, added, activation)
    if a.dtype not in FLOATS:
        return geometry.product(Tiling(DIRECT if m > 1 else DIRECT_ROW), swapped)
    shape = Shape(batch, m, n, k, geometry.b_along, half=a.dtype is torch.float16)

    def run(tiling: AnyTiling) -> torch.Tensor:
        """The same product with this schedule, into memory of its own."""
        own = new_contiguous((_extent(c),), c.dtype).as_strided(c.shape, c.stride())
        return _computed(geometry.product(tiling, swapped), a, b, own, d, 1.0, 1.0, activation)

    def prepare(tiling: AnyTiling) -> Product:
        return geometry.product(tiling, swapped)

    return prepare(
        choose(runtime, shape, name_of(a.dtype), run, matrix_products.offered(runtime, geometry), prepare=prepare)
    )


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))


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
        """Whether runs of four along the contiguous index are aligned vec4s. `across`: the contiguous index is the row's."""
        batch, row, column = operand.strides
        step, other = (row, column) if across else (column, row)
        return operand.aligned and step == 1 and length % 4 == 0 and other % 4 == 0 and batch % 4 == 0

    def product(self, tiling: AnyTiling, swapped: bool) -> Product:
        if isinstance(tiling, MatrixTiling):
            launched, beside = matrix_products.plan(open_runtime(), self, tiling)
            return Product(launched, swapped, tiling.splits, beside)
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
        added = self.d if spec.d else None
        numbers, groups = schedule_grid(schedule, self.batch, self.m, self.n, self.k, splits)
        d_strides = self.d.strides if self.d is not None else (0, 0, 0)
        operands = [operand for operand in (self.a, self.b, added) if operand is not None]
        plan = Plan(
            (spec, schedule),
            lambda kernel: wgsl.render(wgsl.matrices(kernel[0]), kernel[1]),
            groups,
            [*[operand.dtype.itemsize for operand in operands], KINDS[stored].nbytes],
            1 << len(operands),
            numbers="2f",
            tail=(*numbers, *self.a.strides, *self.b.strides, *d_strides, *c_strides),
        )
        return Product(plan, swapped, splits, beside)


def _accumulator(dtype: torch.dtype) -> str:
    """The dtype in which a product of `dtype` is kept before it is cast."""
    return {"f32": "float32", "i32": "int32", "i64": "int64", "f64": "float64"}[KINDS[name_of(dtype)].compute]


def schedule_grid(
    schedule: wgsl.Schedule, batch: int, m: int, n: int, k: int, splits: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The schedule's parameters, and the launch grid."""
    step = max(schedule.bk, 4)
    part = -(-k // splits)
    chunk = -(-part // step) * step
    tiles_m = 1 if schedule.form in ("rows", "columns") else -(-m // schedule.tile_m)
    tiles_n = -(-n // schedule.tile_n)
    x, y = grid(tiles_m * tiles_n * batch * splits)
    return (m, n, k, chunk, splits, tiles_m, tiles_n, x, batch * splits), (x, y)


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
        *("finish", parts.size(), parts.stride(), target.dtype, target.stride(), activation, alpha, beta),
        (d.dtype, d.size(), d.stride()) if d is not None else None,
    )
    plan = plans[key]
    if plan is None:
        plan = plans[key] = finisher(parts, target, d, alpha, beta, activation)
    plan([tensor.data_ptr() for tensor in (parts, d, target) if tensor is not None])
    return on_device(target, c) if narrow else c


def finisher(
    parts: torch.Tensor, target: torch.Tensor, d: torch.Tensor | None, alpha: float, beta: float, activation: str
) -> Plan:
    """The plan of `finish`, for parts, d if there is one, and a target of 32 bits."""
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
    return per_element_plan(inputs, [("c", target)], numbers, batch * m * n, body)
