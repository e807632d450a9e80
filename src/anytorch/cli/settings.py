"""Check the settings as a whole, for commands that need them all and for those that must tolerate errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anytorch import settings
from anytorch.errors import ConfigError, UnknownDevice, did_you_mean


def check_settings() -> None:
    """Raise ConfigError for an unknown line in the settings file or an unknown back end."""
    check_settings_file(settings.read_settings_file(), settings.settings_file())
    check_backend(settings.lookup("backend"))


def check_settings_file(data: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for an unknown table or setting in a file. Values are not checked here.

    Such a line was meant to do something. A library user's program does not stop because of a line that it does not need.
    """
    for table in data:
        if table not in settings.TABLES:
            meant = f"did you mean 'settings.{table}'?" if table in settings.SETTINGS else "remove it"
            raise ConfigError(
                f"{path}: unknown table {table!r}; a settings file has the tables {' and '.join(settings.TABLES)}",
                hint=did_you_mean(table, settings.TABLES, meant),
            )
    for name in data.get("settings", {}):
        if name not in settings.SETTINGS:
            raise settings.unknown_setting(name, f"{path}: ")
        if not settings.SETTINGS[name].in_file:
            raise ConfigError(f"{path}: {name!r} cannot be set in a file", hint=settings.SETTINGS[name].help)


def check_backend(value: settings.Value, file: str = "") -> None:
    """Raise ConfigError if the configured back end is unknown. The doctor reports one whose plug-in is broken."""
    if value.source == "default":
        return
    from anytorch.devices.ranking import parse
    from anytorch.devices.registry import registry

    known = registry()
    try:
        parse(str(value.value), known)
    except UnknownDevice as exc:
        if str(value.value).partition(":")[0] in known.errors:
            return
        if value.source == "file":
            where = f"{file or settings.settings_file()}, setting 'backend'"
        else:
            where = f"environment variable {value.source}" if value.source != "code" else "backend"
        raise ConfigError(f"{where}: {exc.message}", hint=exc.hint) from exc


@contextmanager
def tolerated(problems: list[str]) -> Iterator[dict[str, settings.Value]]:
    """All settings; invalid ones have their defaults and are named in `problems`."""
    values: dict[str, settings.Value] = {}
    broken: dict[str, object] = {}

    def told(exc: ConfigError) -> None:
        words = f"{exc.message} ({exc.hint})" if exc.hint else exc.message
        if words not in problems:
            problems.append(words)

    def default(name: str) -> None:
        broken[name] = settings.SETTINGS[name].default
        values[name] = settings.Value(broken[name], "default")

    for name in settings.SETTINGS:
        try:
            values[name] = settings.lookup(name)
        except ConfigError as exc:
            default(name)
            told(exc)
    try:
        check_settings_file(settings.read_settings_file(), settings.settings_file())
    except ConfigError as exc:
        told(exc)
    with settings.use(**broken):  # the registry asks for the setting `plugins`
        try:
            check_backend(values["backend"])
        except ConfigError as exc:
            default("backend")
            told(exc)
    with settings.use(**broken):
        yield values
