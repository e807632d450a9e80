"""`anytorch reset`: remove settings or cached measurements; works on unreadable files, too."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from anytorch import settings
from anytorch.cache import Store
from anytorch.cli.output import Output
from anytorch.errors import CacheError, ConfigError
from anytorch.measured import store as measured

RETIRED = ("batches",)  # that earlier versions wrote
STORES = ("devices", "tiers", "bandwidth")  # every Store of this package; a test compares the list with the source


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", action="store_true", help="remove cached measurements instead of the settings")
    parser.add_argument("--all", action="store_true", help="remove both")


def run(options: argparse.Namespace, output: Output) -> int:
    kept = put_aside(settings.settings_file()) if options.all or not options.cache else None
    removed = forget_all() if options.all or options.cache else []
    lines = [f"settings removed; a copy is {kept}"] if kept else []
    lines += [f"removed {path}" for path in removed]
    document = {"settings_kept_as": str(kept) if kept else None, "removed": [str(path) for path in removed]}
    output.answer(document, *(lines or ["there was nothing to remove"]))
    return 0


def put_aside(path: Path) -> Path | None:
    """Rename the settings file to the first free of config.toml.bak, .bak1, …; None if there is no file."""
    if not os.path.lexists(path):
        return None
    copies = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000))
    copy = next((candidate for candidate in copies if not os.path.lexists(candidate)), None)
    if copy is None:
        raise ConfigError(f"there are 1000 copies of {path} already", hint="delete some of them")
    try:
        path.rename(copy)
    except OSError as exc:
        raise ConfigError(f"cannot rename {path}: {exc.strerror}", hint="check the folder's permissions") from exc
    return copy


def forget_all() -> list[Path]:
    """Remove what was found out and measured; the files and folders that are gone. Raises CacheError."""
    from anytorch.graph import records

    removed: list[Path] = []
    folders = settings.cache_folder() / "folders"  # the indexes of folders that were searched
    forgetting: list[tuple[Path, Callable[[], object]]] = [
        *((store.path, store.clear) for store in map(Store, (*STORES, *RETIRED))),
        (records.folder(), lambda: records.clear()[0]),
        (measured.folder(), measured.clear),
        (folders, lambda: removed_folder(folders)),
    ]
    for path, clear in forgetting:
        try:
            removed += [path] if clear() else []
        except OSError as exc:
            raise CacheError(f"cannot remove the cache {path}: {exc.strerror}", hint="remove it by hand") from exc
    return removed


def removed_folder(path: Path) -> bool:
    """Remove a folder with all that is in it; False if there was none."""
    if not path.exists():
        return False
    shutil.rmtree(path)
    return True
