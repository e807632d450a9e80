"""The device's hand-written WGSL as candidates for kernel graphs: products with bias and activation, softmax, norms.

Attention is one already: what a search leaves to torch is this device's own kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl import norm as wgsl
from anytorch.gpu.wgsl.softmax import SOFTMAX, RowRule
from anytorch.graph.handwritten import Handwritten, Launch
from anytorch.graph.patterns import Match, either, given, op
from anytorch.graph.patterns import int8_linear as int8_linear_pattern
from anytorch.graph.sizes import shape_at
from anytorch.webgpu.dtypes import FLOATS, computable
from anytorch.webgpu.ops.quantized import int8_linear
from anytorch.webgpu.products import product
from anytorch.webgpu.rows import Geometry, row_geometry, row_plan
from anytorch.webgpu.tensors import NAME

BACK = "wgsl"
ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu"}  # op → the product's name of it


def _why_not_here(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    if device.type != NAME:
        return f"it is for the {NAME} device"
    nodes = [match.graph.nodes[number] for number in (*match.arguments, match.output)]
    if any(0 in shape_at(node.shape, known) for node in nodes):
        return "there is nothing to compute"
    return ""


# --- products ----------------------------------------------------------------------------------------------------------


def why_no_product(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    dtypes = {getattr(torch, dtype) for dtype in match.dtypes()}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS) or not computable(*dtypes):
        return "all tensors must be floats of one dtype that this adapter's shaders compute"
    if len(match["w"].shape) != 2 or ("bias" in match and match["bias"].shape != match.result.shape[-1:]):
        return "it is for one matrix and a bias of one number per column"
    return _why_not_here(match, known, device)


def prepare_product(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    x, w = match.place("x"), match.place("w")
    bias = match.place("bias") if "bias" in match else None
    activation = ACTIVATIONS[match["act"].op] if "act" in match else ""
    width, columns = match.shape("w", known)

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        added = None if bias is None else tensors[bias]
        rows = tensors[x].reshape(-1, width)
        product(rows, tensors[w], out.view(-1, columns), added, activation=activation)

    return run


# --- rows --------------------------------------------------------------------------------------------------------------


def why_no_rows(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    return "it writes float32" if match.dtypes() != {"float32"} else _why_not_here(match, known, device)


def prepare_rows(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    node, shape = match["rows"], torch.Size(match.shape("x", known))
    parts = [(name, per) for name, per in (("x", "element"), ("weight", "column"), ("bias", "column")) if name in match]
    places = [match.place(name) for name, _ in parts]
    rule, scalars = _rule(match)
    planned: list[Any] = [None, None]  # for operands that are not aligned, and that are

    def geometry(x: torch.Tensor) -> Geometry:
        if node.op == "softmax":
            return row_geometry(x, node["dim"])
        length = math.prod(shape[len(shape) - node["rank"] :])
        return shape.numel() // length, length, 1

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        read = [tensors[place] for place in places]
        addresses = [tensor.data_ptr() for tensor in read]
        aligned = not any(address & 15 for address in addresses)
        plan = planned[aligned]
        if plan is None:
            inputs = [(tensor, per) for tensor, (_, per) in zip(read, parts, strict=True)]
            plan = row_plan(rule, inputs, geometry(read[0]), shape, torch.float32, aligned, scalars=scalars)
            planned[aligned] = plan
        plan((*addresses, out.data_ptr()))

    return run


def _rule(match: Match) -> tuple[RowRule, tuple[float, ...]]:
    node = match["rows"]
    if node.op == "softmax":
        return SOFTMAX, ()
    eps = (float(node["eps"]),)
    if node.op == "rms_norm":
        return wgsl.root_mean_square("weight" in match), eps
    return wgsl.normalise("weight" in match, "bias" in match), eps


# --- bytes -------------------------------------------------------------------------------------------------------------


def why_no_bytes(match: Match, known: Mapping[str, int], device: torch.device) -> str:
    rows, columns = match.shape("codes", known) if len(match["codes"].shape) == 2 else (0, 0)
    if match["codes"].dtype != "int8" or match["x"].dtype != "float32" or match["scale"].dtype != "float32":
        return "it is for bytes with scales in float32"
    if "bias" in match or "grouped" in match or columns % 4 or torch.Size(match.shape("scale", known)).numel() != rows:
        return "it takes one scale per row of four bytes or more, and no bias"
    return _why_not_here(match, known, device)


def prepare_bytes(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    x, codes, scale = (match.place(name) for name in ("x", "codes", "scale"))
    rows, columns = match.shape("codes", known)

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        scales = tensors[scale].view(rows)
        int8_linear(tensors[x].view(-1, columns), tensors[codes], scales, out.view(-1, rows))

    return run


X, WEIGHT, BIAS = given("x"), given("weight"), given("bias")
PRODUCT = op("matmul", X, given("w"))
ADDED = op("add", PRODUCT, BIAS)
ACTIVE = [op(name, inner, name="act") for name in ACTIVATIONS for inner in (ADDED, PRODUCT)]
NORM = either(
    op("layer_norm", X, WEIGHT, BIAS, name="rows"),
    op("layer_norm", X, WEIGHT, name="rows"),
    op("layer_norm", X, name="rows"),
    op("rms_norm", X, WEIGHT, name="rows"),
    op("rms_norm", X, name="rows"),
)
KERNELS = (
    Handwritten(
        "product with bias and activation (WGSL)",
        "linear",
        "gpu/wgsl/matmul.py",
        BACK,
        either(*ACTIVE, ADDED),
        why_no_product,
        prepare_product,
        strided=True,
    ),
    Handwritten(
        *("softmax (WGSL)", "softmax", "gpu/wgsl/softmax.py", BACK, op("softmax", X, name="rows")),
        *(why_no_rows, prepare_rows),
    ),
    Handwritten(
        *("int8 product (WGSL)", "int8 linear", "gpu/wgsl/quantized.py", BACK, int8_linear_pattern()),
        *(why_no_bytes, prepare_bytes),
    ),
    Handwritten("norm (WGSL)", "norm", "gpu/wgsl/norm.py", BACK, NORM, why_no_rows, prepare_rows),
)
