"""Services of the ComfyUI server for its nodes, with defaults outside of it; the server is never imported."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anytorch.errors import InputError

HASHED_WHOLE_NBYTES = 256 * 2**20  # of a larger file, size and time must do


def lent(name: str) -> Any:
    """A module of the running ComfyUI, or None. (`import comfy` could find somebody else's package of that name.)"""
    return sys.modules.get(name)


def work_device() -> torch.device | None:
    """The device ComfyUI computes on (it knows --cpu and --cuda-device); None where there is no ComfyUI."""
    management = lent("comfy.model_management")
    return management.get_torch_device() if management is not None else None


def rest_device() -> torch.device:
    """Where values lie between nodes: the CPU, unless ComfyUI was started with --gpu-only."""
    management = lent("comfy.model_management")
    found: torch.device = management.intermediate_device() if management is not None else torch.device("cpu")
    return found


def make_room(nbytes: int, device: torch.device) -> None:
    """Let ComfyUI unload models of its own until `nbytes` are free on its device. Elsewhere it has nothing to unload."""
    management = lent("comfy.model_management")
    if management is not None and device == management.get_torch_device():
        management.free_memory(nbytes, device)


def unload_models() -> None:
    management = lent("comfy.model_management")
    if management is not None:
        management.unload_all_models()
        management.soft_empty_cache()


class Progress:
    """The bar on the node. Moving it is also where ComfyUI stops a node whose run was cancelled."""

    def __init__(self, total: int) -> None:
        utils = lent("comfy.utils")
        self.bar = utils.ProgressBar(total) if utils is not None else None

    def at(self, done: int, total: int | None = None) -> None:
        if self.bar is not None:
            self.bar.update_absolute(done, total)


# --- files -----------------------------------------------------------------------------------------------------------


def folder(kind: str) -> Path:
    """ComfyUI's "input", "output" or "models" folder; without ComfyUI, the one of that name in the working folder."""
    paths = lent("folder_paths")
    if paths is None:
        return Path.cwd() / kind
    if kind == "models":
        return Path(paths.models_dir)
    return Path(paths.get_input_directory() if kind == "input" else paths.get_output_directory())


LONGEST_NAME_NBYTES = 240  # of 255 that file systems have; a number is put behind it


def inside(root: Path, name: str, what: str) -> Path:
    """`root / name`, refused if that is not the name of a file below `root`: workflows come from strangers.

    Links are followed: whoever put one into these folders owns them, a workflow cannot make any.
    """
    path = Path(os.path.normpath(root / name))
    is_below = path.is_relative_to(os.path.normpath(root)) and path != Path(os.path.normpath(root))
    if not is_below or not name.strip() or "\0" in name or ".." in Path(name).parts or name.endswith(("/", os.sep)):
        raise InputError(f"{what} {name!r} is not a path inside {root}", hint="write a relative path without '..'")
    if len(os.fsencode(path.name)) > LONGEST_NAME_NBYTES:
        raise InputError(f"{what} {name[:40]!r}… is longer than a file's name can be")
    return path


def file_refusal(find: Callable[[str], Path], name: str, home: Path) -> str:
    """Why the file that `find` makes of a name cannot be used; "" if it is there. For VALIDATE_INPUTS."""
    try:
        return "" if find(name).is_file() else f"{name} does not exist; put it into {home}"
    except InputError as exc:
        return exc.message


def fingerprint(path: Path) -> str:
    """Text that changes when the file or folder does, for IS_CHANGED; "missing" if there is none."""
    if path.is_dir():
        parts = [f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in sorted(path.iterdir()) if p.is_file()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if not path.is_file():
        return "missing"
    about = path.stat()
    if about.st_size > HASHED_WHOLE_NBYTES:
        return f"{about.st_size}:{about.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
