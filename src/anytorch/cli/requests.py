"""What a command line names, devices and files, checked before anything is measured or written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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


def new_file(text: str, option: str) -> Path:
    """A file that can be written. Raises UsageError if its folder does not exist: a typing mistake, more often than not."""
    path = Path(text)
    if not text.strip():
        raise UsageError(f"{option} is empty", hint="name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {text}: there is no folder {path.parent}", hint=f"mkdir -p '{path.parent}'")
    if path.is_dir():
        raise UsageError(f"{option} {text}: that is a folder", hint="name a file in it")
    return path
