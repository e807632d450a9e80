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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch

from anytorch.errors import WrongAnswer
from anytorch.graph import reference
from anytorch.graph.ir import Graph, Node
from anytorch.graph.ops import FLOATS
from anytorch.graph.repeated import period, refill, repeated
from anytorch.graph.sizes import shape_at

TIMES_EAGER = 8.0  # of the largest error of eager torch
ROUNDINGS = 16.0  # of the result's dtype, of its largest element: where eager happens to be exact
UNIT = (
    f"times eager torch's largest error from float64, and {ROUNDINGS:.0f} roundings"  # what TIMES_EAGER is followed by
)
SHAKEN = 4.0  # of what one rounding of every input changes the exact result by
PERIOD = 65521
MOST_KEPT = 1 << 28  # bytes of the truth of one kind of inputs that waits for the next program
APART = 997 * 64  # elements between the beginnings of inputs that share memory: a multiple of a cache line
KINDS = ("normal", "large", "tiny", "one-hot")
# Products of wide rows grow with the root of their length: this keeps half precision finite.
SCALES = {"normal": 1.0, "large": 30.0, "tiny": 1e-4}
ONE_IN = 64  # numbers is a one, where rows are not known
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
        tensor = torch.randn(shape, generator=generator, device=home) * SCALES[kind]
    return tensor.to(device=device, dtype=dtype)


@lru_cache(maxsize=64)
def _home_of_random_numbers(device: torch.device) -> torch.device:
    """The device itself where it has a generator, which is faster by far; else the CPU."""
    try:
        torch.randn(1, generator=torch.Generator(device).manual_seed(0), device=device)
    except (RuntimeError, NotImplementedError):
        return torch.device("cpu")
    return device


def quick_examples(
    graph: Graph, known: Mapping[str, int], device: torch.device
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Inputs of every kind that are made fast: long ones repeat a few numbers, and hold those of the next kind after it.

    On the CPU they are parts of one tensor.
    """
    nodes = [graph.nodes[number] for number in graph.inputs]
    counts = [math.prod(shape_at(node.shape, known)) for node in nodes]
    few = {node.dtype: period(reference.dtype_named(node.dtype)) for node in nodes if node.dtype in FLOATS}
    long = [node.dtype in few and count > few[node.dtype] for node, count in zip(nodes, counts, strict=True)]
    shared: dict[str, torch.Tensor] = {}  # by dtype: each long input begins elsewhere in it
    for kind in KINDS:
        made = []
        for dtype in {
            node.dtype for node, is_long in zip(nodes, long, strict=True) if is_long and device.type == "cpu"
        }:
            numbers = _few_numbers(few[dtype], kind, 0).to(reference.dtype_named(dtype))
            if dtype in shared:
                refill(shared[dtype], numbers)
                continue
            ends = [
                place * APART + count
                for place, (node, count) in enumerate(zip(nodes, counts, strict=True))
                if node.dtype == dtype and long[place]
            ]
            shared[dtype] = repeated(numbers, max(ends))
        for place, (node, count) in enumerate(zip(nodes, counts, strict=True)):
            shape = shape_at(node.shape, known)
            if not long[place]:
                made.append(_tensor(graph, known, node, place, kind, device, 0))
            elif device.type == "cpu":
                made.append(shared[node.dtype][place * APART :][:count].view(shape))
            else:  # not all devices have random numbers of their own: a few are sent there
                numbers = _few_numbers(few[node.dtype], kind, place).to(reference.dtype_named(node.dtype)).to(device)
                made.append(numbers.repeat(-(-count // len(numbers)))[:count].view(shape))
        yield kind, made


def _few_numbers(count: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "one-hot":  # rows are not known here: single ones among zeros
        return (torch.randint(0, ONE_IN, (count,), generator=generator) == 0).float()
    return torch.randn(count, generator=generator) * SCALES[kind]


def digest(run: Run, graph: Graph, known: Mapping[str, int], device: torch.device) -> str:
    """What a program computes of `quick_examples`, in short: the same bits give the same digest."""
    found = hashlib.blake2b(digest_size=16)
    for _, inputs in quick_examples(graph, known, device):
        for tensor in run(inputs):
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _least_table(graph: Graph, known: Mapping[str, int]) -> int:
    tables = [graph.nodes[node.args[0]].shape for _, node in graph if node.op == "embedding"]
    return min((shape_at(shape, known)[0] for shape in tables), default=4)


def lookups(graph: Graph, known: Mapping[str, int], device: torch.device) -> None:
    """Raises IndexError if the graph computes ids that no table has, of inputs as `example` makes them: nothing can be
    compared then, and it is found out before anything is compiled. Ids that are inputs are made to fit."""
    if any(node.op == "embedding" and graph.nodes[node.args[1]].op != "input" for _, node in graph):
        reference.evaluate(graph, [one.cpu() for one in example(graph, known, "normal", device)])


def errors(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference, where the truth is a number. Not-a-number where a number is due is infinitely wrong."""
    if not truth.numel():
        return 0.0
    worst = _largest((found.detach().cpu().double() - truth).abs_(), truth)  # NaN if one of them is
    return worst if math.isfinite(worst) else math.inf


def _largest(values: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest of the values where the truth is a number: of all, if that is one. (To look for numbers takes as long as
    all else; picking values by a mask takes torch ten times as long as filling them.)"""
    largest = float(values.max())
    if not math.isfinite(largest) and not bool((known := truth.isfinite()).all()):
        largest = float(values.masked_fill(~known, 0.0).max())
    return largest


class Judge:
    """What a graph's results are on some inputs, and how far off each may be. It serves all programs for the graph."""

    def __init__(self, graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
        self.truths = reference.evaluate(graph, inputs, exact=True)
        self.eager = reference.evaluate(graph, inputs)
        self._allowed = [
            TIMES_EAGER * errors(plain, truth) + rounding(plain, truth) if plain.is_floating_point() else 0.0
            for plain, truth in zip(self.eager, self.truths, strict=True)
        ]
        self._shaken: list[torch.Tensor] | None = None

    def __call__(
        self, answers: Sequence[torch.Tensor], shaken: Callable[[], list[torch.Tensor]] | None = None
    ) -> float:
        """How many times eager torch's error the answers' is, at the most. Raises WrongAnswer beyond the bound.

        `shaken` gives the truth for inputs that are off by one rounding: asked once, where the bound is exceeded.
        """
        worst = 0.0
        for place, (answer, truth, plain) in enumerate(zip(answers, self.truths, self.eager, strict=True)):
            if answer.shape != truth.shape or answer.dtype != plain.dtype:
                raise WrongAnswer(f"output {place} is {answer.dtype}{list(answer.shape)}")
            if not answer.is_floating_point():
                if not torch.equal(answer.cpu(), plain.cpu()):
                    raise WrongAnswer(f"output {place}, of whole numbers, differs")
                continue
            own, allowed = errors(answer, truth), self._allowed[place]
            if not own <= allowed and shaken is not None:
                self._shaken = self._shaken or shaken()
                allowed += SHAKEN * errors(self._shaken[place], truth)
            if not own <= allowed:
                raise WrongAnswer(f"output {place} is off by {own:.3g}; {allowed:.3g} is allowed")
            worst = max(worst, own / allowed * TIMES_EAGER if allowed else 0.0)
        return worst


def check(
    graph: Graph,
    known: Mapping[str, int],
    run: Run,
    device: torch.device,
    kinds: Sequence[str] = KINDS,
    judges: dict[str, Judge] | None = None,
) -> float:
    """How many times eager torch's error the program's is, at the most. Raises WrongAnswer beyond the bound.

    Who checks several programs for a graph passes one dictionary as `judges`: the truth is then computed once.
    """
    worst = 0.0
    judges = {} if judges is None else judges
    for kind in kinds:
        inputs = example(graph, known, kind, device, KINDS.index(kind))
        judge = judges.get(kind)
        if judge is None:
            judge = Judge(graph, inputs)
            if sum(truth.nbytes for truth in judge.truths) <= MOST_KEPT:
                judges[kind] = judge
        before = [tensor.clone() for tensor in inputs]
        answers = run(inputs)
        for place, (old, now) in enumerate(zip(before, inputs, strict=True)):
            if not torch.equal(old, now):
                raise WrongAnswer(f"it changed its input {place}")
        try:
            worst = max(worst, judge(answers, partial(_shaken_truth, graph, inputs)))
        except WrongAnswer as exc:
            raise WrongAnswer(f"on {kind} inputs {exc.message}") from exc
    return worst


def _shaken_truth(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return reference.evaluate(graph, _shaken(inputs), exact=True)


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
    largest = _largest(truth.abs(), truth) if truth.numel() else 0.0
    return ROUNDINGS * torch.finfo(plain.dtype).eps * largest
