"""Check the devices and files a command line names, and the cache, before anything is measured or written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from anytorch.cache import Store
from anytorch.devices.choose import resolve
from anytorch.errors import UsageError


def named_device(text: str, option: str) -> str:
    """The device as it was typed. In code an empty request means "auto"; on a command line it is `"$UNSET"`."""
    if not text.strip():
        raise UsageError(f"{option} is empty", hint="name a device, or auto for the best one")
    return text


def usable_device(text: str, option: str) -> str:
    """A device that can be used here. Raises DeviceUnavailable with the reasons, where code would fall back.

    What is measured is believed and stored: a number of the CPU under the name of a GPU would do harm.
    """
    resolve(named_device(text, option), strict=True)
    return text


def usable_devices(texts: Iterable[str], option: str) -> list[str]:
    return [usable_device(text, option) for text in texts]


def new_file(text: str, option: str, *, source: str | None = None) -> Path:
    """The path of a file that can be written, checked by writing one beside it before long work starts.

    Raises UsageError if its folder does not exist (a typing mistake, more often than not), if nothing can be written there,
    and if it is `source`, the file that is to be read ("-": standard input), by whatever name.
    """
    path = Path(text)
    if not text.strip():
        raise UsageError(f"{option} is empty", hint="name a file")
    in_the_way = next((one for one in path.parents if one.exists()), path.parent)
    if in_the_way.is_file():
        raise UsageError(f"{option} {text}: {in_the_way} is a file, and a folder is needed", hint="name another place")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {text}: there is no folder {path.parent}", hint=f"mkdir -p '{path.parent}'")
    if path.is_dir():
        raise UsageError(f"{option} {text}: that is a folder", hint="name a file in it")
    if source is not None and is_same_file(source, path):
        raise UsageError(
            f"{option} {text}: that is the input file, and it would be overwritten", hint="name another file"
        )
    try_writing(path.parent, path.name, f"{option} {text}: nothing can be written there")
    return path


def new_folder(text: str, option: str) -> Path:
    """The path of a folder that can be written or created. Creates nothing; raises UsageError."""
    if not text.strip():
        raise UsageError(f"{option} is empty", hint="name a folder")
    path = Path(text)
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not there.is_dir():
        what = "that is a file" if there == path else f"{there} is a file"
        raise UsageError(f"{option} {text}: {what}, and a folder is needed", hint="name another folder")
    try_writing(there, path.name, f"{option} {text}: nothing can be written there")
    return path


def is_same_file(source: str, target: Path) -> bool:
    """True if both paths name one file, also through links; False if either cannot be read."""
    try:
        return os.path.samestat(os.fstat(0) if source == "-" else Path(source).stat(), target.stat())
    except (OSError, ValueError):
        return False


def try_writing(folder: Path, name: str, words: str) -> None:
    """Make a file with a temporary name in the folder, as `files.replacing` will, and remove it."""
    from tempfile import mkstemp

    try:
        handle, made = mkstemp(dir=folder, prefix=f".{name}.")
    except OSError as exc:
        raise UsageError(f"{words}: {exc.strerror}", hint="name another place") from exc
    os.close(handle)
    Path(made).unlink()


def check_cache() -> None:
    """Raise CacheError if what was found before cannot be read.

    Said before minutes are spent, since what is found now could not be stored either; the file is left as it was.
    """
    Store("devices").entries()
