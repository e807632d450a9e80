"""What tests of registered kernels share: each must pass the second gate at the place where the search would use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from anytorch.graph import handwritten, verify
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.partition import partition
from anytorch.graph.program import Program, Step
from anytorch.measured.verdict import Trial

CPU = torch.device("cpu")


def wins(trials: Sequence[Trial], noise: float = 0.0) -> tuple[str, str]:
    """A choice for tests: of programs one with a kernel by hand, of kernels the last one."""
    timed = [one.name for one in trials if "handwritten" in one.name and one.seconds is not None]
    return (timed or [trials[-1].name])[0], "a test wants it"


def names(graph: Graph, back: str, known: Mapping[str, int] | None = None, device: torch.device = CPU) -> set[str]:
    """The kernels that are candidates somewhere in a graph."""
    found = handwritten.sites(graph, known or {}, back, device)
    return {kernel.name for site in found for kernel in site.kernels}


def check(
    graph: Graph,
    name: str,
    back: str,
    known: Mapping[str, int] | None = None,
    device: torch.device = CPU,
    kinds: Sequence[str] = verify.KINDS,
) -> float:
    """The error of the graph with this kernel at its largest place and torch for the rest; raises WrongAnswer."""
    sizes = known or {}
    found = [only for site in handwritten.sites(graph, sizes, back, device) if (only := site.only(name)) is not None]
    assert found, f"{name} is no candidate in {graph}"
    made = handwritten.replaced(graph, handwritten.apart(found))
    everything = range(len(made.nodes))
    cut = partition(made, sizes, everything)
    steps = []
    for group in cut.groups:
        node = made.nodes[group.outputs[0]]
        by_hand = handwritten.ready_for(node, sizes, back, device) if node.op == "handwritten" else None
        steps.append(Step(group, by_hand=by_hand))
    assert any(step.by_hand for step in steps)
    return verify.check(graph, sizes, partial(Program(cut, steps), poison=True), device, kinds)


# --- graphs ------------------------------------------------------------------------------------------------------------


def attention(
    batch: int, heads: int, groups: int, n: int, width: int, dtype: str = "float32", **attrs: object
) -> Graph:
    b = Builder()
    q, k, v = (b.input((batch, count, n, width), dtype) for count in (heads, groups, groups))
    return b.graph([b.add("attention", q, k, v, **attrs)])


def norm(kind: str, shape: tuple[int, ...], given: int, rank: int = 1, *, summed: bool = False) -> Graph:
    """A norm with `given` of weight and bias, of a tensor or of the sum of two."""
    b = Builder()
    x = b.input(shape, "float32")
    if summed:
        x = b.add("add", x, b.input(shape, "float32"))
    rest = [b.input(shape[len(shape) - rank :], "float32") for _ in range(given)]
    return b.graph([b.add(kind, x, *rest, rank=rank, eps=1e-5)])


def linear(
    rows: int,
    width: int,
    columns: int,
    *,
    normed: bool = False,
    bias: bool = False,
    residual: bool = False,
    gated: bool = False,
    act: str = "",
    turned: bool = True,
    dtype: str = "float32",
) -> Graph:
    b = Builder()
    x = b.input((rows, width), dtype)
    weight = b.input((columns, width) if turned else (width, columns), dtype)
    read = b.add("permute", weight, dims=(1, 0)) if turned else weight
    first = b.add("rms_norm", x, b.input((width,), dtype), rank=1, eps=1e-5) if normed else x
    made = b.add("matmul", first, read)
    if bias:
        made = b.add("add", made, b.input((columns,), dtype))
    if gated:
        half = columns // 2
        parts = [b.add("slice", made, dim=1, start=start, stop=start + half) for start in (0, half)]
        made = b.add("mul", b.add("silu", parts[0]), parts[1])
    if act:
        made = b.add(act, made)
    if residual:
        made = b.add("add", b.input((rows, columns), dtype), made)
    return b.graph([made])


def int8(
    rows: int, width: int, columns: int, dtype: str, *, group: int = 0, bias: bool = False, after: bool = False
) -> Graph:
    """A linear layer whose weight is bytes with scales, in ordinary ops."""
    b = Builder()
    x, codes = b.input((rows, width), dtype), b.input((columns, width), "int8")
    wide = b.add("cast", codes, dtype=dtype if after else "float32")
    small = b.constant(2.0**-9, "float32")
    if group:
        scale = b.input((columns, width // group, 1), "float32")
        grouped = b.add("mul", b.add("reshape", wide, shape=(columns, width // group, group)), scale)
        weight = b.add("reshape", grouped, shape=(columns, width))
    else:
        weight = wide if after else b.add("mul", wide, b.input((columns, 1), "float32"))
    if not after and dtype != "float32":
        weight = b.add("cast", weight, dtype=dtype)
    made = b.add("matmul", x, b.add("permute", weight, dims=(1, 0)))
    if after:
        made = b.add("mul", made, b.input((columns,), dtype))
    if bias:
        made = b.add("add", made, b.input((columns,), dtype))
    return b.graph([b.add("mul", made, b.add("cast", small, dtype=dtype))])
