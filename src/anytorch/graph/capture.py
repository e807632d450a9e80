"""`trace(function, *examples)`: the kernel graph of a PyTorch function or module, called as the function is.

    g = anytorch.graph.trace(model, x, dynamic={"b": (0, 0)})
    g.superoptimize(x)
    y = g(x)                                               # what model(x) returns, without gradients

The function runs once, on tensors without data, and what it calls becomes the graph's ops. A module's parameters and tensors
that the function takes from around it are inputs that the graph holds: it reads them anew at every call.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from anytorch.errors import GraphError
from anytorch.graph import calling
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.kernel_graph import TIME_LIMIT_S, KernelGraph
from anytorch.graph.parts import RULES, parts
from anytorch.graph.sizes import NAME, Size
from anytorch.graph.tracer import Tracer, Untraceable, dtype_of
from anytorch.graph.whole import Whole

Place = tuple[int | str, int]  # an argument's number or name, and a dimension of it
Held = tuple[str, Callable[[], torch.Tensor]]  # a tensor that the graph reads by itself: its name, and where it is now


class TracedGraph(KernelGraph):
    """The kernel graph of a function: called with the function's arguments, it returns what the function returns."""

    held: Sequence[Held]
    _takes: pytree.TreeSpec  # the arguments
    _fixed: Mapping[int, Any]  # those of them that are not tensors
    _keywords: frozenset[str]  # the names of those that are passed by name
    _gives: pytree.TreeSpec  # the result
    _constants: Mapping[int, Any]  # what is not a tensor in it

    def __call__(
        self, *arguments: Any, inputs: Sequence[torch.Tensor] | None = None, stream: Any = None, **named: Any
    ) -> Any:
        """What the function returns for these arguments; with inputs=[...], as in Mirage, a list of the tensors in it."""
        if inputs is not None:
            if arguments or named:
                raise GraphError("pass the arguments, or inputs=[...], not both")
            with torch.no_grad():
                return calling.call(self, [*inputs, *self._held_now()])
        with torch.no_grad():
            made = iter(calling.call(self, [*self._tensors(arguments, named), *self._held_now()]))
        leaves = [self._constants[n] if n in self._constants else next(made) for n in range(self._gives.num_leaves)]
        return pytree.tree_unflatten(leaves, self._gives)

    def superoptimize(
        self,
        *examples: Any,
        sizes: dict[str, int] | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        verbose: bool | None = None,
        **options: Any,
    ) -> TracedGraph:
        """Search for the fastest kernels, as `KernelGraph.superoptimize` does; `examples` are the function's arguments."""
        named = {name: value for name, value in options.items() if name in self._keywords}
        tensors = [*self._tensors(examples, named), *self._held_now()] if examples or named else []
        rest = {name: value for name, value in options.items() if name not in named}
        with torch.no_grad():
            calling.superoptimize(self, tensors, sizes or {}, time_limit_s, verbose, rest)
        return self

    @classmethod
    def from_json(cls, source: str | Path) -> KernelGraph:
        """The graph that `to_json` gave. It knows neither function nor parameters: all of its tensors are inputs."""
        return KernelGraph.from_json(source)

    def device(self, inputs: Sequence[torch.Tensor]) -> torch.device:
        return super().device(inputs or self._held_now())

    def _held_now(self) -> list[torch.Tensor]:
        return [read() for _, read in self.held]

    def _tensors(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among arguments that are like those it was traced with. Raises GraphError for others."""
        leaves, spec = _flat(arguments, named)
        if spec != self._takes:
            raise GraphError("the graph is called with other arguments than it was traced with", hint="trace it again")
        for place, value in self._fixed.items():
            if isinstance(leaves[place], torch.Tensor) or leaves[place] != value:
                raise GraphError(
                    f"an argument is {leaves[place]!r}; the graph was traced with {value!r}", hint="trace it again"
                )
        return [leaf for place, leaf in enumerate(leaves) if place not in self._fixed]


def trace(
    function: Callable[..., Any],
    *examples: Any,
    dynamic: Mapping[str, Place | Sequence[Place]] | None = None,
    **named: Any,
) -> TracedGraph:
    """The kernel graph of a function or module of tensors, for arguments like the examples.

    `dynamic` gives names to sizes that may differ from call to call: {"b": (0, 0)} is the first dimension of the first
    argument, {"b": [(0, 0), ("mask", 0)]} also that of the argument `mask`. Raises GraphError where the function has no
    kernel graph, and where what it does depends on a named size or on the values of tensors.
    """
    leaves, takes = _flat(examples, named)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    sizes = _Sizes(examples, named, dynamic or {})
    state: dict[str, torch.Tensor] = {}
    if isinstance(function, torch.nn.Module):
        state = {**dict(function.named_parameters()), **dict(function.named_buffers())}
    results: list[tuple[list[Any], pytree.TreeSpec]] = []

    def flat(*given: torch.Tensor) -> list[torch.Tensor]:
        filled = dict(zip(tensors, given, strict=False))
        arguments, more = pytree.tree_unflatten([filled.get(n, leaf) for n, leaf in enumerate(leaves)], takes)
        if state:
            own = dict(zip(state, given[len(tensors) :], strict=True))
            made = functional_call(function, own, arguments, more)  # type: ignore[arg-type]
        else:
            made = function(*arguments, **more)
        results.append(pytree.tree_flatten(made))
        return [one for one in results[-1][0] if isinstance(one, torch.Tensor)]

    fakes = [sizes.fake(place, leaves[place]) for place in tensors]
    fakes += [sizes.mode.from_tensor(tensor, static_shapes=True) for tensor in state.values()]
    module = _recorded(flat, fakes, sizes.mode)
    sizes.check()
    names = _names(function, examples, named)
    made = TracedGraph()
    try:
        graph, made.held = _graph_of(module, [names.get(place) for place in tensors], function, list(state))
    except Untraceable as exc:
        raise GraphError(
            f"the function has no kernel graph: {exc}",
            hint="torch.compile with anytorch.graph.compiler.compile_graph leaves such ops to torch",
        ) from exc
    made._builder = Builder.of(_renamed(graph, sizes.symbols()))
    made._outputs = list(graph.outputs)
    found, made._gives = results[-1]
    made._constants = {n: one for n, one in enumerate(found) if not isinstance(one, torch.Tensor)}
    made._takes, made._fixed = takes, {n: leaf for n, leaf in enumerate(leaves) if n not in tensors}
    made._keywords = frozenset(named)
    return made


def _flat(arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten((tuple(arguments), dict(sorted(named.items()))))


def _places(examples: Sequence[Any], named: Mapping[str, Any]) -> dict[int | str, int]:
    """By an argument's number or name, the place of its tensor among all leaves."""
    found: dict[int | str, int] = {}
    count = 0
    every: list[tuple[int | str, Any]] = [*enumerate(examples), *sorted(named.items())]
    for key, value in every:
        if isinstance(value, torch.Tensor):
            found[key] = count
        count += len(pytree.tree_leaves(value))
    return found


def _names(function: Callable[..., Any], examples: Sequence[Any], named: Mapping[str, Any]) -> dict[int, str]:
    """By its place, what the function calls a tensor."""
    try:
        bound = inspect.signature(getattr(function, "forward", function)).bind(*examples, **named)
        words = [name for name in bound.arguments if name not in named]
    except (TypeError, ValueError):  # a function without a signature
        words = []
    every: dict[int | str, str] = {**dict(enumerate(words)), **{name: name for name in named}}
    return {place: every[key] for key, place in _places(examples, named).items() if key in every}


class _Sizes:
    """The named sizes of a trace: one symbol of torch for each, in the shapes of tensors without data."""

    def __init__(
        self, examples: Sequence[Any], named: Mapping[str, Any], dynamic: Mapping[str, Place | Sequence[Place]]
    ) -> None:
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=True)
        self.made: dict[str, Any] = {}
        self.where: dict[int, dict[int, str]] = {}  # place → dimension → name
        known = _places(examples, named)
        for name, places in dynamic.items():
            if not NAME.fullmatch(name):
                raise GraphError(f"dynamic: {name!r} is not a name for a size", hint="use letters, digits and _")
            several: Any = [places] if isinstance(places[0], (int, str)) else places
            for key, dim in several:
                if key not in known:
                    raise GraphError(f"dynamic: {name!r} is at {key!r}, which is not a tensor among the examples")
                tensor = examples[key] if isinstance(key, int) else named[key]
                if not -tensor.dim() <= dim < tensor.dim():
                    raise GraphError(f"dynamic: {name!r} is dimension {dim} of a tensor that has {tensor.dim()}")
                self._add(name, tensor.shape[dim])
                self.where.setdefault(known[key], {})[dim % tensor.dim()] = name

    def _add(self, name: str, example: int) -> None:
        if name not in self.made:
            source = ConstantSource(name)
            hint = max(example, 2)  # torch takes sizes of 0 and 1 for fixed ones
            symbol = self.environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            self.made[name] = self.environment.create_symintnode(symbol, hint=hint, source=source)

    def fake(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without data, like this one but for its named sizes."""
        if place not in self.where:
            return self.mode.from_tensor(tensor, static_shapes=True)
        shape = [self.made[self.where[place][d]] if d in self.where[place] else n for d, n in enumerate(tensor.shape)]
        with self.mode:
            return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def symbols(self) -> dict[str, str]:
        """By torch's name of a symbol, the name it was given."""
        return {str(made.node.expr): name for name, made in self.made.items()}

    def check(self) -> None:
        """Raise GraphError where the function does not do the same for all sizes."""
        for name, made in self.made.items():
            if made.node.expr.is_Integer:
                raise GraphError(
                    f"dynamic: the function works only for {name} = {made.node.expr}",
                    hint="give the same name to the sizes of other arguments that must be equal to it",
                )
        if len(self.symbols()) < len(self.made):
            raise GraphError(
                f"dynamic: the function needs equal sizes among {', '.join(self.made)}", hint="give them one name"
            )
        for guard in self.environment.guards:
            said = str(guard.expr)
            for symbol, name in self.symbols().items():
                said = said.replace(symbol, name)
            raise GraphError(f"dynamic: what the function does depends on whether {said}", hint="fix that size")


@contextmanager
def _fast_path_off() -> Iterator[None]:
    """Without torch's own kernels for whole encoder layers, which modules call where no gradients are wanted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _recorded(flat: Callable[..., list[torch.Tensor]], fakes: Sequence[torch.Tensor], mode: Any) -> GraphModule:
    """The FX graph of what the function calls."""
    record = make_fx(functionalize(flat), tracing_mode="real", decomposition_table=parts(), _allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad(), _fast_path_off(), Whole():
            module: GraphModule = record(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as exc:
        raise GraphError(
            "the function has no kernel graph: what it does depends on the values of tensors "
            f"({next(iter(str(exc).splitlines()), '')})",
            hint="torch.compile breaks the function in parts there",
        ) from exc
    module.graph.eliminate_dead_code()
    return module


def _graph_of(
    module: GraphModule, names: Sequence[str | None], function: Any, state: Sequence[str]
) -> tuple[Graph, list[Held]]:
    """The kernel graph, and the tensors that it holds: parameters that are used, and what the function took from around."""
    tracer, held = Tracer(RULES), list[Held]()
    titles = iter([*names, *state])
    outputs: list[int] = []
    for count, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            name = next(titles)
            if count < len(names):
                tracer.input(node, name)
            elif node.users:
                tracer.input(node, name)
                held.append((str(name), partial(operator.attrgetter(str(name)), function)))
        elif node.op == "get_attr":
            _constant(tracer, node, operator.attrgetter(node.target)(module), held)
        elif node.op == "output":
            outputs = [tracer.numbers[one] for one in node.args[0]]
        elif not isinstance(node.meta.get("val"), torch.SymInt):
            tracer.add(node)
    return tracer.b.graph(outputs), held


def _constant(tracer: Tracer, node: FxNode, tensor: torch.Tensor, held: list[Held]) -> None:
    """A number that the function made with torch.tensor, or a tensor it took from around: one more input."""
    node.meta.setdefault("val", tensor)
    made_inside = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if tensor.dim() == 0 and made_inside:
        tracer.numbers[node] = tracer.b.constant(tensor.item(), dtype_of(tensor))
        return
    tracer.input(node)
    held.append((str(node.target), lambda: tensor))


def _renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with other names for its sizes."""
    if not names:
        return graph

    def renamed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(renamed, value))
        return value.renamed(names) if isinstance(value, Size) else value

    builder = Builder()
    for _, node in graph:
        builder.add(node.op, *node.args, **{name: renamed(value) for name, value in node.attrs})
    return builder.graph(graph.outputs)
