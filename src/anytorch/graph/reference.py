"""A kernel graph computed by torch, one op after another: what every other way is checked against.

`evaluate(graph, tensors)` gives what eager torch gives, on any device torch knows. With `exact=True` every float is
computed in float64 on the CPU, whatever the graph says: that is the truth, and eager's distance from it is what a
compiled kernel is allowed a small multiple of.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from anytorch.errors import GraphError
from anytorch.graph import ops
from anytorch.graph.ir import Graph, Node
from anytorch.graph.sizes import NAME, Size, at, names_of, shape_at, words

Sizes = Mapping[str, int]
Compute = Callable[..., torch.Tensor]

UNARY: dict[str, Compute] = {
    "neg": torch.neg,
    "not": torch.logical_not,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": torch.relu,
}
BINARY: dict[str, Compute] = {"and": torch.logical_and, "or": torch.logical_or}


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def name_of(dtype: Any) -> str:
    """The graph's name of a dtype: a torch dtype, its text, or a name."""
    name = str(dtype).removeprefix("torch.")
    ops.check_dtype("dtype", name)
    return name


def sizes_of(graph: Graph, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The named sizes of a graph that these inputs decide. Raises GraphError if two of them disagree."""
    known: dict[str, int] = {}
    for place, (number, tensor) in enumerate(zip(graph.inputs, tensors, strict=True)):
        shape = graph.nodes[number].shape
        if len(shape) != tensor.dim():
            raise GraphError(f"input {place} has shape {words(tensor.shape)}; the graph wants {words(shape)}")
        for size, found in zip(shape, tensor.shape, strict=True):
            if isinstance(size, Size) and NAME.fullmatch(str(size)) and known.setdefault(str(size), found) != found:
                raise GraphError(
                    f"input {place} has shape {words(tensor.shape)}: size {size} is {found} here and {known[str(size)]} in "
                    "an earlier input"
                )
    # A graph inside another may have no input with just the name: 4*b tells b as well.
    wanted_sizes = [size for number in graph.inputs for size in graph.nodes[number].shape]
    found_sizes = [size for tensor in tensors for size in tensor.shape]
    sums = [(size, n) for size, n in zip(wanted_sizes, found_sizes, strict=True) if isinstance(size, Size)]
    while any(more := [size.solved(n, known) for size, n in sums]):
        known.update(next(filter(None, more)))
    for place, (number, tensor) in enumerate(zip(graph.inputs, tensors, strict=True)):
        if not names_of(graph.nodes[number].shape) <= set(known):
            raise GraphError(f"the sizes in {words(graph.nodes[number].shape)} do not follow from the inputs")
        wanted = shape_at(graph.nodes[number].shape, known)
        if wanted != tuple(tensor.shape):
            raise GraphError(
                f"input {place} has shape {words(tensor.shape)}; the graph wants {words(graph.nodes[number].shape)}"
            )
    return known


def evaluate(graph: Graph, tensors: Sequence[torch.Tensor], *, exact: bool = False) -> list[torch.Tensor]:
    """The graph's outputs for these inputs."""
    known = sizes_of(graph, tensors)
    given = dict(zip(graph.inputs, tensors, strict=True))
    device = torch.device("cpu") if exact or not tensors else tensors[0].device
    values: list[torch.Tensor] = []
    last_use = {arg: number for number, node in graph for arg in node.args}
    for number, node in graph:
        dtype = _wide(node.dtype) if exact else dtype_named(node.dtype)
        if node.op == "input":
            value = given[number].to(device, dtype)
        else:
            value = prepared(node, known, dtype, device)(*[values[arg] for arg in node.args])
        values.append(value)
        for arg in node.args:
            if last_use[arg] == number and arg not in graph.outputs:
                values[arg] = value.new_empty(0)  # what nobody reads any more gives its memory back
    return [values[one] for one in graph.outputs]


def _wide(name: str) -> torch.dtype:
    return torch.float64 if name in ops.FLOATS else dtype_named(name)


def prepared(node: Node, known: Sizes, dtype: torch.dtype, device: torch.device) -> Compute:
    """How torch computes a node of its arguments, with the dtype it is to have: what is called often does not ask again
    what the node is."""
    op = node.op
    if op == "constant":
        return lambda: torch.tensor(at(node["value"], known), dtype=dtype, device=device)
    if op == "iota":
        return partial(_positions, shape_at(node["shape"], known), node["dim"], dtype, device)
    if op in ("permute", "expand", "reshape"):
        given = tuple(node["dims"]) if op == "permute" else shape_at(node["shape"], known)
        return operator.methodcaller(op, given)
    if op == "slice":
        start, stop = at(node["start"], known), at(node["stop"], known)
        return operator.methodcaller("narrow", node["dim"], start, stop - start)
    if op == "matmul":
        return torch.matmul
    if op in ops.UNARY:
        change: Compute = UNARY.get(op) or getattr(torch, op)
        if not dtype.is_floating_point:
            return change
        return lambda x: change(x if x.is_floating_point() else x.to(dtype))
    if op in (*ops.BINARY, *ops.COMPARISONS, *ops.LOGICAL):
        both: Compute = BINARY.get(op) or getattr(torch, op)
        return lambda x, y: made if (made := both(x, y)).dtype == dtype else made.to(dtype)
    if op in ("cast", "store"):
        return operator.methodcaller("to", dtype)
    if op == "concat":
        return lambda *parts: torch.cat([part.to(dtype) for part in parts], node["dim"])
    if op == "embedding":
        return lambda table, ids: F.embedding(ids, table)
    other = OTHERS[op]
    return lambda *args: made if (made := other(node, *args)).dtype == dtype else made.to(dtype)


def _positions(shape: Sequence[int], dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    steps = torch.arange(shape[dim], dtype=dtype, device=device)
    return steps.reshape([-1 if place == dim else 1 for place in range(len(shape))]).expand(shape)


def _reduced(node: Node, x: torch.Tensor) -> torch.Tensor:
    dims, keep, how = node["dims"], bool(node["keepdim"]), node["how"]
    if how in ("sum", "mean"):
        return getattr(torch, how)(x, dims, keepdim=keep)  # type: ignore[no-any-return]
    return (torch.amax if how == "max" else torch.amin)(x, dims, keepdim=keep)


def _norm(node: Node, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    over = list(x.shape[x.dim() - node["rank"] :])
    if node.op == "rms_norm":
        return F.rms_norm(x, over, rest[0] if rest else None, node["eps"])
    weight, bias = (*rest, None, None)[:2]
    return F.layer_norm(x, over, weight, bias, node["eps"])


def _rope(node: Node, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if node["interleaved"]:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention_mask(node: Node, q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor | None:
    """All that an attention node masks, as one tensor of bools, or of numbers that are added; None if it masks nothing."""
    left = list(rest)
    mask = left.pop(0) if node["masked"] else None
    n, t = q.shape[2], k.shape[2]
    keep: torch.Tensor | None = None
    rows = torch.arange(n, device=q.device)[:, None]
    columns = torch.arange(t, device=q.device)
    if node["counted"]:
        lengths = left[0].to(q.device)[:, None, None, None]  # [b, 1, 1, 1]
        keep = columns < lengths
        if node["causal"] == "end":
            keep = columns <= rows + lengths - n
    if node["causal"] and not (node["counted"] and node["causal"] == "end"):
        ahead = columns <= rows + (t - n if node["causal"] == "end" else 0)
        keep = ahead if keep is None else keep & ahead
    if mask is None or keep is None:
        return keep if mask is None else mask
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, -math.inf)


def _attention(node: Node, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    mask = attention_mask(node, q, k, *rest)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=node["scale"], enable_gqa=grouped)


OTHERS: dict[str, Compute] = {
    "where": lambda node, condition, x, y: torch.where(condition, x, y),
    "reduce": _reduced,
    "softmax": lambda node, x: torch.softmax(x, node["dim"]),
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _rope,
    "attention": _attention,
}
