# ruff: noqa: PTH100, PTH115, PTH118
"""Faults for tests: a machine that fails at the Nth thing asked of it, as SQLite's tests have it, or loses its power there.

    for attempt in each(partial(failing, within=folder)):     # also failing_threads, failing_allocations
        with attempt:                                         # the first, second, … call fails, until none was left to fail
            ...

tests/power_loss.py is about writes that come to the disk in another order.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir")
TWO_PATHS = ("replace", "rename", "link")
WRITES = ("write", "pwrite", "ftruncate", "posix_fallocate")
READS = ("read", "pread", "preadv")
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class PowerLoss(BaseException):
    """Nobody catches it; and nothing more is written after it, not even by those who clean up."""


class Counter:
    """Counts calls of any thread; the `at`-th fails, or with `on` also every one after it."""

    def __init__(self, at: int, error: Callable[[], BaseException], *, on: bool = False) -> None:
        self.at, self.on, self.calls, self.names = at, on, 0, list[str]()
        self._error, self._lock = error, threading.Lock()

    def ask(self, name: str = "") -> None:
        with self._lock:
            self.calls += 1
            self.names.append(name)
            fails = self.calls >= self.at if self.on else self.calls == self.at
        if fails:
            raise self._error()

    @property
    def failed(self) -> bool:
        return self.calls >= self.at

    @property
    def name(self) -> str:
        """What the call was that failed first."""
        return self.names[self.at - 1] if self.failed else ""


class Attempt:
    """One run of a sweep: a context; afterwards `counter` says what failed."""

    def __init__(self, at: int, fault: AbstractContextManager[Counter]) -> None:
        self.at, self._fault = at, fault
        self.counter: Counter

    def __enter__(self) -> Counter:
        self.counter = self._fault.__enter__()
        return self.counter

    def __exit__(self, *exc: Any) -> Any:
        return self._fault.__exit__(*exc)

    def __str__(self) -> str:
        return f"call {self.at}, {self.counter.name}"


def each(
    fault: Callable[[int], AbstractContextManager[Counter]], *, most: int = 1000, step: int = 1
) -> Iterator[Attempt]:
    """Attempts in which the first, second, … call fails. The last is the one in which none did."""
    for at in range(1, most * step, step):
        attempt = Attempt(at, fault(at))
        yield attempt
        if not attempt.counter.failed:
            return
    raise AssertionError(f"{most} attempts, and all of them failed: does anything end?")


# --- the disk ----------------------------------------------------------------------------------------------------------


class File:
    """A file whose writes, or reads, may fail."""

    def __init__(self, file: Any, ask: Callable[[str], None], *, reads: bool = False) -> None:
        self._file, self._ask, self._reads = file, ask, reads

    def write(self, data: Any) -> Any:
        if not self._reads:
            self._ask("write")
        return self._file.write(data)

    def _read(self, name: str, *arguments: Any) -> Any:
        if self._reads:
            self._ask(name)
        return getattr(self._file, name)(*arguments)

    def read(self, *size: Any) -> Any:
        return self._read("read", *size)

    def readinto(self, buffer: Any) -> Any:
        return self._read("readinto", buffer)

    def readline(self, *size: Any) -> Any:
        return self._read("readline", *size)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._read("__next__")

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def path_of(asked: Any) -> str:
    """The path of an open file's number, or of a path."""
    if isinstance(asked, int):
        try:
            return os.readlink(f"/proc/self/fd/{asked}")
        except OSError:
            return ""
    try:
        return os.path.abspath(os.fsdecode(asked))
    except TypeError:
        return ""


def places(name: str, arguments: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """The paths, or numbers of open files, that a call of the os module is about."""
    asked = list(arguments[: 2 if name in TWO_PATHS else 1])
    above = named.get("dir_fd")
    return asked if above is None else [os.path.join(path_of(above), os.fsdecode(one)) for one in asked]


@contextmanager
def failing(
    at: int, *, power: bool = False, reads: bool = False, within: Path | None = None, error: int | None = None
) -> Iterator[Counter]:
    """A context in which the disk fails at the `at`-th change, with ENOSPC; with `power` it is the last that anybody sees.

    `reads`: at the `at`-th read instead, with EIO. `within`: of files in that folder alone. `error`: with another number.
    """
    number = error or (errno.EIO if reads else errno.ENOSPC)
    counter = Counter(at, PowerLoss if power else lambda: OSError(number, os.strerror(number)), on=power)
    inside = None if within is None else os.path.join(os.path.abspath(within), "")

    def concerns(asked: Any) -> bool:
        return inside is None or os.path.join(path_of(asked), "").startswith(inside)

    def changes(flags: int | str) -> bool:
        return bool(flags & CHANGING) if isinstance(flags, int) else bool(set(flags) & set("wax+"))

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts = name != "open" or changes(arguments[1] if len(arguments) > 1 else os.O_RDONLY) is not reads
            if counts and any(concerns(one) for one in places(name, arguments, named)):
                counter.ask(name)
            return real(*arguments, **named)

        return call

    def opened(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if not concerns(file) or changes(mode) is reads:
                return real(file, mode, *arguments, **named)
            counter.ask("open")
            return File(real(file, mode, *arguments, **named), counter.ask, reads=reads)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", *READS) if reads else (*CALLS, *WRITES):
            if hasattr(os, name):
                patch.setattr(os, name, wrapped(name, getattr(os, name)))
        opener, fdopen = opened(io.open), os.fdopen
        patch.setattr(io, "open", opener)
        patch.setattr(builtins, "open", opener)
        if not reads:
            patch.setattr(
                os, "fdopen", lambda fd, *a, **k: File(fdopen(fd, *a, **k), counter.ask if concerns(fd) else str)
            )
        _patch_libraries(patch, counter.ask, concerns, opener, reads)
        yield counter


def _patch_libraries(
    patch: pytest.MonkeyPatch,
    ask: Callable[[str], None],
    concerns: Callable[[Any], bool],
    opener: Callable[..., Any],
    reads: bool,
) -> None:
    """What compiled libraries write and read themselves: pyarrow writes through our files; a read by name is one call."""
    parquet, torch = sys.modules.get("pyarrow.parquet"), sys.modules.get("torch")

    def asked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(where, (str, Path)) and concerns(where):
                ask(name)
            return real(where, *arguments, **named)

        return call

    if reads:
        for module, names in ((parquet, ("read_schema", "read_table", "ParquetFile")), (torch, ("load",))):
            for name in names if module is not None else ():
                patch.setattr(module, name, asked(name, getattr(module, name)))
    elif parquet is not None:
        real = parquet.ParquetWriter

        class Writer(real):  # type: ignore[misc,valid-type]
            def __init__(self, where: Any, *arguments: Any, **named: Any) -> None:
                self.ours = opener(where, "wb") if isinstance(where, (str, Path)) else None
                self.is_open = False  # `__del__` asks, also where this fails
                try:
                    super().__init__(self.ours or where, *arguments, **named)
                except BaseException:
                    if self.ours is not None:
                        self.ours.close()
                    raise

            def close(self) -> None:
                try:
                    super().close()
                finally:
                    if self.ours is not None:
                        self.ours.close()

        patch.setattr(parquet, "ParquetWriter", Writer)


# --- threads and memory ------------------------------------------------------------------------------------------------


def left_since(before: set[threading.Thread]) -> list[str]:
    """The names of threads that are there now, were not before, and do not end."""
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(10)  # one that has done its work may need a moment to end
    return sorted(thread.name for thread in new if thread.is_alive())


@contextmanager
def failing_threads(at: int, *, on: bool = False) -> Iterator[Counter]:
    """A context in which the system refuses the `at`-th thread; with `on` also every later one."""
    counter = Counter(at, lambda: RuntimeError("can't start new thread"), on=on)
    start = threading.Thread.start

    def ask(self: threading.Thread) -> None:
        counter.ask(self.name)
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", ask)
        yield counter


# Ops that give no new memory: views, and what writes into a tensor that is there.
NO_MEMORY_NEEDED = ("t", "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit")
VIEWS = (
    "view",
    "slice",
    "select",
    "as_strided",
    "expand",
    "permute",
    "transpose",
    "squeeze",
    "alias",
    "detach",
    "split",
)
ARRAYS = ("empty", "zeros", "ones", "full", "concatenate", "stack", "empty_like", "zeros_like", "frombuffer")


@contextmanager
def failing_allocations(at: int) -> Iterator[Counter]:
    """A context in which the `at`-th op of torch, or array of NumPy, that needs memory finds none, in any thread."""
    import numpy
    from torch.utils._python_dispatch import TorchDispatchMode

    def torch_error() -> BaseException:
        return RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
        )

    counter = Counter(at, torch_error)

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if not name.endswith("_") and name not in NO_MEMORY_NEEDED and not any(view in name for view in VIEWS):
                counter.ask(name)
            return func(*args, **(kwargs or {}))

    run = threading.Thread.run

    def inside(self: threading.Thread) -> None:
        with Refusing():
            run(self)

    def array(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                counter.ask(f"numpy.{name}")
            except RuntimeError:
                raise MemoryError(f"Unable to allocate 8.00 GiB for an array ({name})") from None
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(threading.Thread, "run", inside)
        for name in ARRAYS:
            patch.setattr(numpy, name, array(name, getattr(numpy, name)))
        stack.enter_context(Refusing())
        yield counter
