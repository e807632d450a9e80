"""`anytorch config`: the settings, shown, saved to a file or loaded from one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anytorch import settings
from anytorch.cli.output import Output
from anytorch.cli.requests import new_file
from anytorch.cli.settings import check_backend, check_settings_file
from anytorch.errors import ConfigError
from anytorch.files import replace_file
from anytorch.probe.facts import as_json


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", default="show", choices=("show", "save", "load", "path"), help="what to do (default: show)"
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="for save and load: a .toml or .json file")


def run(options: argparse.Namespace, output: Output) -> int:
    action: str = options.action
    if action in ("save", "load") and not options.file:
        raise ConfigError(f"`anytorch config {action}` needs a file", hint=f"anytorch config {action} mine.toml")
    if action in ("show", "path") and options.file:
        raise ConfigError(f"`anytorch config {action}` takes no file", hint=f"anytorch config {action}")
    if action == "show":
        return show(output)
    if action == "path":
        path = settings.settings_file()
    elif action == "save":
        path = save(new_file(options.file, "config save"))
        output.note(f"settings written to {path}")
    else:
        path = load(Path(options.file))
        output.note(f"settings loaded from {options.file} into {path}")
    output.answer({"settings_file" if action != "save" else "file": str(path)}, *[str(path)] * (action == "path"))
    return 0


def show(output: Output) -> int:
    stored = settings.read_settings_file()
    values = {name: settings.lookup(name) for name in settings.SETTINGS}
    if output.json:
        output.data(
            {
                "settings_file": str(settings.settings_file()),
                "settings": {
                    name: {
                        "value": as_json(value.value),
                        "source": value.source,
                        "env": list(settings.SETTINGS[name].env),
                        "help": settings.SETTINGS[name].help,
                    }
                    for name, value in values.items()
                },
                "tuned": stored.get("tuned", {}),
            }
        )
        return 0
    rows = [(name, shown(v.value), v.source, " ".join(settings.SETTINGS[name].env)) for name, v in values.items()]
    output.table(("setting", "value", "from", "environment"), rows)
    for device, tuned in stored.get("tuned", {}).items():
        output.heading(f"tuned for {device}")
        output.pairs([(str(key), shown(value)) for key, value in tuned.items()] if isinstance(tuned, dict) else [])
    output.text()
    output.text(f"settings file: {settings.settings_file()}")
    return 0


def shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def save(path: Path) -> Path:
    """Write the settings that differ from their defaults, and all tuned values, to a file; returns its path."""
    chosen = {
        name: as_json(value.value)
        for name, setting in settings.SETTINGS.items()
        if setting.in_file and (value := settings.lookup(name)).source != "default" and value.value is not None
    }
    data = {"settings": chosen, "tuned": settings.read_settings_file().get("tuned", {})}
    if path.suffix.lower() != ".json":
        return settings.write_settings_file(data, path)
    import json

    try:
        replace_file(path, (json.dumps(data, indent=2, default=str) + "\n").encode())
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}", hint="name another file") from exc
    return path


def load(path: Path) -> Path:
    """Check every setting in the file, then make it the settings file. Nothing is written unless all are valid."""
    if not path.exists():
        raise ConfigError(f"there is no file {path}", hint="`anytorch config save FILE` writes one")
    data = read_json(path) if path.suffix.lower() == ".json" else settings.read_settings_file(path)
    check_settings_file(data, path)
    chosen = {name: as_json(settings.parse_setting(name, value)) for name, value in data.get("settings", {}).items()}
    if "backend" in chosen:
        check_backend(settings.Value(chosen["backend"], "file"), str(path))
    return settings.write_settings_file({"settings": chosen, "tuned": data.get("tuned", {})})


def read_json(path: Path) -> dict[str, Any]:
    import json

    try:
        data = json.loads(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", hint="check its permissions") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is not valid JSON: {exc}", hint="`anytorch config save FILE` writes one") from exc
    if not isinstance(data, dict) or not all(isinstance(data.get(table, {}), dict) for table in ("settings", "tuned")):
        raise ConfigError(f"{path} is not a settings file: it needs the tables settings and tuned", hint="")
    return data
