"""Which models the service may load: those in the configured folders, by their id. A client's text never becomes a path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytorch import logs
from anytorch.errors import ModelError

log = logs.logger(__name__)

DEEPEST = 3  # folders below a model folder that are looked into
MOST = 1000  # models listed
CONFIG_NBYTES = 2**20
# Formats whose files are programs: reading one runs what is in it.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Found:
    """A model folder on this disk."""

    id: str
    job: str
    path: Path
    refused: str = ""  # why it may not be loaded; "" when it may


def list_models(folders: Sequence[Path]) -> dict[str, Found]:
    """Every model folder below the configured ones, by id (its path below the folder)."""
    found: dict[str, Found] = {}
    for folder in folders:
        root = folder.resolve()
        for path in _folders(root, DEEPEST):
            job = job_of(path)
            if job is not None and len(found) < MOST:
                name = path.relative_to(root).as_posix() if path != root else root.name
                found.setdefault(name, Found(name, job, path, refusal(path, root)))
    return found


def _folders(path: Path, depth: int) -> Iterator[Path]:
    try:
        if (path / "config.json").is_file():
            yield path
            return  # what lies inside a model is part of it
        inside = sorted(child for child in path.iterdir() if child.is_dir()) if depth else []
    except OSError as exc:
        log.info("%s is skipped: %s", path, exc)
        return
    for child in inside:
        yield from _folders(child, depth - 1)


def job_of(path: Path) -> str | None:
    """The job of a model folder by its config.json; None if unknown."""
    config = read_config(path)
    if config is None:
        return None
    if "s1_bits" in config:
        return "forecast" if "n_layers" in config else None  # the tokenizer of a forecasting model is not one itself
    names = config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names) and not (path / "modules.json").is_file():
        return "text"
    return "embeddings" if "model_type" in config else None


def read_config(path: Path) -> dict[str, Any] | None:
    file = path / "config.json"
    try:
        if file.stat().st_size > CONFIG_NBYTES:
            return None
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def refusal(path: Path, root: Path) -> str:
    """The reason a folder may not be loaded, or "": a link out of the configured folder, or pickled weights."""
    if not path.resolve().is_relative_to(root):
        return "it is a link that leads out of the model folder"
    weights, pickles = False, []
    for file in path.rglob("*"):
        if not file.resolve().is_relative_to(root):
            return f"{file.name} is a link that leads out of the model folder"
        weights = weights or file.suffix == ".safetensors"
        if file.suffix in PICKLES:
            pickles.append(file.name)
    if weights:
        return ""
    if pickles:
        return f"its weights are a pickle ({pickles[0]}), which can run any code; only safetensors are loaded"
    return "it has no .safetensors file"


def require(found: Found) -> Path:
    if found.refused:
        raise ModelError(
            f"{found.id} is not loaded: {found.refused}", hint="put a safetensors copy into the model folder"
        )
    return found.path
