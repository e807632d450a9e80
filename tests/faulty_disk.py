# ruff: noqa: PTH (the os module is what is wrapped here)
"""Faults for tests: a machine that fails at the Nth thing asked of it, as SQLite's tests have it, or loses its power there.

    for attempt in each(partial(failing, within=folder)):     # also failing_threads, failing_allocations
        with attempt:                                         # the first, second, … call fails, until none was left to fail
            ...

`recorded(folder)` notes what a job writes, and `Recording.states` are all the folders that a power loss may leave of it.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
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
            if not name.endswith("_") and not any(view in name for view in VIEWS):
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


# --- power loss --------------------------------------------------------------------------------------------------------

Tree = dict[str, bytes | None]  # path below the folder → its bytes; None for a folder
Number = tuple[int, int]  # of a file or folder: the system's, and how often that number was given out before
Entry = tuple[Number, str]  # a name in a folder


@dataclass
class Change:
    """What one call did to names, all at once or not at all: a name's new owner, or None where it is gone."""

    names: dict[Entry, Number | None]
    synced: bool = False


@dataclass
class State:
    """What a power loss may leave: when, in words; the folder; and how far the job had come at the last such moment."""

    moment: str
    tree: Tree
    done: int

    def __str__(self) -> str:
        return f"{self.moment}: {', '.join(f'{name} ({len(data or bytes())})' for name, data in sorted(self.tree.items()))}"


@dataclass
class Recording:
    """What a job did to a folder, call by call; and what a power loss after each of them may leave.

    Until its file is synced, written data may be there, in part, as zeros, or not; until its folder is synced, so may a new,
    renamed or removed name, whatever happened to those before and after it. (File systems in use reorder less.)
    """

    folder: Path
    kept: dict[Entry, Number] = field(default_factory=dict)  # names that were there at the beginning
    changes: list[Change] = field(default_factory=list)
    on_disk: dict[Number, bytes] = field(default_factory=dict)  # as it was synced last
    now: dict[Number, bytes | None] = field(default_factory=dict)  # None: a folder
    folders: set[Number] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    done: Callable[[], int] = lambda: 0  # how far the job is, by its own files
    found: dict[bytes, State] = field(default_factory=dict)
    _names: dict[Entry, Number] = field(default_factory=dict)
    _numbers: dict[int, Number] = field(default_factory=dict)
    _given: dict[int, int] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)

    def _walk(self) -> tuple[dict[Entry, Number], dict[Number, bytes | None]]:
        names: dict[Entry, Number] = {}
        contents: dict[Number, bytes | None] = {}
        there: dict[int, Number] = {}

        def number(path: str) -> Number:
            own = os.stat(path).st_ino
            if own not in there:
                if own not in self._numbers:  # the system gives numbers of removed files out again
                    self._given[own] = self._given.get(own, 0) + 1
                    self._numbers[own] = (own, self._given[own])
                there[own] = self._numbers[own]
            return there[own]

        def visit(path: str, owner: Number) -> None:
            contents[owner] = None
            self.folders.add(owner)
            for one in sorted(os.listdir(path)):
                inner = os.path.join(path, one)
                names[owner, one] = number(inner)
                if os.path.isdir(inner):
                    visit(inner, names[owner, one])
                else:
                    with REAL_OPEN(inner, "rb") as file:
                        contents[names[owner, one]] = file.read()

        visit(str(self.folder), number(str(self.folder)))
        self._numbers = there
        return names, contents

    def begin(self) -> None:
        self._names, self.now = self._walk()
        self.kept = dict(self._names)
        self.on_disk = {number: data for number, data in self.now.items() if data is not None}

    def look(self, call: str = "", *, apart: bool = False) -> None:
        """Note what has changed since the last look: by one call, or `apart`, by a library that we do not see."""
        names, self.now = self._walk()
        both = self._names.keys() | names.keys()
        changed = {entry: names.get(entry) for entry in both if self._names.get(entry) != names.get(entry)}
        self._names = names
        if changed:
            self.changes += [Change({e: n}) for e, n in changed.items()] if apart else [Change(changed)]
        if call:
            self.calls.append(call)
            self._possible(call)

    def synced(self, handle: int) -> None:
        number = self._numbers.get(os.fstat(handle).st_ino)
        data = self.now.get(number) if number is not None else None
        if number is None:
            return
        if data is not None:
            self.on_disk[number] = data
        for change in self.changes:
            # A rename is where its new name is.
            owners = {owner for (owner, _), new in change.names.items() if new is not None} or {
                e[0] for e in change.names
            }
            change.synced = change.synced or number in owners

    def _possible(self, call: str) -> None:
        """Add the folders that a power loss right now may leave."""
        done = self.done()
        open_ = [place for place, change in enumerate(self.changes) if not change.synced]
        subsets = [set(open_), set(), *({one} for one in open_), *(set(open_) - {one} for one in open_)]
        unsure = [n for n, data in self.now.items() if data is not None and self.on_disk.get(n) != data]
        for applied in subsets:
            names = dict(self.kept)
            for place, change in enumerate(self.changes):
                if change.synced or place in applied:
                    for entry, number in change.names.items():
                        if number is None:
                            names.pop(entry, None)
                        else:
                            names[entry] = number
            for make in (lambda n: self.now[n], lambda n: self.on_disk.get(n, b""), self._half, self._zeros)[
                : 4 if unsure else 1
            ]:
                tree = self._tree(names, {n: make(n) for n in unsure})
                told = repr(sorted(tree.items())).encode()
                state = State(f"after call {len(self.calls)} ({call})", tree, done)
                known = self.found.setdefault(hashlib.sha256(told).digest(), state)
                known.done = max(known.done, done)

    def _half(self, number: Number) -> bytes:
        data = self.now[number] or b""
        return data[: len(data) // 2]

    def _zeros(self, number: Number) -> bytes:
        return bytes(len(self.now[number] or b""))

    def _tree(self, names: dict[Entry, Number], unsure: dict[Number, bytes | None]) -> Tree:
        tree: Tree = {}

        def visit(owner: Number, above: str) -> None:
            for (holder, name), number in names.items():
                if holder != owner:
                    continue
                path = f"{above}{name}"
                # A file that is gone was synced or never had bytes on the disk; one that is there has what it has now.
                data = unsure[number] if number in unsure else self.now.get(number, self.on_disk.get(number, b""))
                data = None if number in self.folders else data
                tree[path] = data
                if data is None:
                    visit(number, f"{path}/")

        visit(self._numbers[os.stat(self.folder).st_ino], "")
        return tree

    def states(self) -> list[State]:
        """Every folder that a power loss may leave, each once."""
        return list(self.found.values())

    def restore(self, state: State) -> None:
        """Make the folder as a power loss left it."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, data in sorted(state.tree.items()):
            path = self.folder / name
            path.mkdir(parents=True, exist_ok=True) if data is None else path.write_bytes(data)


REAL_OPEN = io.open


@contextmanager
def recorded(folder: Path, done: Callable[[], int] = lambda: 0) -> Iterator[Recording]:
    """A context that notes what happens to a folder (small files: it is read at every call), for `Recording.states`."""
    recording = Recording(folder, done=done)
    recording.begin()
    lock = threading.RLock()
    inside = os.path.join(os.path.abspath(folder), "")

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not any(os.path.join(path_of(one), "").startswith(inside) for one in places(name, arguments, named)):
                return real(*arguments, **named)
            with lock:
                recording.look(f"before {name}", apart=True)
                done = real(*arguments, **named)
                if name == "fsync":
                    recording.synced(arguments[0])
                recording.look(name)
                return done

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield recording
        recording.look("the end", apart=True)
