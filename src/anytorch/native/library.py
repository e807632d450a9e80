"""Shared libraries: carried by the wheel, or built once per source, compiler and level in the cache folder.

    <cache>/native/<name>-<level>-<sources>-<compiler>.so       and beside it .so.sha256, its hash

What is damaged, or somebody else's, is not loaded but built again (`trust`). The library appears by one rename, so a reader
sees none or all of it; a lock file, which the system frees when its holder dies, keeps two processes from compiling the same
thing at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anytorch import logs, settings
from anytorch.errors import CompilerFailed, CompilerMissing
from anytorch.native import carried, precompiled, simd, trust
from anytorch.native.compiler import SHARED, Compiler, compile_library, find_compiler, only_builder

log = logs.logger(__name__)

SUFFIX = ".dll" if sys.platform == "win32" else ".so"
FOLDER = "native"  # of the cache
_loaded: dict[tuple[str, Path], ctypes.CDLL] = {}
_lock = threading.Lock()
_of_library: dict[tuple[str, tuple[Path, ...]], threading.Lock] = {}  # one builds, others of the same wait
# Builds of a process that cannot write the cache, by the path they would have there.
_private: dict[Path, tempfile.TemporaryDirectory[str]] = {}


@dataclass(frozen=True)
class _Wanted:
    """A library as its user names it."""

    name: str
    sources: tuple[Path, ...]
    level: str | None
    flags: tuple[str, ...]
    header: str | None


def load(
    name: str,
    sources: Sequence[Path],
    *,
    level: str | None = None,
    flags: Sequence[str] = (),
    header: str | None = None,
) -> ctypes.CDLL:
    """The library built from `sources` for a SIMD level (None: the best here): the wheel's, the cache's, or compiled now.

    Header files beside the sources, and ours in native/code, count as part of them. `header` is one of ours that every
    source includes first and that is worth precompiling, because many libraries are compiled with it. Calls through the
    library release the GIL. Functions meant to be called are marked `extern "C" __attribute__((visibility("default")))`;
    the caller sets `argtypes` and `restype`. Raises NativeUnavailable: CompilerMissing, or CompilerFailed when it was
    compiled and cannot be loaded either.

    >>> native.load("packed", [folder / "encoder.cpp"], level="avx2")
    """
    wanted = _Wanted(name, tuple(sources), level, tuple(flags), header)
    with _turn(wanted):
        path = _built(wanted)
        if (name, path) not in _loaded:
            _loaded[name, path] = _open(path, wanted)
        return _loaded[name, path]


def build(name: str, sources: Sequence[Path], *, level: str | None = None, flags: Sequence[str] = ()) -> Path:
    """Like `load`, without loading: the library's path."""
    wanted = _Wanted(name, tuple(sources), level, tuple(flags), None)
    with _turn(wanted):
        return _built(wanted)


def _turn(wanted: _Wanted) -> threading.Lock:
    with _lock:
        return _of_library.setdefault((wanted.name, wanted.sources), threading.Lock())


def _open(path: Path, wanted: _Wanted) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as unusable:
        # As it was built, but against a newer C library, on a machine that shares the cache; or carried by a wheel to a
        # system that it is not for.
        try:
            if carried.is_carried(path):
                carried.give_up(path, str(unusable))
            else:
                log.warning("the cached library %s cannot be loaded (%s); it is built again", path, unusable)
                path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_built(wanted)))
        except OSError as exc:
            raise CompilerFailed(
                f"the native library {wanted.name!r} was built and cannot be loaded: {exc}",
                hint="name another compiler with ANYTORCH_CXX",
                output=str(exc),
            ) from exc


def _built(wanted: _Wanted) -> Path:
    chosen = simd.level(wanted.level)
    flags = (*chosen.flags, *wanted.flags)
    stem = f"{wanted.name}-{chosen.name}-{carried.digest(wanted.sources, flags)}"
    if (found := carried.find(stem, SUFFIX)) is not None:
        return found
    cache = settings.cache_folder()
    # Two folders of one cache: the usual one, and this user's own where the usual one is somebody else's.
    folders = [cache / FOLDER, *([cache / f"{FOLDER}-{os.geteuid()}"] if hasattr(os, "geteuid") else [])]
    try:
        compiler = find_compiler()
    except CompilerMissing as missing:
        # What another day's compiler made still works.
        found, refused = _first_allowed(path for folder in folders for path in sorted(folder.glob(f"{stem}-*{SUFFIX}")))
        if found is not None:
            return found
        _tell(refused, "there is no compiler to build it again")
        raise CompilerMissing(f"cannot build {wanted.name!r}: {missing.message}", hint=missing.hint) from missing
    file = f"{stem}-{_short(compiler.identity)}{SUFFIX}"
    found, refused = _first_allowed(folder / file for folder in folders if (folder / file).exists())
    if found is not None:
        return found
    if (path := cache / FOLDER / file) in _private and (private := Path(_private[path].name) / file).exists():
        return private
    _tell(refused, "it is built again")
    return _build(wanted, compiler, chosen.name, flags, path)


def _first_allowed(paths: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The first library that may be loaded, or None; and why those before it may not."""
    refused: dict[Path, str] = {}
    for path in paths:
        why = trust.refusal(path)
        if not why:
            return path, refused
        refused[path] = why
    return None, refused


def _tell(refused: dict[Path, str], then: str) -> None:
    for path, why in refused.items():
        tell = log.info if why == trust.NO_HASH else log.warning
        tell("the cached library %s is not loaded (%s); %s", path, why, then)


def _build(wanted: _Wanted, compiler: Compiler, level: str, flags: tuple[str, ...], path: Path) -> Path:
    """The library, built now: in the folder of `path`, in this user's own, or for this process alone."""
    ready: tuple[str, ...] = ()  # flags that let the compiler read a header precompiled
    try:
        folder = trust.own_folder(path.parent.parent, FOLDER)
        path = folder / path.name
        if wanted.header is not None:
            digest = f"{carried.digest([SHARED / wanted.header], flags)}-{_short(compiler.identity)}"
            ready = precompiled.flags_of(wanted.header, f"{level}-{digest}", compiler, flags, folder)
        with only_builder(path.with_suffix(".lock")):
            if path.exists() and not trust.refusal(path):  # another process was faster
                return path
            _remove_left_overs(path)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as temporary:
                try:
                    _compile_to(wanted, compiler, (*ready, *flags), Path(temporary), path)
                except CompilerFailed as failed:
                    if not ready:
                        raise
                    _compile_to(wanted, compiler, flags, Path(temporary), path)
                    precompiled.give_up(compiler, ready, failed)
            trust.seal(path)
            return path
    except OSError as exc:
        # A read-only or full cache: the work can still be done, at the price of compiling in every process.
        private = tempfile.TemporaryDirectory(prefix="anytorch-native-", ignore_cleanup_errors=True)
        log.warning(
            "cannot keep the native library %s in %s (%s): it is compiled for this process alone; "
            "name a folder that can be written with ANYTORCH_CACHE_DIR",
            wanted.name,
            path.parent,
            exc.strerror or exc,
        )
        target = Path(private.name) / path.name
        _compile_to(wanted, compiler, flags, Path(private.name), target)
        _private[settings.cache_folder() / FOLDER / path.name] = private
        return target


def _compile_to(wanted: _Wanted, compiler: Compiler, flags: Sequence[str], folder: Path, target: Path) -> None:
    log.info("compiling the native library %s with %s", wanted.name, " ".join(compiler.command))
    made = folder / f"library{SUFFIX}"
    compile_library(compiler, wanted.sources, flags, made)
    trust.set_mode(made, trust.PRIVATE)
    with made.open("r+b") as file:  # Windows syncs only what is open for writing
        os.fsync(file.fileno())
    made.replace(target)


def _remove_left_overs(path: Path) -> None:
    """Folders of builders that were killed: whoever holds the lock is the only builder of this file."""
    for folder in path.parent.glob(f".{path.stem}.*"):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _processor() -> ctypes.CDLL:
    """What asks the processor for its features, where the system has no list of them."""
    return load("processor", [SHARED / "processor.cpp"], level="baseline")


simd.processor = _processor
