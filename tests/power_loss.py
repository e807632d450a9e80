# ruff: noqa: PTH100, PTH112, PTH116, PTH118, PTH208
"""Power loss for tests: `recorded(folder)` notes what a job does to a folder, call by call, and `Recording.states` are the
folders that a power loss may leave of it: every prefix of what was written, and every reordering between syncs."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_disk import CALLS, path_of, places

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
    found: dict[frozenset[tuple[str, bytes | None]], State] = field(default_factory=dict)
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
                told = frozenset(tree.items())  # bytes remember their hash
                state = State(f"after call {len(self.calls)} ({call})", tree, done)
                known = self.found.setdefault(told, state)
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
