"""The second gate: a compiled program against float64, on inputs that find different mistakes.

    normal     what people compute with
    large      sums that overflow, or lose small terms
    tiny       differences that cancel, denominators near zero
    one-hot    every element of a weight is seen alone: a wrong place shows as a wrong number, not as noise

A program may be wrong by a small multiple of what eager torch is wrong by: the same sums in another order, no more; where a
result hangs on the last digit of an input, by a multiple of that. Its results are filled with NaN before it runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from anytorch.errors import WrongAnswer
from anytorch.graph import reference
from anytorch.graph.ir import Graph, Node
from anytorch.graph.ops import FLOATS
from anytorch.graph.repeated import period, repeated
from anytorch.graph.sizes import shape_at

TIMES_EAGER = 8.0  # of the largest error of eager torch
ROUNDINGS = 16.0  # of the result's dtype, of its largest element: where eager happens to be exact
UNIT = (
    f"times eager torch's largest error from float64, and {ROUNDINGS:.0f} roundings"  # what TIMES_EAGER is followed by
)
SHAKEN = 4.0  # of what one rounding of every input changes the exact result by
PERIOD = 65521
APART = 997 * 64  # elements between the beginnings of inputs that share memory: a multiple of a cache line
KINDS = ("normal", "large", "tiny", "one-hot")
Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def example(
    graph: Graph, known: Mapping[str, int], kind: str, device: torch.device, seed: int = 0
) -> list[torch.Tensor]:
    """Inputs of a graph for these sizes. Whole numbers are small, so that they can be ids of any table."""
    nodes = [graph.nodes[number] for number in graph.inputs]
    return [_tensor(graph, known, node, place, kind, device, seed) for place, node in enumerate(nodes)]


def _tensor(
    graph: Graph, known: Mapping[str, int], node: Node, place: int, kind: str, device: torch.device, seed: int
) -> torch.Tensor:
    home = _home_of_random_numbers(device)
    shape, dtype = shape_at(node.shape, known), reference.dtype_named(node.dtype)
    generator = torch.Generator(home).manual_seed(seed * 1009 + place)
    if node.dtype not in FLOATS:
        low, high = (0, 2) if node.dtype == "bool" else (1, max(2, _least_table(graph, known)))
        if node.dtype == "int8":  # weights, not ids
            low, high = -127, 128
        tensor = torch.randint(low, high, shape, generator=generator, device=home)
    elif kind == "one-hot":
        tensor = torch.zeros(shape, device=home)
        if shape and shape[-1]:
            where = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator, device=home)
            tensor.scatter_(-1, where, 1.0)
    else:
        # Products of wide rows grow with the root of their length: this keeps half precision finite.
        scale = {"normal": 1.0, "large": 30.0, "tiny": 1e-4}[kind]
        tensor = torch.randn(shape, generator=generator, device=home) * scale
    return tensor.to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def _home_of_random_numbers(device: torch.device) -> torch.device:
    """The device itself where it has a generator, which is faster by far; else the CPU."""
    try:
        torch.randn(1, generator=torch.Generator(device).manual_seed(0), device=device)
    except (RuntimeError, NotImplementedError):
        return torch.device("cpu")
    return device


def quick_example(graph: Graph, known: Mapping[str, int], device: torch.device) -> list[torch.Tensor]:
    """Inputs that are made fast: long ones repeat a few random numbers. On the CPU they are parts of one tensor."""
    nodes = [graph.nodes[number] for number in graph.inputs]
    counts = [math.prod(shape_at(node.shape, known)) for node in nodes]
    if device.type != "cpu":
        return [_repeated_there(graph, known, place, device) for place in range(len(nodes))]
    shared: dict[str, torch.Tensor] = {}  # by dtype: each long input begins elsewhere in it
    for dtype in {node.dtype for node in nodes if node.dtype in FLOATS}:
        few = period(reference.dtype_named(dtype))
        ends = [
            place * APART + count
            for place, (node, count) in enumerate(zip(nodes, counts, strict=True))
            if node.dtype == dtype and count > few
        ]
        if ends:
            numbers = torch.randn(few, generator=torch.Generator().manual_seed(0))
            shared[dtype] = repeated(numbers.to(reference.dtype_named(dtype)), max(ends))
    made = []
    for place, (node, count) in enumerate(zip(nodes, counts, strict=True)):
        if node.dtype not in shared or count <= period(reference.dtype_named(node.dtype)):
            made.append(_tensor(graph, known, node, place, "normal", device, 0))
        else:
            made.append(shared[node.dtype][place * APART :][:count].view(shape_at(node.shape, known)))
    return made


def _repeated_there(graph: Graph, known: Mapping[str, int], place: int, device: torch.device) -> torch.Tensor:
    """An input on another device. Not all have random numbers of their own: a few are sent there."""
    node = graph.nodes[graph.inputs[place]]
    shape, dtype = shape_at(node.shape, known), reference.dtype_named(node.dtype)
    count, few = math.prod(shape), period(dtype)
    if node.dtype not in FLOATS or count <= few:
        return _tensor(graph, known, node, place, "normal", device, 0)
    numbers = torch.randn(few, generator=torch.Generator().manual_seed(place)).to(dtype).to(device)
    return numbers.repeat(-(-count // few))[:count].view(shape)


def digest(run: Run, graph: Graph, known: Mapping[str, int], device: torch.device) -> str:
    """What a program computes of `quick_example`, in short: the same bits give the same digest."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in run(quick_example(graph, known, device)):
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _least_table(graph: Graph, known: Mapping[str, int]) -> int:
    tables = [graph.nodes[node.args[0]].shape for _, node in graph if node.op == "embedding"]
    return min((shape_at(shape, known)[0] for shape in tables), default=4)


def errors(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference, where the truth is a number. Not-a-number where a number is due is infinitely wrong."""
    found, asked = found.detach().cpu().double(), truth.isfinite()
    if not bool(asked.any()):
        return 0.0
    difference = (found[asked] - truth[asked]).abs()
    return float(difference.max()) if bool(difference.isfinite().all()) else float("inf")


def check(
    graph: Graph, known: Mapping[str, int], run: Run, device: torch.device, kinds: Sequence[str] = KINDS
) -> float:
    """How many times eager torch's error the program's is, at the most. Raises WrongAnswer beyond the bound."""
    worst = 0.0
    for seed, kind in enumerate(kinds):
        inputs = example(graph, known, kind, device, seed)
        before = [tensor.clone() for tensor in inputs]
        answers = run(inputs)
        for place, (old, now) in enumerate(zip(before, inputs, strict=True)):
            if not torch.equal(old, now):
                raise WrongAnswer(f"it changed its input {place}")
        truths, eager = reference.evaluate(graph, inputs, exact=True), reference.evaluate(graph, inputs)
        shaken: list[torch.Tensor] | None = None
        for place, (answer, truth, plain) in enumerate(zip(answers, truths, eager, strict=True)):
            if answer.shape != truth.shape or answer.dtype != plain.dtype:
                raise WrongAnswer(f"output {place} is {answer.dtype}{list(answer.shape)}")
            if not answer.is_floating_point():
                if not torch.equal(answer.cpu(), plain.cpu()):
                    raise WrongAnswer(f"output {place} differs on {kind} inputs")
                continue
            own, allowed = errors(answer, truth), TIMES_EAGER * errors(plain, truth) + rounding(plain, truth)
            if not own <= allowed:
                if shaken is None:
                    shaken = reference.evaluate(graph, _shaken(inputs), exact=True)
                allowed += SHAKEN * errors(shaken[place], truth)
            if not own <= allowed:
                raise WrongAnswer(f"output {place} is off by {own:.3g} on {kind} inputs; {allowed:.3g} is allowed")
            worst = max(worst, own / allowed * TIMES_EAGER if allowed else 0.0)
    return worst


def _shaken(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs that are off by one rounding each. Where that changes the exact result, nobody's last digits can be right: the
    softmax of large numbers is one row or another."""
    made = []
    for place, tensor in enumerate(inputs):
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(place)
            few = torch.randint(0, 2, (PERIOD,), generator=generator).to(tensor) * 2 - 1
            signs = few.repeat(-(-tensor.numel() // PERIOD) or 1)[: tensor.numel()].view(tensor.shape)
            tensor = tensor + tensor * signs * torch.finfo(tensor.dtype).eps
        made.append(tensor)
    return made


def rounding(plain: torch.Tensor, truth: torch.Tensor) -> float:
    finite = truth[truth.isfinite()]
    return ROUNDINGS * torch.finfo(plain.dtype).eps * float(finite.abs().max()) if finite.numel() else 0.0
