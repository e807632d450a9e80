"""Kronos's linear layer of few rows in Triton, with the norm before it and the sum or gate behind it, for kernel graphs.

Its attention is no candidate: it writes keys and values into a cache, and a graph has no op that changes a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from anytorch.forecast.kernels.products import MOST_ROWS, Product, Products, Way, Work
from anytorch.forecast.kernels.row_step import Tiles
from anytorch.graph.handwritten import Handwritten, Launch, register
from anytorch.graph.patterns import Match, either, given, op

NARROWEST = 16  # what a matrix unit's tile is wide


def why_not(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    shape, weight = match.shape("x", known), match.shape("weight", known)
    rows, result = _rows(shape), match.graph.nodes[match.output].shape
    if match.dtypes() != {"float32"}:
        return "it computes in float32"
    if not 1 <= rows <= MOST_ROWS or len(weight) != 2 or weight[1] < NARROWEST:
        return f"it is for up to {MOST_ROWS} rows of {NARROWEST} values or more"
    if "norm" in match and (match["norm"]["rank"] != 1 or "scale" not in match):
        return "the norm must have a weight of one row"
    if "bias" in match and match["bias"].shape != (weight[0],):
        return "the bias is one number per column"
    if "residual" in match and match["residual"].shape != result:
        return "what is added is of the result's shape"
    if "gate" in match and (_halves(match) != [(0, weight[0] // 2), (weight[0] // 2, weight[0])] or weight[0] % 2):
        return "the gate is the first half of the columns"
    return "" if find_spec("triton") is not None else "triton is not installed"


def _rows(shape: Sequence[int]) -> int:
    return torch.Size(shape[:-1]).numel()


def _halves(match: Match) -> list[tuple[int, int]]:
    """Where the columns of the gate and of what it is multiplied by begin and end."""
    last = len(match["gate"].shape) - 1
    cuts = [match["gate"], match["value"]]
    return [(cut["start"], cut["stop"]) if cut["dim"] % (last + 1) == last else (0, 0) for cut in cuts]


def prepare(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    width = match.shape("weight", known)[1]
    names = ("bias", "scale", "residual")
    places = {name: match.place(name) if name in match else None for name in ("x", "weight", *names)}
    gated, eps = "gate" in match, float(match["norm"]["eps"]) if "norm" in match else 0.0

    def built_in(product: Product) -> Way:
        # A sum in parts counts them in memory of its own, which two streams that run one program would share.
        return replace(Tiles.of(product.rows).cut(product), splits=1)

    products = Products(device, built_in)

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        found = {name: None if place is None else tensors[place] for name, place in places.items()}
        x, weight, residual = found["x"], found["weight"], found["residual"]
        assert x is not None and weight is not None
        rows, columns = x.view(-1, width), out.shape[-1]
        more = None if residual is None else residual.view(-1, columns)
        work = Work(*(rows, weight, out.view(-1, columns), found["bias"], found["scale"], more, gated), epsilon=eps)
        products(work)

    return run


X = given("x")
NORMED = either(op("rms_norm", X, given("scale"), name="norm"), X)
PRODUCT = op("matmul", NORMED, op("permute", given("weight"), dims=(1, 0)))
GATE, VALUE = op("slice", PRODUCT, name="gate"), op("slice", PRODUCT, name="value")
LINEAR = either(
    op("mul", op("silu", GATE), VALUE),
    op("add", op("add", PRODUCT, given("bias")), given("residual")),
    op("add", PRODUCT, given("bias")),
    op("add", PRODUCT, given("residual")),
    PRODUCT,
)
register(
    Handwritten(
        "Kronos linear (Triton)", "linear", "forecast/kernels/products_source.py", "triton", LINEAR, why_not, prepare
    )
)
