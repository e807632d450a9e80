"""Libraries that a wheel carries: compiled when the wheel was built, so that nothing is compiled on the user's machine.

    anytorch/native/built/linux-x86_64/packed-avx512-<sources>.so        and beside them manifest.json: their hashes

A carried library is loaded when it was compiled from the very sources, flags and level that are asked for; an edited source,
or a level that the wheel has not, is compiled on first use as in a clone, which carries nothing. The hash finds damage (a
full disk, a broken copy) before it ends the process. Who owns the file does not matter here, other than in the cache
(`trust`): whoever can write to the package's folder can change its Python code as well.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from anytorch import logs, settings
from anytorch.native.compiler import FLAGS, SHARED

log = logs.logger(__name__)

PACKAGE = Path(__file__).parent.parent
BUILT = Path(__file__).parent / "built"  # only in wheels
MANIFEST = "manifest.json"
HEADERS = (".h", ".hpp", ".inc")
_whole: set[Path] = set()  # compared with their hashes by this process
_unusable: set[Path] = set()  # damaged, or refused by this system's loader: said once


@dataclass(frozen=True)
class Fixed:
    """A library whose sources do not change while anytorch runs, as its caller asks for it. Paths are below anytorch/."""

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    levels: tuple[str, ...] | None = None  # None: every level that the platform is asked for

    def paths(self, package: Path = PACKAGE) -> tuple[Path, ...]:
        return tuple(package / source for source in self.sources)


# Every call of `native.load` but the generated kernels', which no wheel can foresee. A test compares this with the calls.
LIBRARIES = (
    Fixed("packed", ("text/packed/code/encoder.cpp",)),
    Fixed("packed-graph", ("text/packed/code/graph.cpp",)),
    Fixed("wordpiece", ("text/encoders/wordpiece/wordpiece.cpp",)),
    Fixed("decode", ("text/persistent/code/decode.cpp",)),
    Fixed("quant", ("quant/cpp/linear.cpp",)),
    Fixed("adam", ("memory/code/adam.cpp",), flags=("-ffp-contract=off",)),
    Fixed("uniform", ("forecast/decoding/uniform.cpp",)),
    Fixed("moves", ("recorded/moves/moves.cpp",)),
    Fixed("tape", ("gpu/code/tape.cpp",)),
    Fixed("launcher", ("gpu/code/launcher/launcher.cpp",), levels=("baseline",)),
    Fixed("vulkan-layer", ("gpu/code/vulkan_layer.cpp",), levels=("baseline",)),
    Fixed("crc32", ("native/code/crc32.cpp",), levels=("baseline",)),
    Fixed("processor", ("native/code/processor.cpp",), levels=("baseline",)),
    Fixed("graph-pool", ("graph/emit/code/pool.cpp",), levels=("baseline",)),
)


def digest(sources: Sequence[Path], flags: Sequence[str], *, system: str = "", machine: str = "") -> str:
    """What a library depends on, as 16 characters: its sources, the headers it may include, its flags and the platform.

    `system` is Python's sys.platform and `machine` its platform.machine() there; those of this machine when empty.
    """
    if not sources:
        raise ValueError("a native library needs at least one source file")
    folders = {SHARED, *(source.parent for source in sources)}
    headers = {one for folder in folders for one in folder.iterdir() if one.suffix in HEADERS}
    parts = [machine or platform.machine(), system or sys.platform, *FLAGS, *flags]
    found = hashlib.sha256("\0".join(parts).encode())
    for path in [*sources, *sorted(headers)]:
        found.update(f"\0{path.name}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def folder_of(system: str, machine: str) -> str:
    """The name of a platform's folder: ("linux", "x86_64") → "linux-x86_64"."""
    return f"{system}-{machine.lower()}"


def find(stem: str, suffix: str) -> Path | None:
    """The carried library `<name>-<level>-<digest>`, whole; None if this installation has none that can be used."""
    hashes = _manifest(BUILT / folder_of(sys.platform, platform.machine()))
    path = BUILT / folder_of(sys.platform, platform.machine()) / f"{stem}{suffix}"
    if path.name not in hashes or path in _unusable or not settings.get("carried_kernels"):
        return None
    if path in _whole:
        return path
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() == hashes[path.name]:
            _whole.add(path)
            return path
        give_up(path, "it was changed after it was built")
    except OSError as exc:
        give_up(path, f"it cannot be read: {exc.strerror}")
    return None


def give_up(path: Path, why: str) -> None:
    """Do not use a carried library in this process any more: from now on it is compiled, where there is a compiler."""
    log.warning("%s, which came with anytorch, is not loaded (%s); install anytorch again", path, why)
    _unusable.add(path)


def is_carried(path: Path) -> bool:
    return path.is_relative_to(BUILT)


def description() -> dict[str, Any] | None:
    """What this installation carries, for people: the folder, how many libraries, their levels; None if nothing."""
    folder = BUILT / folder_of(sys.platform, platform.machine())
    if not (hashes := _manifest(folder)):
        return None
    levels = sorted({name.rsplit("-", 2)[1] for name in hashes})
    return {"folder": str(folder), "libraries": len(hashes), "levels": levels}


@lru_cache(maxsize=8)
def _manifest(folder: Path) -> dict[str, str]:
    """The hashes by file name; {} where there is no manifest."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        return {str(name): str(value) for name, value in document["sha256"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        log.warning("%s cannot be read (%s): kernels are compiled on first use", folder / MANIFEST, exc)
        return {}
