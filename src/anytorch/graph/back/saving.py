"""The setting `save_kernels`: every generated text that is prepared is also written to a folder, for people to read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from anytorch import logs, settings
from anytorch.files import replace_file

log = logs.logger(__name__)

_graph: ContextVar[str] = ContextVar("anytorch_graph", default="")  # whose kernels are being prepared, in words


@contextmanager
def kernels_of(graph: str) -> Iterator[None]:
    """Inside, kernels that are saved name this graph. A thread of a pool needs `contextvars.copy_context()`."""
    token = _graph.set(graph)
    try:
        yield
    finally:
        _graph.reset(token)


def save(text: str, schedule: str, *, suffix: str, comment: str) -> None:
    """Write a kernel's text to the folder in the settings, if one is named: once, whichever graph has it first."""
    named: str = settings.get("save_kernels")
    if not named:
        return
    path = Path(named).expanduser() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{suffix}"
    try:
        if not path.exists():
            first = f"{comment} {_graph.get() or 'a kernel outside of a search'}; schedule: {schedule}"
            replace_file(path, f"{first}\n{text}".encode())
    except OSError as exc:
        log.warning(
            "the kernel %s is not saved: %s; name another folder with ANYTORCH_SAVE_KERNELS", path, exc.strerror
        )
