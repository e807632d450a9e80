"""Kernels that were written by hand, and the vendor's for several ops at once: one registry, candidates in every cut.

An entry says which nodes its kernel computes (`patterns`), whether it takes these shapes here, and how it is launched. A
place of a graph that it computes becomes one node, `handwritten`, which no other kernel is merged with; `search` races the
entries of a place, and the programs that have them, like all others.

Ours register themselves in a module beside the kernels, which is loaded when a graph is searched for their back end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path

import torch

from anytorch import logs
from anytorch.devices.stopwatch import on_device
from anytorch.errors import GraphError
from anytorch.graph.ir import Builder, Graph, Node
from anytorch.graph.patterns import OP, PREFIX, Match, Pattern, matches

log = logs.logger(__name__)

ROOT = Path(__file__).parent.parent
# Back end → modules that register kernels for it when they are imported. The webgpu device registers its own.
MODULES: Mapping[str, tuple[str, ...]] = {
    "cpp": ("anytorch.text.packed.graph_kernels", "anytorch.quant.graph_kernels"),
    "triton": (
        "anytorch.text.encoders.graph_kernels",
        "anytorch.forecast.kernels.graph_kernels",
        "anytorch.quant.graph_kernels",
    ),
}
EARLY: Mapping[str, tuple[str, ...]] = {"wgsl": ("anytorch.gpu.wgsl.matmul",)}  # where those are that are there before
SOURCES = (".py", ".cpp", ".h")

Launch = Callable[[Sequence[torch.Tensor], torch.Tensor], None]  # what is read, in the match's order; what is written


@dataclass(frozen=True)
class Handwritten:
    """A kernel. `why_not` says why it does not take a match on a device, "" if it does, and is cheap; `prepare` compiles it.

    Tensors are contiguous when it is launched, unless it takes them `strided`; the result is always contiguous.
    """

    name: str  # "encoder attention (C++)": for people, and the key under which a choice is remembered
    what: str  # "attention": kernels of one word are chosen together
    source: str  # of its text, below src/anytorch
    back: str  # whose devices it runs on, `Back.name`
    pattern: Pattern
    why_not: Callable[[Match, Mapping[str, int], torch.device], str]
    prepare: Callable[[Match, Mapping[str, int], torch.device], Launch]
    strided: bool = False

    @property
    def said(self) -> str:
        return f"{PREFIX}{self.name}"


_registered: dict[str, Handwritten] = {}


def register(*kernels: Handwritten) -> None:
    """Make these candidates. A name that is taken is replaced."""
    for kernel in kernels:
        _registered[kernel.name] = kernel


def kernels_for(back: str) -> list[Handwritten]:
    """The kernels registered for a back end; ours are loaded now. One that cannot be loaded is no candidate, and said."""
    for module in MODULES.get(back, ()):
        _load(module)
    return [kernel for kernel in _registered.values() if kernel.back == back]


@lru_cache(maxsize=64)
def _load(module: str) -> None:
    try:
        import_module(module)
    except (ImportError, OSError) as exc:
        log.warning("the kernels of %s are not used: %s", module, exc)


def version(back: str) -> str:
    """A digest of the kernels for a back end: what was measured with others is not believed. Loads none of them."""
    found = hashlib.blake2b(digest_size=8)
    for part in (*MODULES.get(back, ()), *EARLY.get(back, ())):
        found.update(_digest(part).encode())
    return found.hexdigest()


@lru_cache(maxsize=64)
def _digest(module: str) -> str:
    """Of everything beside a module of ours."""
    found = hashlib.blake2b(digest_size=8)
    folder = ROOT.joinpath(*module.split(".")[1:-1])
    for path in sorted(one for one in folder.rglob("*") if one.suffix in SOURCES):
        found.update(path.read_bytes())
    return found.hexdigest()


# --- places ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A place in a graph and the kernels that compute it. `part` is the match in a graph of its own."""

    match: Match
    part: Match
    kernels: tuple[Handwritten, ...]

    @property
    def what(self) -> str:
        return self.kernels[0].what

    def only(self, name: str) -> Site | None:
        """The same with one of its kernels."""
        found = tuple(kernel for kernel in self.kernels if kernel.name == name)
        return Site(self.match, self.part, found) if found else None


def sites(graph: Graph, known: Mapping[str, int], back: str, device: torch.device) -> list[Site]:
    """Where registered kernels could compute something, the largest places first. A kernel that takes a place is not asked
    about parts of it."""
    found: dict[tuple[int, frozenset[int], tuple[tuple[str, int], ...]], Site] = {}
    for kernel in kernels_for(back):
        taken: list[frozenset[int]] = []
        for match in sorted(matches(graph, kernel.pattern), key=lambda match: -len(match.work)):
            if any(match.work <= larger for larger in taken):
                continue
            part = match.alone()
            if reason := _why_not(kernel, part, known, device):
                log.debug("%s is not a candidate: %s", kernel.name, reason)
                continue
            taken.append(match.work)
            key = (match.output, match.covered, tuple(match.tensors.items()))
            before = found[key].kernels if key in found else ()
            found[key] = Site(match, part, (*before, kernel))
    return sorted(found.values(), key=lambda site: (-len(site.match.work), site.match.output))


def _why_not(kernel: Handwritten, part: Match, known: Mapping[str, int], device: torch.device) -> str:
    try:
        return kernel.why_not(part, known, device)
    except Exception as exc:  # noqa: BLE001  (a library or a driver; whatever it is, the search can do without this kernel)
        log.warning("the kernel %s is not used: %s: %s", kernel.name, type(exc).__name__, exc)
        return str(exc) or type(exc).__name__


def apart(places: Iterable[Site]) -> list[Site]:
    """As many of these as do not overlap, the first ones first."""
    kept: list[Site] = []
    taken: set[int] = set()
    for site in places:
        if not site.match.work & taken:
            kept.append(site)
            taken |= site.match.work
    return kept


def replaced(graph: Graph, places: Sequence[Site]) -> Graph:
    """The graph with a node for the first kernel of each of these places, which do not overlap."""
    by_output = {site.match.output: site for site in places}
    builder = Builder()
    numbers: list[int] = []
    for number, node in graph:
        site = by_output.get(number)
        if site is None:
            numbers.append(builder.add(node.op, *(numbers[arg] for arg in node.args), **dict(node.attrs)))
        else:
            args = [numbers[arg] for arg in site.match.arguments]
            numbers.append(builder.add(OP, *args, kernel=site.kernels[0].name, at=number, part=site.part))
    return builder.graph(numbers[one] for one in graph.outputs)


def inlined(graph: Graph) -> Graph:
    """The graph with every such node by what it computes: what `replaced` was given."""
    builder = Builder()
    numbers: list[int] = []
    for _, node in graph:
        args = [numbers[arg] for arg in node.args]
        if node.op != OP:
            numbers.append(builder.add(node.op, *args, **dict(node.attrs)))
            continue
        part: Match = node["part"]
        inner = dict(zip(part.graph.inputs, args, strict=True))
        for number, one in part.graph:
            if number not in inner:
                inner[number] = builder.add(one.op, *(inner[arg] for arg in one.args), **dict(one.attrs))
        numbers.append(inner[part.output])
    return builder.graph(numbers[one] for one in graph.outputs)


# --- running -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """A kernel that is ready for one place and these sizes."""

    kernel: Handwritten
    launch: Launch
    known: Mapping[str, int]

    def __call__(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        given = tensors if self.kernel.strided else [tensor.contiguous() for tensor in tensors]
        if out.device.type == "cpu":
            self.launch(given, out)
        else:  # kernels are launched on the current device
            on_device(out.device, partial(self.launch, given, out))


def ready(kernel: Handwritten, part: Match, known: Mapping[str, int], device: torch.device) -> ByHand:
    return ByHand(kernel, kernel.prepare(part, known, device), dict(known))


def ready_for(node: Node, known: Mapping[str, int], back: str, device: torch.device) -> ByHand:
    """The kernel of a `handwritten` node. Raises GraphError if it is not registered, or does not take this any more."""
    kernel = next((one for one in kernels_for(back) if one.name == node["kernel"]), None)
    reason = "it is not registered" if kernel is None else kernel.why_not(node["part"], known, device)
    if kernel is None or reason:
        raise GraphError(f"the hand-written kernel {node['kernel']!r} cannot be used: {reason}")
    return ready(kernel, node["part"], known, device)
