"""The linear layers of generated rows, each with what stands before and behind it, and the ways to compute one.

A way is a `Cut` of our own kernel (`products_source`) or torch's product with the rest as kernels of their own.
All of them are float32: they differ in the order of sums, and so in the last digits. Which one computes a product is fixed
before its step is recorded, by what is built in or by measuring (`choice`): with made-up inputs, and the truth in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anytorch.forecast.kernels.choice import NOTHING, Chooser, Option, Part
from anytorch.forecast.model.fused import Apply, FusedBlock, fuse
from anytorch.forecast.model.layers import EPS
from anytorch.measured.compiling import Key, Task
from anytorch.measured.verdict import Verdict

MOST_ROWS = 64  # of a step that goes through our kernels whole; more are a window's
FEW_ROWS = 8  # up to these, plain multiplication reads the weights as fast as matrix units do
SMALLEST_PRODUCT = 16  # rows and columns of a matrix unit's tile
PROGRAMS = 512  # as many as keep a large device's units busy with a few each
WINDOW_PROGRAMS = 256  # of a window's larger tiles
SHORT_WINDOWS = 1024  # rows up to which a window's products leave a large device idle
MOST_SPLITS = 8  # more parts cost more to put together than they save


@dataclass(frozen=True)
class Product:
    """What decides how a product is best computed."""

    rows: int  # of windows (more than MOST_ROWS): rounded up to a power of two
    width: int
    columns: int
    norm: bool = False
    bias: bool = False
    residual: bool = False
    gated: bool = False
    per_head: int = 0

    def __str__(self) -> str:
        with_these = [name for name in ("norm", "bias", "residual", "gated") if getattr(self, name)]
        heads = [f"{self.per_head} columns per head"] if self.per_head else []
        return " ".join([f"{self.rows}x{self.width}->{self.columns}", *with_these, *heads])


@dataclass(frozen=True)
class Cut:
    """How our kernel divides a product among programs."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    splits: int = 1  # of the sum
    block_m: int = 0  # 0: all rows in one tile
    dot: bool = True  # matrix units (three products of rounded parts: float32's accuracy), else plain multiplication
    precision: str = "tf32x3"

    def __str__(self) -> str:
        unit = self.precision if self.dot else "plain"
        rows = f"{self.block_m}x" if self.block_m else ""
        parts = f", {self.splits} parts" if self.splits > 1 else ""
        return f"{unit} {rows}{self.block_n}x{self.block_k}, {self.stages} stages, {self.warps} warps{parts}"


Way = Cut | None  # None: torch's product


def name_of(way: Way) -> str:
    return "torch" if way is None else str(way)


@dataclass(frozen=True)
class Work:
    """A product with its tensors: `x` [rows, width], `weight` [columns, width] (twice the columns if `gated`), `out`."""

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
    residual: Tensor | None = None
    gated: bool = False
    per_head: int = 0  # so many columns in a row share one of x's parts of `width` values
    epsilon: float = EPS  # of the norm

    @property
    def product(self) -> Product:
        rows = self.x.shape[0] if self.x.shape[0] <= MOST_ROWS else power_of_two(self.x.shape[0])
        norm, bias, residual = (part is not None for part in (self.norm, self.bias, self.residual))
        columns, width = self.out.shape[1], self.weight.shape[1]
        return Product(rows, width, columns, norm, bias, residual, self.gated, self.per_head)


class Layer:
    """The weights of one block as the kernels read them: views of the model's own."""

    def __init__(self, block: Any) -> None:
        attention, ffn = block.self_attn, block.ffn
        self.norm1, self.norm2 = block.norm1.weight.data, block.norm2.weight.data
        self.qkv, self.qkv_bias = fuse((attention.q_proj, attention.k_proj, attention.v_proj))
        self.out, self.out_bias = attention.out_proj.weight.data, attention.out_proj.bias.data
        self.gate, _ = fuse((ffn.w1, ffn.w3))
        self.down = ffn.w2.weight.data


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with all it is given: to be run, or compiled only."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)

    def compile(self) -> None:
        """Have the kernel ready, without running it. Takes no memory: somebody may be recording meanwhile."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)


class Products:
    """Computes products, each the way that was chosen for it; `built_in` says how where nothing was.

    What a split product needs to put its parts together is kept per product, so that recordings find it in its place.
    """

    def __init__(self, device: torch.device, built_in: Callable[[Product], Way]) -> None:
        self.device, self.built_in = device, built_in
        self.chosen: dict[Product, Way] = {}
        self.rooms: dict[tuple[Product, Cut], tuple[Tensor, Tensor]] = {}
        self.count = torch.zeros(1, device=device, dtype=torch.int32)  # what counts parts, for compiling

    def __call__(self, work: Work) -> None:
        self.compute(work, self.way(work.product))

    def way(self, product: Product) -> Way:
        return self.chosen[product] if product in self.chosen else self.built_in(product)

    def compute(self, work: Work, way: Way) -> None:
        """Write `work.out`, one way."""
        if way is None:
            by_torch(work)
            return
        self.launch(work, way, *self.room(work, way))()

    def compile(self, work: Work, way: Cut) -> None:
        self.launch(work, way, work.out, work.out if way.splits == 1 else self.count).compile()

    @cached_property
    def kernels(self) -> Any:
        return import_module("anytorch.forecast.kernels.products_source")

    def launch(self, work: Work, way: Cut, part: Tensor, arrived: Tensor) -> KernelLaunch:
        x, out = work.x, work.out
        optional = (x if tensor is None else tensor for tensor in (work.bias, work.norm, work.residual))
        arguments = (x, work.weight, *optional, out, part, arrived, x.shape[0], out.shape[1], x.stride(0))
        return KernelLaunch(self.kernels.linear, grid_of(work, way), arguments, constants(work, way))

    def tidy(self) -> None:
        """Free the memory that only the rejected ways needed."""
        self.rooms = {key: room for key, room in self.rooms.items() if self.way(key[0]) == key[1]}

    def room(self, work: Work, way: Cut) -> tuple[Tensor, Tensor]:
        """For the parts of a split product: their sums, and how many of them have arrived."""
        if way.splits == 1:
            return work.out, work.out  # never looked at
        key = (work.product, way)
        if key not in self.rooms:
            columns, rows, splits = grid_of(work, way)
            block_m, block_n = tile_of(work, way)
            size = columns * rows * splits * (2 * block_m * block_n + block_m)
            part = torch.empty(size, device=self.device, dtype=torch.float32)
            self.rooms[key] = (part, torch.zeros(columns * rows, device=self.device, dtype=torch.int32))
        return self.rooms[key]


def tile_of(work: Work, way: Cut) -> tuple[int, int]:
    """Rows and columns of what one program computes."""
    block_n = way.block_n
    while work.per_head % block_n:  # a tile's columns belong to one head
        block_n //= 2
    block_m = way.block_m or power_of_two(work.x.shape[0])
    return (max(SMALLEST_PRODUCT, block_m) if way.dot else block_m), block_n


def grid_of(work: Work, way: Cut) -> tuple[int, int, int]:
    block_m, block_n = tile_of(work, way)
    share = share_of(work.weight.shape[1], way)
    return -(-work.out.shape[1] // block_n), -(-work.x.shape[0] // block_m), -(-work.weight.shape[1] // share)


def share_of(width: int, way: Cut) -> int:
    """How much of the sum one part takes: a multiple of what is read at a time."""
    return -(-width // (way.splits * way.block_k)) * way.block_k


def constants(work: Work, way: Cut) -> dict[str, Any]:
    block_m, block_n = tile_of(work, way)
    width = work.weight.shape[1]
    return {
        "WIDTH": width,
        "EPSILON": work.epsilon,
        "NORM": work.norm is not None,
        "BIAS": work.bias is not None,
        "RESIDUAL": work.residual is not None,
        "GATED": work.gated,
        "PER_HEAD": work.per_head,
        "DOT": way.dot,
        "PRECISION": way.precision,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": min(way.block_k, power_of_two(width)),
        "STAGES": way.stages,
        "SPLITS": grid_of(work, way)[2],
        "SHARE": share_of(width, way),
        "num_warps": way.warps,
    }


def by_torch(work: Work) -> None:
    """The library's product, and kernels of their own for the rest."""
    x, weight, bias, out = work.x, work.weight, work.bias, work.out
    if work.norm is not None:
        x = F.rms_norm(x, work.norm.shape, work.norm, EPS)
    if work.per_head:
        heads = len(weight) // work.per_head
        rows = x.reshape(len(x), heads, -1).transpose(0, 1)
        found = torch.bmm(rows, weight.view(heads, work.per_head, -1).transpose(1, 2))
        found = found.transpose(0, 1).reshape(out.shape)
        out.copy_(found if bias is None else found + bias)
    elif work.gated:
        gate, value = F.linear(x, weight).chunk(2, dim=-1)
        torch.mul(F.silu(gate), value, out=out)
    elif work.residual is not None:
        torch.add(F.linear(x, weight, bias), work.residual, out=out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


# --- what is tried ----------------------------------------------------------------------------------------------------

# block_n, block_k, stages, warps: the best few of a thousand, measured on an H200 with the shapes of Kronos-base and
# -small (bench/results/forecast-h200-sweep.json); elsewhere others of them may be.
FOR_ONE = ((2, 1024, 1, 1), (4, 1024, 1, 4), (2, 256, 3, 2), (8, 256, 3, 1))
FOR_FEW = ((4, 128, 3, 2), (4, 256, 3, 2), (8, 64, 3, 4), (4, 128, 3, 4))
FOR_MANY = ((16, 32, 6, 2),)
# Operands are split into rounded parts in registers, so the more is read at a time, the fewer programs fit on a unit.
SPLIT = ((16, 16, 8, 2), (16, 32, 4, 2), (32, 32, 4, 2), (64, 16, 8, 4))
FOR_WINDOWS = (
    Cut(64, 16, 4, 4, block_m=64),
    Cut(64, 32, 3, 4, block_m=64),
    Cut(64, 32, 3, 8, block_m=128),
    Cut(64, 32, 3, 4, block_m=128),
    Cut(128, 16, 4, 8, block_m=128),
)


def candidates(product: Product, built_in: Way, seldom: bool = False) -> list[Way]:
    """The ways worth timing: the built-in one, then the most promising first; none but torch's for what comes `seldom`.

    Pure.
    """
    found: list[Way] = [built_in, None]
    if seldom:
        pass
    elif product.rows > MOST_ROWS:
        found += FOR_WINDOWS
        if product.rows <= SHORT_WINDOWS:
            found += [divided(product, cut) for cut in FOR_WINDOWS[:3]]
    elif product.rows > FEW_ROWS:
        found += [divided(product, Cut(*shape)) for shape in SPLIT]
        found += [Cut(*shape) for shape in FOR_MANY]
    elif product.rows > 1:
        found += [Cut(*shape, dot=False) for shape in FOR_FEW]
        found += [divided(product, Cut(*shape)) for shape in SPLIT[1:3]]
    else:
        found += [Cut(*shape, dot=False) for shape in FOR_ONE]
    return list(dict.fromkeys(found))


def divided(product: Product, cut: Cut) -> Cut:
    """The same with its sum divided, so that there are about as many programs as a large device needs. Pure."""
    tiles = -(-product.columns // cut.block_n) * -(-product.rows // (cut.block_m or product.rows))
    wanted = -(-(WINDOW_PROGRAMS if cut.block_m else PROGRAMS) // tiles)
    splits = min(MOST_SPLITS, power_of_two(wanted), product.width // (2 * cut.block_k))
    return replace(cut, splits=max(1, splits))


def power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True)
class ChosenBlock(FusedBlock):
    """The same block, its products computed by what was chosen for them."""

    layer: Layer
    products: Products

    def qkv_of(self, x: Tensor) -> Tensor:
        work = self.to_qkv(x.reshape(-1, x.shape[-1]))
        self.products(work)
        return work.out.view(*x.shape[:-1], -1)

    def through(self, x: Tensor, attend: Apply) -> Tensor:
        return super().through(x.contiguous(), attend)  # copied once, not for each product

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        back = self.back(attended.reshape(rows.shape), rows)
        self.products(back)
        gate = self.to_gate(back.out)
        self.products(gate)
        down = self.to_down(gate.out, back.out)
        self.products(down)
        return down.out.view(x.shape)

    def works(self, rows: Tensor) -> list[Work]:
        """All products of so many rows, with memory of their own: for choosing."""
        gate = self.to_gate(rows)
        return [self.to_qkv(rows), self.back(rows, rows), gate, self.to_down(gate.out, rows)]

    def to_qkv(self, rows: Tensor) -> Work:
        layer = self.layer
        return Work(rows, layer.qkv, rows.new_empty(len(rows), len(layer.qkv)), bias=layer.qkv_bias, norm=layer.norm1)

    def back(self, attended: Tensor, rows: Tensor) -> Work:
        layer = self.layer
        return Work(attended, layer.out, torch.empty_like(attended), bias=layer.out_bias, residual=rows)

    def to_gate(self, rows: Tensor) -> Work:
        layer = self.layer
        return Work(rows, layer.gate, rows.new_empty(len(rows), len(layer.gate) // 2), norm=layer.norm2, gated=True)

    def to_down(self, inner: Tensor, rows: Tensor) -> Work:
        return Work(inner, self.layer.down, torch.empty_like(rows), residual=rows)


# --- choosing -------------------------------------------------------------------------------------------------------

CHECKED = 64  # rows and columns of an answer
FEWEST_LAUNCHES = 8  # in one timing, also where a step has one such product


def part_of(
    products: Products, product: Product, works: Sequence[Work], seldom: bool = False
) -> tuple[Part, dict[str, Way]]:
    """A product that `works` (one of each layer) share: the part to choose for, and its ways by name.

    All layers' weights are read, as in a step: one of them alone would lie in the device's cache.
    """
    trial = made_up(works)
    trial += trial * (max(0, FEWEST_LAUNCHES - len(trial)) // len(trial) if product.rows <= MOST_ROWS else 0)
    ways = {name_of(way): way for way in candidates(product, products.built_in(product), seldom)}

    def run(way: Way) -> Tensor:
        for work in trial:
            products.compute(work, way)
        return trial[-1].out

    options = [
        Option(name, partial(run, way), partial(products.compile, trial[0], way) if isinstance(way, Cut) else None)
        for name, way in ways.items()
    ]
    return Part(str(product), options, error_of(trial[-1]), len(trial)), ways


def take(
    products: Products,
    works: Sequence[Work],
    chooser: Chooser,
    *others: Part,
    seldom: int = 0,
    also: Mapping[Key, Task] = NOTHING,
) -> dict[str, Verdict] | None:
    """Choose for all products among `works`, and for other parts first; → all choices, by the names of their parts.

    None while their kernels (and `also`) are being compiled. For products that come up to `seldom` times fewer ways are
    tried: they are not worth compiling many kernels for.
    """
    grouped: dict[Product, list[Work]] = {}
    for work in works:
        grouped.setdefault(work.product, []).append(work)
    # What comes most often first: if the time runs out, it runs out on what matters least.
    order = sorted(grouped, key=lambda product: -len(grouped[product]))
    made = [part_of(products, one, grouped[one], len(grouped[one]) <= seldom) for one in order]
    found = chooser.choose([*others, *(part for part, _ in made)], also=also)
    if found is None:
        return None
    for product, (part, ways) in zip(order, made, strict=True):
        if part.name in found:
            products.chosen[product] = ways[found[part.name].chosen]
    products.tidy()
    return found


def made_up(works: Sequence[Work]) -> list[Work]:
    """The same products of other rows, with an answer of their own: measuring leaves no trace in a forecast."""
    first, device = works[0], works[0].weight.device
    x = waves(first.x.shape, device)
    out = torch.empty(first.out.shape, device=device, dtype=torch.float32)
    residual = None if first.residual is None else waves(first.residual.shape, device)
    return [replace(work, x=x, out=out, residual=residual) for work in works]


def waves(shape: torch.Size, device: torch.device) -> Tensor:
    """Numbers between -1 and 1, from no generator: the caller's must not move."""
    return torch.arange(shape.numel(), device=device, dtype=torch.float32).mul_(0.7391).sin_().view(shape)


def error_of(work: Work) -> Callable[[Tensor], float]:
    """How far an answer is from float64's, as a share of its size; some rows and columns are looked at."""
    rows, columns = spread(work.x.shape[0]), spread(work.out.shape[1])
    return distance_from(
        lambda _: reference(work, rows, columns),
        lambda found: found[rows.to(found.device)][:, columns.to(found.device)].cpu().double(),
    )


def distance_from(truth: Apply, looked_at: Apply) -> Callable[[Tensor], float]:
    """How far what is looked at of an answer is from the truth, as a share of its size; the first answer asks for that."""
    known: list[Tensor] = []

    def error(found: Tensor) -> float:
        there = looked_at(found)
        known[:] = known or [truth(found)]
        return float((there - known[0]).norm() / known[0].norm().clamp(min=1e-30))

    return error


def spread(count: int) -> Tensor:
    """At most `CHECKED` of so many places, the first and the last among them."""
    places: Tensor = torch.linspace(0, count - 1, min(CHECKED, count)).round().long()
    return places.unique()  # type: ignore[no-any-return]


def reference(work: Work, rows: Tensor, columns: Tensor) -> Tensor:
    """In float64 on the CPU, where every device's numbers can go."""

    def host(tensor: Tensor, *places: Tensor) -> Tensor:
        for dimension, where in enumerate(places):
            tensor = tensor.index_select(dimension, where.to(tensor.device))
        return tensor.detach().cpu().double()

    x = host(work.x, rows)
    width = work.weight.shape[1]
    if work.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * host(work.norm)
    if work.per_head:
        parts = x.view(len(x), -1, width)[:, columns // work.per_head]  # [rows, columns, width]
        found = (parts * host(work.weight, columns)).sum(-1)
    else:
        found = x @ host(work.weight, columns).t()
    if work.gated:
        found = F.silu(found) * (x @ host(work.weight, columns + work.out.shape[1]).t())
    if work.bias is not None:
        found = found + host(work.bias, columns)
    if work.residual is not None:
        found = found + host(work.residual, rows, columns)
    return found
