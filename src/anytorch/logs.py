"""Log to standard error at the level in the settings. Standard output carries data only.

The command line calls `configure`. In somebody's program nothing is set up unless a level is named explicitly
(ANYTORCH_LOG_LEVEL, YIRAGE_LOG_LEVEL, the settings file, `with anytorch.use(log_level=…)`): then the first message sets
the level of the logger `anytorch`, and lines go to standard error unless the program has handlers of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anytorch import settings
from anytorch.errors import ConfigError

if TYPE_CHECKING:
    import logging

ROOT = "anytorch"
FORMAT = "anytorch %(levelname)s %(name)s: %(message)s"


class Logger:
    """A module's logger that imports `logging` (13 ms) with its first message rather than with the module.

    Below a warning it says nothing while `logging` is not imported and no level is named: no one can have asked then.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def debug(self, message: str, *args: Any) -> None:
        if _may_be_heard():
            self._real().debug(message, *args, stacklevel=2)

    def info(self, message: str, *args: Any) -> None:
        if _may_be_heard():
            self._real().info(message, *args, stacklevel=2)

    def warning(self, message: str, *args: Any) -> None:
        _may_be_heard()
        self._real().warning(message, *args, stacklevel=2)

    def error(self, message: str, *args: Any) -> None:
        _may_be_heard()
        self._real().error(message, *args, stacklevel=2)

    def _real(self) -> logging.Logger:
        import logging

        if _waiting:
            _install(_waiting.pop())
        return logging.getLogger(self.name)


def logger(name: str) -> Logger:
    """The logger of one module: `log = logs.logger(__name__)`. `configure` or the application says where it goes."""
    return Logger(name)


# --- what others say -----------------------------------------------------------------------------------------------

# Logger, and what tells its message from others: torchao about its kernels for other machines, torch about torchao.
ASIDES = (
    ("torchao", "Failed to load "),
    ("torchao", "Skipping import of cpp extensions"),
    ("torch.utils._pytree", "register_constant() on Enum subclasses is deprecated"),
)


@contextmanager
def asides_unheard() -> Iterator[None]:
    """A context in which the messages in ASIDES are dropped and all others are logged.

    transformers imports torchao where it finds it, whatever the model: it is no news to somebody who opens one.
    """
    import logging

    added = []
    try:
        for name, words in ASIDES:

            def other(record: logging.LogRecord, words: str = words) -> bool:
                return words not in record.getMessage()

            logging.getLogger(name).addFilter(other)
            added.append((logging.getLogger(name), other))
        yield
    finally:
        for heard, other in added:
            heard.removeFilter(other)


_unheard = threading.RLock()


@contextmanager
def warnings_unheard() -> Iterator[None]:
    """Inside, no warning is shown, whichever thread issues it.

    `warnings.catch_warnings` saves and restores filters of the whole process: two blocks that overlap in threads would
    restore them in the wrong order, and leave them on "ignore". So one waits for the other.
    """
    import warnings

    with _unheard, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- the command line ----------------------------------------------------------------------------------------------

_configured: list[str] = []  # the level `configure` was given; empty in somebody else's program
_waiting: list[str] = []  # that level, while there was no `logging` to set up yet


def configure(level: str | None = None) -> None:
    """Called by the command line and the service. A library user's own logging set-up is left alone."""
    chosen: str = level or settings.get("log_level")
    _configured[:] = [chosen]
    if chosen in ("WARNING", "ERROR") and "logging" not in sys.modules:
        _waiting[:] = [chosen]  # most commands log nothing: the first message sets it up
    else:
        _install(chosen)


def _install(level: str) -> None:
    import logging

    package = logging.getLogger(ROOT)
    package.setLevel(level)
    if not package.handlers:
        package.addHandler(_standard_error())
        package.propagate = False


def _standard_error() -> logging.Handler:
    import logging

    class StandardError(logging.Handler):
        """Asks for `sys.stderr` with every line: it may have been replaced, or be None."""

        def emit(self, record: logging.LogRecord) -> None:
            if sys.stderr is None or (not _configured and logging.getLogger().handlers):
                return  # the program has set logging up after all: its handlers get the line, and once is enough
            try:
                sys.stderr.write(self.format(record) + "\n")
            except (OSError, ValueError):  # full, or closed: logging's own way of saying so would use it, too
                return

    handler = StandardError()
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler


# --- somebody's program --------------------------------------------------------------------------------------------

_followed: list[str] = []  # the level we gave the package's logger because a setting names it


def _may_be_heard() -> bool:
    """True if a message below WARNING would be logged. In a program, this also applies the level from the settings."""
    if not _configured:
        named = _named_level()
        if named is not None or _followed:
            _follow(named)
    return "logging" in sys.modules


def _named_level() -> str | None:
    """The level that was set explicitly; None for the default."""
    try:
        value = settings.lookup("log_level")
    except ConfigError:
        return None  # whoever acts on the settings says so; a log line must not raise
    return None if value.source == "default" else str(value.value)


def _follow(level: str | None) -> None:
    import logging

    if _followed == [level]:
        return
    package = logging.getLogger(ROOT)
    if not _followed and package.level != logging.NOTSET:
        return  # the program has chosen a level for us itself
    package.setLevel(logging.NOTSET if level is None else level)
    _followed[:] = [] if level is None else [level]
    if not package.handlers:
        package.addHandler(_standard_error())
