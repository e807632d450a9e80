"""What a piece of a program spends its time and memory on, op by op.

    with lite.profile() as found:
        loss = criterion(model(x), y)
        loss.backward()
    print(found.table())
    found.chrome_trace("trace.json")  # for chrome://tracing or ui.perfetto.dev

While the block runs, every op of `lite.ops`, every operator of tensors and every step of `backward` is timed; outside of it
nothing is: functions that measure are put in the ops' places for the length of the block. One profile at a time, for all
threads. On a GPU an op's time is what it takes to launch it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

import numpy as np

from anytorch.errors import UsageError
from anytorch.files import replace_file
from anytorch.lite.autograd import Base, Node
from anytorch.lite.ops import conv, elementwise, linear, losses, recurrent, reduce, rows, shape
from anytorch.lite.tensors import CustomTensor

MODULES = (conv, elementwise, linear, losses, recurrent, reduce, rows, shape)
OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "pow",
    "matmul",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "getitem",
)
PLACE = "anytorch.lite"
_running = threading.Lock()


@dataclass(frozen=True)
class OpEvent:
    """One call: when it began and how long it took (nanoseconds), without what it called, and the bytes it allocated."""

    name: str
    start_ns: int
    total_ns: int
    self_ns: int
    nbytes: int  # of new memory that its result holds; 0 for a view
    thread: int


@dataclass
class OpRow:
    """All calls of one op."""

    name: str
    calls: int = 0
    self_ns: int = 0
    total_ns: int = 0
    nbytes: int = 0


@dataclass
class Profile:
    """What a `with profile()` block found."""

    events: list[OpEvent] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _open: threading.local = field(default_factory=threading.local)

    def __enter__(self) -> Profile:
        if not _running.acquire(blocking=False):
            raise UsageError("a profile is running already", hint="leave its `with` block first")
        self._begun_ns = time.perf_counter_ns()
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        while self._undo:
            self._undo.pop()()
        _running.release()

    # --- reading -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[OpRow]:
        """One row per op, those that took longest themselves first."""
        found: dict[str, OpRow] = {}
        for event in self.events:
            row = found.setdefault(event.name, OpRow(event.name))
            row.calls += 1
            row.self_ns += event.self_ns
            row.total_ns += event.total_ns
            row.nbytes += event.nbytes
        return sorted(found.values(), key=lambda row: -row.self_ns)

    def table(self) -> str:
        """The rows as text: calls, own and total time, and bytes allocated."""
        all_ns = max(1, sum(event.self_ns for event in self.events))
        lines = [f"{'op':24}{'calls':>8}{'self ms':>12}{'share':>8}{'total ms':>12}{'MiB':>10}"]
        lines += [
            f"{row.name:24}{row.calls:>8}{row.self_ns / 1e6:>12.3f}{row.self_ns / all_ns:>8.1%}"
            f"{row.total_ns / 1e6:>12.3f}{row.nbytes / 2**20:>10.2f}"
            for row in self.rows()
        ]
        return "\n".join(lines)

    def chrome_trace(self, path: str | Path) -> Path:
        """Write the calls as a trace that chrome://tracing and ui.perfetto.dev show; returns the file's path."""
        events = [
            {
                "name": event.name,
                "ph": "X",  # a complete event: begin and duration
                "cat": "backward" if event.name.endswith(" backward") else "op",
                "ts": (event.start_ns - self._begun_ns) / 1e3,
                "dur": event.total_ns / 1e3,
                "pid": 0,
                "tid": event.thread,
                "args": {"allocated bytes": event.nbytes},
            }
            for event in self.events
        ]
        target = Path(path)
        replace_file(target, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
        return target

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _timed(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """A function that counts its calls as those of an op; `name` None: of the node it is called on, going backward."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            title = name or f"{args[0].name} backward"
            # Per op under way: its name, and the time of what it called.
            inside: list[tuple[str, list[int]]] = self._open.__dict__.setdefault("inside", [])
            if inside and inside[-1][0] == title:  # an operator that calls the op of its name: one call
                return function(*args, **kwargs)
            called = [0]
            inside.append((title, called))
            start = time.perf_counter_ns()
            result: Any = None
            try:
                result = function(*args, **kwargs)
                return result
            finally:
                total = time.perf_counter_ns() - start
                inside.pop()
                if inside:
                    inside[-1][1][0] += total
                nbytes = allocated(result, args)
                self.events.append(OpEvent(title, start, total, total - called[0], nbytes, threading.get_ident()))

        return run

    def _attach(self) -> None:
        timed: dict[Any, Callable[..., Any]] = {}
        for module in MODULES:
            for name, function in vars(module).items():
                if isinstance(function, FunctionType) and function.__module__ == module.__name__ and _is_op(function):
                    timed[function] = self._timed(function, name.removesuffix("_of"))
        for space in _namespaces():
            for name, value in list(vars(space).items()):
                if isinstance(value, FunctionType) and value in timed:
                    self._put(space, name, timed[value])
        for name in OPERATORS:
            for method in (f"__{name}__", f"__r{name}__"):
                value = vars(CustomTensor).get(method)
                if isinstance(value, FunctionType):
                    self._put(CustomTensor, method, self._timed(value, name))
        self._put(Node, "gradients", self._timed(Node.gradients, None))

    def _put(self, space: Any, name: str, value: Any) -> None:
        before = vars(space)[name]
        setattr(space, name, value)
        self._undo.append(lambda: setattr(space, name, before))


def profile() -> Profile:
    """`with lite.profile() as found: …`, then `found.table()`, `found.rows()`, `found.chrome_trace(path)`."""
    return Profile()


def profiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that prints the table of what a function's calls spend their time on, to standard error."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with profile() as found:
            result = function(*args, **kwargs)
        sys.stderr.write(f"{function.__name__}\n{found.table()}\n")
        return result

    return run


def _namespaces() -> Iterator[Any]:
    """Everything that may hold a reference to an op: lite's modules and the tensor's class."""
    yield CustomTensor
    for name, module in list(sys.modules.items()):
        if name == PLACE or (name.startswith(f"{PLACE}.") and name != __name__):
            yield module


def _is_op(function: FunctionType) -> bool:
    """True for functions of tensors; those that work on bare arrays, or that are told what to compute, are parts of one."""
    wanted = function.__annotations__
    if {"name", "compute", "forward"} & set(wanted):
        return False
    return not function.__name__.startswith("_") and str(wanted.get("return", "")).startswith(
        ("T", "tuple[T", "list[T")
    )


def allocated(result: Any, inputs: Sequence[Any] = ()) -> int:
    """The bytes of new memory in an op's result: nothing for what shows the memory of an input."""
    if isinstance(result, (tuple, list)):
        return sum(allocated(one, inputs) for one in result)
    data = result.data if isinstance(result, Base) else result
    if not hasattr(data, "nbytes"):
        return 0
    given = [one.data for one in inputs if isinstance(one, Base)]
    shown = isinstance(data, np.ndarray) and any(
        isinstance(g, np.ndarray) and np.may_share_memory(data, g) for g in given
    )
    return 0 if shown else int(data.nbytes)
