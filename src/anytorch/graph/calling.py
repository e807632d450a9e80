"""What happens when a kernel graph is called or searched: inputs are checked, sizes found, programs kept for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from anytorch import limits, logs
from anytorch.errors import GraphError, UsageError
from anytorch.graph import records, reference
from anytorch.graph.ir import Graph
from anytorch.graph.partition import least_bytes, moved_bytes
from anytorch.graph.patterns import PREFIX
from anytorch.graph.search import Found, Search, Tell
from anytorch.graph.sizes import names_of, words
from anytorch.measured.verdict import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytorch.graph.kernel_graph import KernelGraph

log = logs.logger(__name__)

MOST_READY = 256  # kinds of inputs that a graph remembers to be right

# Mirage's arguments, which describe its own search: taken so that its programs run, and not used.
MIRAGES = (
    *(
        "imaps",
        "omaps",
        "griddims",
        "blockdims",
        "fmaps",
        "franges",
        "config",
        "backend",
        "warmup_iters",
        "profile_iters",
    ),
    *("use_graph_dataset", "use_cached_graphs", "save_codes", "is_formal_verified", "previous_checkpoint"),
    *("use_symbolic_search", "symbolic_checkpoint"),
)


def call(owner: KernelGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if torch._C._is_any_autocast_enabled():  # a graph says what dtype every op has
        with torch._C._DisableAutocast():
            return _called(owner, tensors)
    return _called(owner, tensors)


def _called(owner: KernelGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    program = None
    try:
        key = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors])
        program = owner._ready.get(key)
    except (AttributeError, RuntimeError, TypeError):
        key = ()  # not tensors, or not plain ones: what is wrong is said below
    if program is None:
        check_inputs(owner.graph, tensors, owner.device(tensors))
        known = reference.sizes_of(owner.graph, tensors)
        found = owner._found.get(_key(known, tensors[0].device if tensors else torch.device("cpu")))
        program = owner.plain if found is None or found.program is None else found.program
        if key and len(owner._ready) < MOST_READY:
            owner._ready[key] = program  # inputs like these need not be looked at again
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        program = owner.plain  # kernels have no gradients; torch's own ops do
    return _own([tensor.contiguous() for tensor in program(tensors)], tensors)


def _own(made: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that share no memory with the inputs: a graph has no copies, so an input that it returns is that input."""
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return [one.clone() if one.untyped_storage().data_ptr() in given else one for one in made]


def check_inputs(graph: Graph, tensors: Sequence[Any], device: torch.device) -> None:
    """Raise GraphError, with the number of the input, unless the graph can be called with these."""
    if len(tensors) != len(graph.inputs):
        raise GraphError(f"the graph takes {len(graph.inputs)} inputs, not {len(tensors)}")
    for place, (number, tensor) in enumerate(zip(graph.inputs, tensors, strict=True)):
        node = graph.nodes[number]
        said = f"input {place}"
        if node["name"]:
            said += f" ({node['name']})"
        if not isinstance(tensor, torch.Tensor):
            raise GraphError(f"{said} is {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise GraphError(
                f"{said} has layout {kind}; the graph wants an ordinary tensor", hint="pass it with .to_dense()"
            )
        if str(tensor.dtype) != f"torch.{node.dtype}":
            raise GraphError(
                f"{said} has dtype {str(tensor.dtype).removeprefix('torch.')}; the graph wants {node.dtype}",
                hint=f"pass it as {node.dtype}, or build the graph with dtype={str(tensor.dtype).removeprefix('torch.')!r}",
            )
        if tensor.device.type != device.type or tensor.device != tensors[0].device:
            raise GraphError(
                f"{said} is on {tensor.device}; the graph runs on {device}", hint=f"move it with .to({str(device)!r})"
            )
        if node["strides"] is not None and tuple(tensor.stride()) != node["strides"]:
            raise GraphError(f"{said} has strides {tuple(tensor.stride())}; the graph wants {node['strides']}")
        if tensor.dim() != len(node.shape):
            raise GraphError(f"{said} has shape {words(tensor.shape)}; the graph wants {words(node.shape)}")


def superoptimize(
    owner: KernelGraph,
    examples: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
    time_limit_s: float,
    verbose: bool | None,
    options: Mapping[str, Any],
) -> None:
    unknown = set(options) - set(MIRAGES)
    if unknown:
        raise GraphError(f"superoptimize: unknown options {', '.join(sorted(unknown))}")
    if options:
        log.info("superoptimize: %s describe Mirage's own search and are not used", ", ".join(sorted(options)))
    time_limit_s = _checked(limits.SECONDS, "time_limit_s=", time_limit_s)
    if not isinstance(sizes, Mapping):
        raise GraphError(f"superoptimize: sizes={sizes!r} is invalid: pass a dict such as {{'b': 8}}")
    graph = owner.graph
    device = owner.device(examples)
    if examples:
        check_inputs(graph, examples, device)
    known = {**(reference.sizes_of(graph, examples) if examples else {}), **sizes}
    named = names_of(size for number in graph.inputs for size in graph.nodes[number].shape)
    missing, extra = named - set(known), set(known) - named
    if missing or extra:
        wanted = ", ".join(f"{name!r}: …" for name in sorted(named))
        lacking, odd = (", ".join(sorted(one)) or "none" for one in (missing, extra))
        raise GraphError(
            f"superoptimize: sizes without a number: {lacking}; unknown sizes: {odd}",
            hint=f"pass sizes={{{wanted}}}, or example tensors",
        )
    known = {name: _checked(limits.COUNT_OR_NONE, f"size {name}=", number) for name, number in known.items()}
    with progress(verbose, time_limit_s) as tell:
        found = records.searched(Search(graph, known, device, time_limit_s, tell))
    owner._found[_key(known, device)] = found
    owner._ready.clear()


def _checked(limit: limits.Limit, said: str, value: Any) -> Any:
    """The number, NumPy's included, as Python's own. Raises GraphError."""
    try:
        return limit.check("", value)
    except UsageError as exc:
        raise GraphError(f"superoptimize: {said}{value!r} is invalid: {limit.words}") from exc


def _key(known: Mapping[str, int], device: torch.device) -> tuple[Any, ...]:
    return (device.type, device.index or 0, *sorted(known.items()))


@contextmanager
def progress(verbose: bool | None, time_limit_s: float) -> Iterator[Tell]:
    """A bar on standard error while the search runs; by default if that is a terminal."""
    if not (sys.stderr.isatty() if verbose is None else verbose):
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("searching"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("search", total=1.0, what="")
        yield lambda what, share: bar.update(task, completed=min(share, 1.0), what=what)


def explain(owner: KernelGraph) -> str:
    if not owner._found:
        return "The graph was not searched: it runs op by op through torch. Call superoptimize()."
    return "\n\n".join(_explained(owner.graph, key, found) for key, found in owner._found.items())


def _explained(graph: Graph, key: tuple[Any, ...], found: Found) -> str:
    known = {name: value for name, value in key[2:]}
    lines = [f"least bytes to move: {least_bytes(graph, known) / 2**20:.4g} MiB"]
    if found.verdict is None:
        return "\n".join([*lines, f"op by op through torch: {found.why}"])
    lines.append(found.verdict.explain())
    if found.program is not None:
        by_title = {verdict.question.facts["kernel"]: verdict for verdict in found.kernels}
        for number, step in enumerate(found.program.steps):
            node = found.program.partition.graph.nodes[step.group.outputs[0]]
            if step.by_hand is not None:
                verdict = by_title.get(f"{PREFIX}{node['part'].graph.key}")
                took = duration(verdict.seconds(step.by_hand.kernel.name)) if verdict else "?"
                lines.append(f"step {number}: {step.schedule}, {took}, {step.by_hand.kernel.source}")
                continue
            if step.kernel is None:
                lines.append(f"step {number}: {node.op} by torch")
                continue
            verdict = by_title.get(str(step.kernel))
            took = duration(verdict.seconds(verdict.chosen)) if verdict else "?"
            size = moved_bytes(step.kernel, known) / 2**20
            lines.append(
                f"step {number}: {len(step.group.nodes)} ops in one kernel, {size:.4g} MiB, {took}, {step.schedule}"
            )
    return "\n".join(lines)
