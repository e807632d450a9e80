"""The encoder's attention and norms in C++ as candidates for kernel graphs on the CPU."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anytorch import native, settings
from anytorch.errors import NativeUnavailable, OutOfMemory
from anytorch.graph.back.cpp import launcher
from anytorch.graph.handwritten import Handwritten, Launch, register
from anytorch.graph.patterns import Match, either, given, op

CODE = Path(__file__).parent / "code"
FOLDER = "text/packed/code"
WHOLE_PANELS = 32  # the attention reads values in panels, of 32 columns with AVX-512: no head may end inside of one
ROWS_AT_ONCE = 4096  # floats of the rows that are an item of work


@lru_cache(maxsize=4)
def _library(cache: Path, level: str | None) -> Any:
    return native.load("packed-graph", [CODE / "graph.cpp"], level=level)


def library() -> Any:
    """The compiled kernels. Raises NativeUnavailable."""
    return _library(settings.cache_folder(), settings.get("simd"))


def _bits(value: float) -> int:
    found: int = struct.unpack("q", struct.pack("d", value))[0]
    return found


def _why_not_here(match: Match, device: torch.device) -> str:
    if device.type != "cpu":
        return "it is for the CPU"
    if match.dtypes() != {"float32"}:
        return "it computes in float32"
    try:
        library()
    except NativeUnavailable as exc:
        return exc.message.splitlines()[0]
    return ""


def why_no_attention(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    node = match["attention"]
    _, _, n, width = match.shape("q", known)
    if match.shape("k", known)[2] != n or match.shape("v", known)[3] != width:
        return "it is for self-attention: as many keys as queries, and values as wide as keys"
    if not n or width % WHOLE_PANELS:
        return f"a head's width must be a multiple of {WHOLE_PANELS}"
    return "it takes no masks or lengths" if node["masked"] or node["counted"] else _why_not_here(match, device)


def prepare_attention(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    node = match["attention"]
    batch, heads, n, width = match.shape("q", known)
    scale = float(node["scale"]) if node["scale"] is not None else 1 / math.sqrt(width)
    sizes = (heads, match.shape("k", known)[1], n, width, int(bool(node["causal"])), _bits(scale))
    launch = launcher(library().graph_attend, sizes, batch * heads)
    q, k, v = (match.place(name) for name in "qkv")

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        failed = torch.zeros(1, dtype=torch.int32)
        launch([tensors[place].data_ptr() for place in (q, k, v)] + [out.data_ptr(), failed.data_ptr()])
        if failed.item():
            raise OutOfMemory(f"no memory for the attention of {n} positions", hint="free host memory")

    return run


def why_no_norm(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    return "nothing to do" if not math.prod(match.shape("x", known)) else _why_not_here(match, device)


def prepare_norm(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    node = match["norm"]
    shape = match.shape("x", known)
    width = math.prod(shape[len(shape) - node["rank"] :])
    rows = math.prod(shape) // width
    together = max(1, ROWS_AT_ONCE // width)
    sizes = (width, int(node.op == "rms_norm"), _bits(float(node["eps"])), rows, together)
    launch = launcher(library().graph_normalise, sizes, -(-rows // together))
    places = [match.place(name) if name in match else None for name in ("x", "weight", "bias")]

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        launch([None if place is None else tensors[place].data_ptr() for place in places] + [out.data_ptr()])

    return run


X, WEIGHT, BIAS = given("x"), given("weight"), given("bias")
NORMS = either(
    op("layer_norm", X, WEIGHT, BIAS, name="norm"),
    op("layer_norm", X, WEIGHT, name="norm"),
    op("layer_norm", X, name="norm"),
    op("rms_norm", X, WEIGHT, name="norm"),
    op("rms_norm", X, name="norm"),
)
register(
    Handwritten(
        "encoder attention (C++)",
        "attention",
        f"{FOLDER}/attention.h",
        "cpp",
        op("attention", given("q"), given("k"), given("v"), name="attention"),
        why_no_attention,
        prepare_attention,
    ),
    Handwritten("encoder norm (C++)", "norm", f"{FOLDER}/norm.h", "cpp", NORMS, why_no_norm, prepare_norm),
)
