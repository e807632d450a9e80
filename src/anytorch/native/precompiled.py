"""Precompiled headers: what every generated kernel includes first, parsed once per machine instead of once per kernel.

    <cache>/native/lanes-<level>-<header, flags>-<compiler>/lanes.h.gch       and beside it its hash

`immintrin.h` alone is 0.3 s of a small kernel's 0.45 s; with the header precompiled such a kernel takes 0.07 s. GCC finds
the file by its name in a folder that is searched before the header's own, and reads the header itself where the file does
not fit. Clang would fail there, so its files are not kept.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anytorch import logs
from anytorch.errors import NativeUnavailable
from anytorch.native import trust
from anytorch.native.compiler import SHARED, Compiler, compile_header, only_builder

log = logs.logger(__name__)

OF_GCC = b"gpch"  # how a precompiled header of GCC begins
_without: set[tuple[str, tuple[str, ...]]] = set()  # compilers and flags that it did not work with: not tried again


def flags_of(header: str, version: str, compiler: Compiler, flags: Sequence[str], native: Path) -> tuple[str, ...]:
    """What lets the compiler read `header` (one of native/code) precompiled, making that if need be; () where it cannot.

    `version` begins with the SIMD level and changes with the header, the flags and the compiler; `native` is the folder of
    libraries to keep it in.
    """
    folder = native / f"{Path(header).stem}-{version}"
    found = (f"-I{folder}",)
    if (compiler.identity, found) in _without:
        return ()
    try:
        made = folder / f"{header}.gch"
        if not made.exists() or trust.refusal(made):
            _make(made, compiler, flags, native)
    except (OSError, NativeUnavailable) as exc:
        give_up(compiler, found, exc)
        return ()
    return found


def give_up(compiler: Compiler, found: tuple[str, ...], why: Exception) -> None:
    """Compile without it from now on: it cannot be made, or a source that compiles without it does not with it."""
    log.info("a header is not precompiled (%s): kernels compile more slowly", why)
    _without.add((compiler.identity, found))


def _make(made: Path, compiler: Compiler, flags: Sequence[str], native: Path) -> None:
    folder = trust.own_folder(native, made.parent.name)
    if folder != made.parent:
        raise PermissionError(1, f"{made.parent} belongs to another user")
    with only_builder(native / f"{folder.name}.lock"):
        if made.exists() and not trust.refusal(made):  # another process was faster
            return
        log.info("precompiling %s with %s", made.stem, " ".join(compiler.command))
        for left in folder.glob(".making.*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making.") as temporary:
            new = Path(temporary) / made.name
            compile_header(compiler, SHARED / made.stem, flags, new)
            with new.open("rb") as file:
                if file.read(len(OF_GCC)) != OF_GCC:
                    raise OSError("this compiler's precompiled headers are not GCC's")
            trust.set_mode(new, trust.PRIVATE & 0o666)
            new.replace(made)
        trust.seal(made)
        _remove_older(folder, native)


def _remove_older(folder: Path, native: Path) -> None:
    """Those of other versions of the header: 40 MB each. Who still compiles with one reads the header itself."""
    name, level, *_ = folder.name.split("-")
    for other in native.glob(f"{name}-{level}-*"):
        if other.is_dir() and other != folder:
            shutil.rmtree(other, ignore_errors=True)
