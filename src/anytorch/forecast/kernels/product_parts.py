"""Linear layers as parts to choose for (`choice`): made-up inputs, the truth in float64, and every candidate way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from anytorch.forecast.kernels.choice import NOTHING, Chooser, Option, Part
from anytorch.forecast.kernels.products import MOST_ROWS, Cut, Product, Products, Way, Work, candidates, name_of
from anytorch.forecast.model.layers import EPS
from anytorch.measured.compiling import Key, Task
from anytorch.measured.verdict import Verdict

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
    truth: list[Tensor] = []
    rows = spread(work.x.shape[0])
    columns = spread(work.out.shape[1])

    def error(found: Tensor) -> float:
        if not truth:
            truth.append(reference(work, rows, columns))
        there = found[rows.to(found.device)][:, columns.to(found.device)].cpu().double()
        return float((there - truth[0]).norm() / truth[0].norm().clamp(min=1e-30))

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
