"""Which models the service may load: those of the command line, and those of the configured folders by their id.

A client's text never becomes a path.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytorch import logs
from anytorch.errors import ModelError, UsageError
from anytorch.serve.loaders import Wanted
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.text.checkpoints.locate import DEFAULT_MODEL, find_model

EMBEDDED = {"embeddings": DEFAULT_MODEL.partition("/")[2], "forecast": "tiny"}


def first_models(options: ServeOptions) -> list[Wanted]:
    """The models to load at start: those named, else the built-in ones. Raises ModelError for an invalid one."""
    wanted: list[Wanted] = []
    for name in options.models:
        wanted.append(_named(name, options))
    if options.text_model is not None:
        wanted.append(Wanted(Path(options.text_model).name, "text", _folder(options.text_model), options.device))
    jobs = {one.job for one in wanted}
    if "embeddings" not in jobs and not (jobs - {"text"}):
        wanted.append(Wanted(EMBEDDED["embeddings"], "embeddings", None, options.device, options.quantization))
    if "forecast" not in jobs and options.forecast:
        wanted.append(Wanted(EMBEDDED["forecast"], "forecast", None, options.device))
    return wanted


def _named(name: str, options: ServeOptions) -> Wanted:
    if name in (EMBEDDED["embeddings"], DEFAULT_MODEL):
        return Wanted(EMBEDDED["embeddings"], "embeddings", None, options.device, options.quantization)
    if name == EMBEDDED["forecast"] or name.lower().startswith("kronos-"):
        return Wanted(name.lower(), "forecast", None if name == EMBEDDED["forecast"] else name, options.device)
    path, title = Path(name).expanduser(), name.rpartition("/")[2]
    if path.is_dir():
        title = path.resolve().name
    else:
        path = find_model(name)  # of the Hugging Face Hub; says what to do where there is none
    job = job_of(path)
    if job is None:
        raise ModelError(f"{path}: its config.json does not say what it is", hint="name a model's folder")
    return Wanted(title, job, path, options.device, options.quantization if job == "embeddings" else None)


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UsageError(f"--text-model {name}: there is no such folder")
    return path


def wanted_by(name: str, job: str | None, first: Sequence[Wanted], known: Mapping[str, Found]) -> Wanted:
    """The model a client's id means: an embedded one, one of the command line (`first`), or one of the model folders.

    Raises a 404 Problem where there is none, ModelError for one that may not be loaded.
    """
    for kind, embedded in EMBEDDED.items():
        if name == embedded and job in (None, kind):
            return Wanted(embedded, kind, None)
    for wanted in first:
        if name == wanted.id and job in (None, wanted.job):
            return wanted
    found = known.get(name)
    if found is None:
        near = difflib.get_close_matches(name, known, n=1)
        raise Problem(
            404, "model-not-found", "Unknown model",
            f"{name[:200]!r} is not in the model folders",
            hint=f"did you mean {near[0]!r}?" if near else "GET /api/models lists what can be loaded; "
            "folders are named with --model-folder",
            param="model",
        )  # fmt: skip
    if job not in (None, found.job):
        raise Problem(
            404, "wrong-job", "The model is for another job",
            f"{name[:200]!r} is a model for {found.job}, not for {job}",
            hint="leave `job` out: the model's files say what it is for", param="job",
        )  # fmt: skip
    return Wanted(found.id, found.job, require(found))


# --- the models of the configured folders, by their id ----------------------------------------------------------------


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
