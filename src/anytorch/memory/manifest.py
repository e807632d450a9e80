"""What a folder of files was written with: the size and CRC-32 of each, in a file that has a sum of its own.

write_manifest(folder)          # once all other files are there
problem_of(folder, read)        # "" if every byte is as it was written; else what is wrong, in words
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anytorch.files import NOT_THERE, parse_json, replace_file
from anytorch.native.sums import crc32, file_crc32
from anytorch.workers import Workers

MANIFEST = "sums.json"
FORMAT = 1
THREADS = 4
Sum = tuple[int, int]  # bytes, CRC-32


def write_manifest(folder: Path, known: Mapping[Path, Sum] | None = None) -> None:
    """Write the sums of all files below a folder; `known` are those that were added up while they were written."""
    known = known or {}
    files = {
        path.relative_to(folder).as_posix(): known.get(path) or file_crc32(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    entries = {name: [nbytes, f"{value:08x}"] for name, (nbytes, value) in files.items()}
    body = {"format": FORMAT, "files": entries, "crc32": f"{_sum_of(entries):08x}"}
    replace_file(folder / MANIFEST, json.dumps(body, indent=1).encode())


def problem_of(folder: Path, read: Iterable[str] = ()) -> str:
    """What is wrong with a folder, in words; "" if all its files are as they were written.

    `read` names the files that its reader opens wherever they are there: one of those that was added later is wrong, too.
    What else lies there (a copied config.json, a system's hidden files) is never read, and does no harm. Raises OSError
    where a file is there and cannot be read now: that is no damage, and may pass.
    """
    try:
        body = parse_json((folder / MANIFEST).read_bytes())
        entries: dict[str, Any] = body["files"]
        if body["format"] != FORMAT or body["crc32"] != f"{_sum_of(entries):08x}":
            return f"{MANIFEST} was changed after it was written"
        wanted = {folder / name: (int(nbytes), int(value, 16)) for name, (nbytes, value) in entries.items()}
    except NOT_THERE as exc:
        return f"{MANIFEST} cannot be read: {exc.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        return f"{MANIFEST} is damaged ({exc!r})"
    more = [name for name in read if name not in entries and (folder / name).exists()]
    if more:
        return f"{more[0]} is not listed in {MANIFEST}"
    with Workers(min(THREADS, max(1, len(wanted))), "anytorch-sums") as pool:
        found = pool.map(lambda path: _problem_of_file(path, wanted[path]), wanted)
        return next((f"{path.relative_to(folder)} {why}" for path, why in zip(wanted, found, strict=True) if why), "")


def _problem_of_file(path: Path, wanted: Sum) -> str:
    try:
        if (there := path.stat().st_size) != wanted[0]:
            return f"has {there} bytes, not {wanted[0]}"
        return "" if file_crc32(path) == wanted else "is damaged: its checksum is not the one it was written with"
    except NOT_THERE as exc:
        return f"cannot be read: {exc.strerror}"


def _sum_of(entries: Mapping[str, Any]) -> int:
    return crc32(json.dumps(entries, sort_keys=True).encode())
