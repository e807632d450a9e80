"""The encoder's attention within short texts, and its norm after a sum, in Triton, as candidates for kernel graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from anytorch.graph.handwritten import Handwritten, Launch, register
from anytorch.graph.ops import FLOATS
from anytorch.graph.patterns import Match, either, given, op

SOURCE = "text/encoders/kernels.py"
WARPS = 4  # of a program that takes a text block by block
WIDEST = 1 << 14  # columns of a row that one program holds


def _kernels() -> Any:
    return import_module("anytorch.text.encoders.kernels")


def _why_not_here(match: Match) -> str:
    if len(match.dtypes()) > 1 or not match.dtypes() <= set(FLOATS) - {"float64"}:
        return "all tensors must be of one dtype, 16 or 32 bits wide"
    return "" if find_spec("triton") is not None else "triton is not installed"


def why_no_attention(match: Match, known: Mapping[str, int], device: torch.device, *, blocks: int) -> str:
    node = match["attention"]
    batch, heads, n, width = match.shape("q", known)
    _, groups, keys, _ = match.shape("k", known)
    if node["masked"] or node["counted"]:
        return "it takes no masks or lengths"
    if keys != n or match.shape("v", known)[3] != width:
        return "it is for self-attention: as many keys as queries, and values as wide as keys"
    if heads != groups and batch > 1:
        return "heads may share keys only if there is one text"
    if reason := _why_not_here(match):
        return reason
    kernels = _kernels()
    if not n or not kernels.fits(n, width, blocks) or (blocks and n <= kernels.BLOCK):
        return f"{n} positions of heads {width} wide are not for it"
    return ""


def prepare_attention(match: Match, known: Mapping[str, int], device: torch.device, *, blocks: int) -> Launch:
    """Every head of a batch row is a text of its own; where heads share keys, the one text has several."""
    node, kernels = match["attention"], _kernels()
    batch, heads, n, width = match.shape("q", known)
    texts = batch if batch == 1 else batch * heads
    starts = torch.arange(0, (texts + 1) * n, n, dtype=torch.int32, device=device)
    q, k, v = (match.place(name) for name in "qkv")
    options = {"window": 0, "causal": bool(node["causal"]), "blocks": blocks, "scale": node["scale"]}

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, width], where the tensor lies."""
        return tensor[0].transpose(0, 1) if batch == 1 else tensor.view(texts * n, 1, width)

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        kernels.attend_short(*(seen(tensors[place]) for place in (q, k, v)), starts, n, out=seen(out), **options)

    return run


def why_no_norm(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    shape = match.shape("x", known)
    if match["norm"]["rank"] != 1 or match.shape("y", known) != shape or not 0 < shape[-1] <= WIDEST or 0 in shape:
        return "it is for rows of equal shapes, normalized over the last dimension"
    return _why_not_here(match)


def prepare_norm(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    eps, kernels = float(match["norm"]["eps"]), _kernels()
    width = match.shape("x", known)[-1]
    x, y, weight = (match.place(name) for name in ("x", "y", "weight"))
    bias = match.place("bias") if "bias" in match else None

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows = [tensor.view(-1, width) for tensor in (out, tensors[x], tensors[y])]
        kernels.add_norm_into(*rows, tensors[weight], None if bias is None else tensors[bias], eps)

    return run


ATTENTION = op("attention", given("q"), given("k"), given("v"), name="attention")
SUM = op("add", given("x"), given("y"))
register(
    *(
        Handwritten(
            name,
            "attention",
            SOURCE,
            "triton",
            ATTENTION,
            partial(why_no_attention, blocks=blocks),
            partial(prepare_attention, blocks=blocks),
        )
        for name, blocks in (("encoder attention (Triton)", 0), ("encoder attention in blocks (Triton)", WARPS))
    ),
    Handwritten(
        "encoder sum and norm (Triton)",
        "norm",
        SOURCE,
        "triton",
        either(
            op("layer_norm", SUM, given("weight"), given("bias"), name="norm"),
            op("layer_norm", SUM, given("weight"), name="norm"),
        ),
        why_no_norm,
        prepare_norm,
    ),
)
