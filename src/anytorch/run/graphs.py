"""CUDA graphs: the device's own recordings where it has them; elsewhere the operations, noted once and run again.

Both run the work while they capture it. As with CUDA, what a graph writes to tensors that were there before is undone at the
end of the capture: the first replay is the first time it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import Place

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class Keeping(TorchDispatchMode):
    """Runs every operation, and keeps the first contents of what was there before and is written to.

    `quietly` is entered while they are copied: a recording must not record that.
    """

    def __init__(self, quietly: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        super().__init__()
        self._quietly = quietly
        self._made: set[int] = set()  # storages that the operations made
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        for argument, value in zip(schema.arguments, args, strict=False):
            self._keep(argument, value)
        for argument in schema.arguments:
            if argument.name in kwargs:
                self._keep(argument, kwargs[argument.name])
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        if all(returned.alias_info is None for returned in schema.returns):
            self._made.update(_storage(tensor) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after each operation."""

    def _keep(self, argument: Any, value: Any) -> None:
        """Keep the contents of a tensor from before the capture that is about to be written."""
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tree_leaves(value):
            if (
                isinstance(tensor, torch.Tensor)
                and id(tensor) not in self._before
                and _storage(tensor) not in self._made
            ):
                with self._quietly():
                    self._before[id(tensor)] = tensor, tensor.detach().clone()

    def restore(self) -> None:
        """Give what was there before the capture its first contents back."""
        with torch.no_grad():
            for tensor, contents in reversed(self._before.values()):
                tensor.detach().copy_(contents)
        self._before.clear()


class Noting(Keeping):
    """Notes every operation with its arguments and results, too."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.operations.append((func, args, kwargs, result))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def replay(operations: list[Operation]) -> None:
    """Run the operations again; each result goes where the first one lies."""
    with torch.no_grad():
        for func, args, kwargs, result in operations:
            returns = func._schema.returns
            if returns and all(returned.alias_info is not None for returned in returns):
                if any(returned.alias_info.is_write for returned in returns):
                    func(*args, **kwargs)
                continue  # a view: its base has been computed by now
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor):
                    old.detach().copy_(new)


class CUDAGraph:
    """`with torch.cuda.graph(g): y = f(x)`, then `x.copy_(…)` and `g.replay()`; or capture_begin and capture_end."""

    _place: Place
    _ledger: Ledger

    def __init__(self, keep_graph: bool = False) -> None:
        self._keeping: Any = None
        self._operations: list[Operation] = []
        self._recording: Any = None
        self._random: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._ledger.redirect("torch.cuda.CUDAGraph")
        _capturing.append(self)
        self._random = torch.cuda.get_rng_state()
        if self._place.has("Graph"):
            self._recording = self._place.module.Graph()
            self._recording.__enter__()
            self._keeping = Keeping(self._recording.paused)
        else:
            self._keeping = Noting()
        self._keeping.__enter__()

    def capture_end(self, *about: Any) -> None:
        _capturing.remove(self)
        about = about or (None, None, None)
        keeping, self._keeping = self._keeping, None
        keeping.__exit__(*about)
        if self._recording is not None:
            self._recording.__exit__(*about)
        else:
            self._operations = keeping.operations
        keeping.restore()
        torch.cuda.set_rng_state(self._random)

    def replay(self) -> None:
        if self._recording is not None:
            self._recording.replay()
        else:
            replay(self._operations)

    def reset(self) -> None:
        self._operations, self._recording = [], None

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def instantiate(self) -> None:
        """Nothing to do: a recording can be replayed as it is."""

    def enable_debug_mode(self) -> None:
        """Nothing to do: there is nothing to dump."""


_capturing: list[CUDAGraph] = []


class graph:
    """The context manager torch.cuda.graph."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"):
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cuda_graph.capture_end(kind, value, trace)


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    made = type("CUDAGraph", (CUDAGraph,), {"_place": place, "_ledger": ledger, "__module__": "torch.cuda"})

    def make_graphed_callables(callables: Any, sample_args: Any, *args: Any, **kwargs: Any) -> Any:
        ledger.ignore("torch.cuda.make_graphed_callables()")
        return callables

    for owner in (torch.cuda, torch.cuda.graphs):
        patches.set(owner, "CUDAGraph", made)
        patches.set(owner, "graph", graph)
        patches.set(owner, "make_graphed_callables", make_graphed_callables)
        patches.set(owner, "graph_pool_handle", lambda: (0, 0))
        patches.set(owner, "is_current_stream_capturing", lambda: bool(_capturing))
