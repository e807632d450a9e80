"""Logging to standard error, at the level the settings name. Standard output is for data alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anytorch import config

if TYPE_CHECKING:
    import logging

ROOT = "anytorch"


class Logger:
    """A module's logger that imports `logging` (13 ms) with its first message rather than with the module.

    Below a warning it says nothing while nobody has imported `logging`: then nobody can have asked to see it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def debug(self, message: str, *args: Any) -> None:
        if "logging" in sys.modules:
            self._real().debug(message, *args, stacklevel=2)

    def info(self, message: str, *args: Any) -> None:
        if "logging" in sys.modules:
            self._real().info(message, *args, stacklevel=2)

    def warning(self, message: str, *args: Any) -> None:
        self._real().warning(message, *args, stacklevel=2)

    def error(self, message: str, *args: Any) -> None:
        self._real().error(message, *args, stacklevel=2)

    def _real(self) -> logging.Logger:
        import logging

        if _waiting:
            _install(_waiting.pop())
        return logging.getLogger(self.name)


def logger(name: str) -> Logger:
    """The logger of one module: `log = logs.logger(__name__)`. `configure` or the application says where it goes."""
    return Logger(name)


_waiting: list[str] = []  # the level `configure` was given while there was no `logging` to set up yet


def configure(level: str | None = None) -> None:
    """Called by the command line and the service. A library user's own logging set-up is left alone."""
    chosen: str = level or config.get("log_level")
    if chosen in ("WARNING", "ERROR") and "logging" not in sys.modules:
        _waiting[:] = [chosen]  # most commands log nothing: the first message sets it up
    else:
        _install(chosen)


def _install(level: str) -> None:
    import logging

    root = logging.getLogger(ROOT)
    root.setLevel(level)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("anytorch %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
