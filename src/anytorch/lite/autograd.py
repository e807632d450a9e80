"""Reverse-mode automatic differentiation, all of it.

Every op that makes a tensor from others leaves a `Node` on the result: where the inputs came from, and a function that
turns the gradient of the output into the gradients of the inputs. `backward` walks these nodes from the newest to the
oldest, which is always a correct order: a node is older than everything that was made from its result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.device import CustomDevice
from anytorch.lite.dtypes import Array, DType, is_floating

_enabled: ContextVar[bool] = ContextVar("lite_gradients", default=True)
_numbers = count(1)

Gradients = Sequence["Array | Scatter | None"]
Hook = Callable[["Base"], "Base | None"]


@contextmanager
def no_grad() -> Iterator[None]:
    """A context or decorator in which no op is recorded: `with no_grad(): …`, or `@no_grad()`."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


@contextmanager
def enable_grad() -> Iterator[None]:
    """A context in which ops are recorded again, inside a `no_grad` block."""
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def grad_enabled() -> bool:
    return _enabled.get()


class Version:
    """How often a piece of memory was written in place. Shared by a tensor and its views."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Scatter:
    """The gradient of `x[index]`: zero but for one part. Added in place, so that T slices of one tensor cost one tensor."""

    __slots__ = ("index", "values")

    def __init__(self, index: Any, values: Array) -> None:
        self.index = index
        self.values = values

    def add_to(self, total: Array) -> None:
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        if all(isinstance(part, (int, slice)) or part is None or part is Ellipsis for part in index):
            total[self.index] += self.values
        else:
            np.add.at(total, self.index, self.values)  # an index array may name one place twice


class Node:
    """One recorded op: `grad_fn` of its result."""

    __slots__ = ("backward", "hooks", "name", "number", "parents", "saved")

    def __init__(
        self,
        name: str,
        parents: Sequence[Base],
        backward: Callable[[Array], Gradients],
        saved: Sequence[Base],
    ) -> None:
        self.name = name
        self.number = next(_numbers)
        # Per input: the node that made it, the tensor itself if it is a leaf, or None if it needs no gradient; its shape.
        self.parents: list[tuple[Node | Base | None, tuple[int, ...]]] = [
            ((p.grad_fn or p) if p.plain is None else None, p.data.shape) for p in parents
        ]
        self.backward: Callable[[Array], Gradients] | None = backward
        self.saved = [(version := p._shared_version(), version.count) for p in saved]
        self.hooks: list[Hook] = []

    def __repr__(self) -> str:
        return f"<{self.name.title().replace('_', '')}Backward>"

    def gradients(self, grad: Array) -> Gradients:
        if self.backward is None:
            raise UsageError(
                f"backward ran through {self!r} a second time, after its saved values were freed",
                hint="call backward(retain_graph=True) the first time",
            )
        for version, then in self.saved:
            if version.count != then:
                raise UsageError(
                    f"{self!r} needs a tensor that was changed in place after it was used "
                    f"(version {version.count}; expected {then})",
                    hint="make a new tensor instead: x = x + 1, not x += 1",
                )
        return self.backward(grad)


T = TypeVar("T", bound="Base")


class Base:
    """A tensor without its operators: numbers, a device, and how it was made.

    Three slots for what every tensor has; the rest are class attributes until one is set, and cost nothing before.
    `plain` is the type of the numbers if no gradient is wanted, and None if one is: where two tensors are equally plain, an
    operator need not ask anything else. (So numbers of another type come through `.to`, not by setting `data`.)
    """

    __slots__ = ("__dict__", "__weakref__", "data", "device", "plain")

    data: Array
    device: CustomDevice
    plain: DType | None
    grad: Base | None = None
    grad_fn: Node | None = None
    _hooks: list[Hook] | None = None
    _version: Version | None = None
    _is_view: bool = False
    _result: type[Any]  # the class of results; subclasses (parameters) do not pass themselves on

    @property
    def requires_grad(self) -> bool:
        return self.plain is None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.plain = None if wanted else self.data.dtype

    @property
    def is_leaf(self) -> bool:
        return self.grad_fn is None

    def _shared_version(self) -> Version:
        if self._version is None:
            self._version = Version()
        return self._version

    def backward(self, gradient: Base | None = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to `.grad` of every leaf it was made from. First order only."""
        if not self.requires_grad:
            raise UsageError(
                "backward() needs a tensor that requires gradients", hint="make its inputs with requires_grad=True"
            )
        if gradient is None:
            if self.data.size != 1:
                raise UsageError(
                    f"backward() on a tensor of shape {self.data.shape}: only a single number needs no gradient=",
                    hint="reduce it first (.sum(), .mean()), or pass gradient=",
                )
            seed = np.ones_like(self.data)
        else:
            seed = gradient.data
            if seed.shape != self.data.shape:
                raise UsageError(f"the gradient has shape {seed.shape}, the tensor {self.data.shape}")
        run_backward(self, seed, retain_graph)

    def register_hook(self, hook: Hook) -> Callable[[], None]:
        """Call `hook(gradient)` when this tensor's gradient is known; what it returns (if anything) replaces it.

        Returns a function that takes the hook off again.
        """
        if not self.requires_grad:
            raise UsageError("a hook on a tensor that does not require gradients would never be called")
        if self.grad_fn is not None:
            hooks = self.grad_fn.hooks
        else:
            hooks = self._hooks = self._hooks or []
        hooks.append(hook)
        return lambda: hooks.remove(hook)

    def retain_grad(self) -> None:
        """Keep `.grad` although this tensor is not a leaf."""

        def keep(gradient: Base) -> None:
            self.grad = gradient

        if self.grad_fn is not None:
            self.register_hook(keep)


def array(value: Any) -> Array:
    """A NumPy op on arrays without dimensions answers with a number; make it an array again."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def make(like: Base, data: Array) -> Any:
    """A tensor of `data` on the device of `like`."""
    out = like._result()
    out.data = data = array(data)
    out.device = like.device
    out.plain = data.dtype
    return out


def record(
    name: str,
    data: Array,
    parents: tuple[T, ...],
    backward: Callable[[Array], Gradients],
    saved: Sequence[Base] = (),
    saves_output: bool = False,
) -> T:
    """The result of an op, with its node if a gradient may be wanted. `saved` are the inputs whose values it will need."""
    out: Any = make(parents[0], data)
    for parent in parents:
        if parent.plain is None:
            break
    else:
        return out  # type: ignore[no-any-return]
    if _enabled.get() and is_floating(out.plain):
        out.plain = None
        out.grad_fn = Node(name, parents, backward, (*saved, out) if saves_output else saved)
    return out  # type: ignore[no-any-return]


def fit(grad: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Undo broadcasting: sum `grad` over the axes that were stretched to reach its shape."""
    if grad.shape != shape:
        extra = grad.ndim - len(shape)
        stretched = tuple(i for i in range(extra, grad.ndim) if shape[i - extra] == 1 != grad.shape[i])
        grad = array(grad.sum(axis=(*range(extra), *stretched))).reshape(shape)
    return grad if grad.dtype == dtype else grad.astype(dtype)


def run_backward(root: Base, seed: Array, retain_graph: bool) -> None:
    start: Node | Base = root.grad_fn or root
    totals: dict[int, Array] = {id(start): seed}
    own: set[int] = set()  # totals made here, which may be added to in place
    edges: dict[int, Node | Base] = {id(start): start}
    heap = [(-number_of(start), id(start))]  # newest first; leaves, which have no number, last
    while heap:
        key = heapq.heappop(heap)[1]
        edge, grad = edges.pop(key), totals.pop(key)
        own.discard(key)
        hooks = edge.hooks if isinstance(edge, Node) else edge._hooks
        for hook in tuple(hooks or ()):
            replaced = hook(make(root, grad))
            if replaced is None:
                continue
            if replaced.data.shape != grad.shape:
                raise UsageError(
                    f"a hook was given a gradient of shape {grad.shape} and returned one of {replaced.data.shape}"
                )
            grad = replaced.data
        if isinstance(edge, Base):
            accumulate(edge, grad)
            continue
        gradients = edge.gradients(grad)
        if not retain_graph:
            edge.backward = None
        for (parent, shape), part in zip(edge.parents, gradients, strict=True):
            if parent is None or part is None:
                continue
            key = id(parent)
            total = totals.get(key)
            if total is None:
                heapq.heappush(heap, (-number_of(parent), key))
                edges[key] = parent
            if isinstance(part, Scatter):
                if key not in own:
                    totals[key] = np.zeros_like(part.values, shape=shape) if total is None else total.copy()
                    own.add(key)
                part.add_to(totals[key])
            elif total is None:
                totals[key] = part
            elif key in own:
                total += part
            else:
                totals[key] = array(total + part)
                own.add(key)


def number_of(edge: Node | Base) -> int:
    return edge.number if isinstance(edge, Node) else 0


def accumulate(leaf: Base, grad: Array) -> None:
    # A copy: one array may be the gradient of several tensors, and `.grad` is changed in place.
    if leaf.grad is None:
        leaf.grad = make(leaf, grad.astype(leaf.data.dtype, copy=True))
    else:
        leaf.grad.data = leaf.grad.data + grad
