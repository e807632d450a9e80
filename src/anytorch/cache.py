"""The one cache for results that are slow to find: JSON files, replaced atomically, checked when read, safe to delete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anytorch import settings
from anytorch.errors import CacheError
from anytorch.files import replace_file


class Store:
    """A small JSON dictionary on disk, `{"format": 1, "entries": {key: value}}`.

    A file that cannot be understood raises CacheError and is left as it was: it may hold hours of measurements.
    """

    FORMAT = 1

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.path = (settings.cache_folder() if folder is None else folder) / f"{name}.json"

    def entries(self) -> dict[str, Any]:
        hint = f"delete {self.path}, or run `anytorch reset --cache`"
        try:
            data = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise CacheError(f"cannot read the cache {self.path}: {exc.strerror}", hint=hint) from exc
        except (ValueError, RecursionError) as exc:
            raise CacheError(f"the cache {self.path} is damaged: {exc}", hint=hint) from exc
        if not isinstance(data, dict) or not isinstance(data.get("entries"), dict):
            raise CacheError(f"the cache {self.path} has no 'entries'", hint=hint)
        if data.get("format") != self.FORMAT:
            raise CacheError(f"the cache {self.path} has format {data.get('format')!r}, not {self.FORMAT}", hint=hint)
        entries: dict[str, Any] = data["entries"]
        return entries

    def get(self, key: str) -> Any | None:
        return self.entries().get(key)

    def put(self, key: str, value: Any, *, keep: int = 64) -> None:
        """Store one entry; beyond `keep`, the oldest go. Raises CacheError when the folder cannot be written."""
        entries = self.entries()
        entries.pop(key, None)
        entries[key] = value
        while len(entries) > keep:
            del entries[next(iter(entries))]
        body = json.dumps({"format": self.FORMAT, "entries": entries}, indent=1)
        try:
            replace_file(self.path, body.encode())
        except OSError as exc:
            raise CacheError(
                f"cannot write the cache {self.path}: {exc.strerror}",
                hint="name another folder with ANYTORCH_CACHE_DIR",
            ) from exc

    def clear(self) -> bool:
        existed = self.path.exists()
        self.path.unlink(missing_ok=True)
        return existed
