"""A disk that fails at the Nth thing asked of it, or loses its power there: for tests of what is written to files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CALLS = ("open", "fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir")
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class PowerLoss(BaseException):
    """Nobody catches it; and nothing more is written after it, not even by those who clean up."""


class Disk:
    """Counts what changes the disk. At call `at` it fails: once, with ENOSPC; or for good, as `power` does."""

    def __init__(self, at: int, power: bool) -> None:
        self.at, self.power, self.calls = at, power, 0

    def ask(self) -> None:
        self.calls += 1
        if self.calls == self.at and not self.power:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.power and self.calls >= self.at:
            raise PowerLoss

    @property
    def failed(self) -> bool:
        return self.calls >= self.at


class File:
    """A file whose writes may fail."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        self._disk.ask()
        return self._file.write(data)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing(at: int, *, power: bool = False) -> Iterator[Disk]:
    """A context in which the disk fails at the `at`-th change that goes through the os module."""
    disk = Disk(at, power)

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name != "open" or (len(arguments) > 1 and arguments[1] & CHANGING):
                disk.ask()
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        fdopen = os.fdopen
        patch.setattr(os, "fdopen", lambda *a, **k: File(fdopen(*a, **k), disk))
        yield disk
