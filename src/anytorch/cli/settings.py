"""Settings for a command that must answer even if some of them make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anytorch import config
from anytorch.errors import ConfigError


@contextmanager
def tolerated(problems: list[str]) -> Iterator[dict[str, config.Value]]:
    """Every setting that can be understood; the others have their defaults here and are named in `problems`."""
    values: dict[str, config.Value] = {}
    broken = {}
    for name, setting in config.SETTINGS.items():
        try:
            values[name] = config.lookup(name)
        except ConfigError as exc:
            values[name] = config.Value(setting.default, "default")
            broken[name] = setting.default
            words = f"{exc.message} ({exc.hint})" if exc.hint else exc.message
            if words not in problems:
                problems.append(words)
    with config.use(**broken):
        yield values
