"""Turn names into models to load: those of the command line, and the one a client's id means."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from anytorch.errors import ModelError, UsageError
from anytorch.serve.folders import Found, job_of, require
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
