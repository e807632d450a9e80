"""Find the folder of a checkpoint from a path, a short name, "tiny", or a Hugging Face repository."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from anytorch.errors import ModelError
from anytorch.forecast.model.published import HUB, PUBLISHED, UNSAID_CONTEXT
from anytorch.forecast.model.tiny import TINY, tiny_folder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(
    source: str | Path,
    kind: str = "model",
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    force_download: bool = False,
) -> Path:
    """The folder with both files of a "model" or a "tokenizer", downloaded if it must be.

    Raises ModelError that says what is not there.
    """
    check_name(source, kind)
    folder = Path(source).expanduser()
    if folder.is_dir() and str(source).strip():  # an empty name would be the folder one is in
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
                raise ModelError(
                    f"{folder} has no {name}; it holds {there}",
                    hint="a Kronos folder is config.json and model.safetensors, as save_pretrained writes them",
                )
        return folder
    if str(source) == TINY and not folder.exists():
        return tiny_folder(kind)
    short = str(source).lower()
    # The short name of a model, asked for its tokenizer: that of the pair, as with "tiny".
    name = PUBLISHED[short].tokenizer if kind == "tokenizer" and short in PUBLISHED else HUB.get(short, str(source))
    if folder.exists() or not REPOSITORY.fullmatch(name):
        raise no_such(source, kind)
    return download(
        name,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        token=token,
        force_download=force_download,
    )


def check_name(source: Any, kind: str) -> None:
    """Raise ModelError for what cannot name a "model" or a "tokenizer"."""
    if not isinstance(source, (str, Path)):
        raise ModelError(
            f"a {kind} is named by a path or a text, not by a {type(source).__name__}",
            hint="give a folder, or a name such as NeoQuasar/Kronos-small",
        )


def no_such(source: str | Path, kind: str) -> ModelError:
    """The error for a name that is neither a folder nor a possible repository."""
    name, folder = str(source), Path(source).expanduser()
    known = [TINY, *(HUB if kind == "tokenizer" else PUBLISHED)]
    if kind == "tokenizer":
        known = [one for one in known if one not in PUBLISHED]
    if name.strip() and folder.exists():
        return ModelError(f"{name} is a file, and a {kind} is a folder", hint=f"name the folder of its {CONFIG}")
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return ModelError(
        f"unknown {kind} {name!r}: not a folder here, and not one of {', '.join(known)}",
        hint=(f"did you mean {near[0]!r}? Or " if near else "")
        + "name a folder, or a Hugging Face repository such as NeoQuasar/Kronos-small",
    )


def by_hand(name: str) -> str:
    """The commands that bring a repository, and what goes with it, to a machine that has no network."""
    pair = next((found for found in PUBLISHED.values() if found.model == name), None)
    names = [name] if pair is None else [pair.model, pair.tokenizer]
    folders = [one.rpartition("/")[2] for one in names]
    commands = " && ".join(f"hf download {one} --local-dir {there}" for one, there in zip(names, folders, strict=True))
    if pair is None:
        return f"{commands}; copy the folder {folders[0]} here, and name it instead of {name}"
    context = f" --context {pair.max_context}" if pair.max_context != UNSAID_CONTEXT else ""
    use = f"--model {folders[0]} --tokenizer {folders[1]}{context}"
    return f"{commands}; copy both folders here, and use {use} (in Python the first two arguments of load_predictor)"


def download(name: str, **options: Any) -> Path:
    """`options` are those of huggingface_hub's snapshot_download."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"{name!r} is not a folder here, and downloading it from Hugging Face needs {exc.name}",
            hint="pip install 'anytorch[forecast]', or give a folder",
        ) from exc
    try:
        folder = snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **options)
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"{name!r} is not a folder, was not downloaded before, and Hugging Face cannot be reached",
            hint=f"on a machine with a network: {by_hand(name)}",
        ) from exc
    except (HFValidationError, OSError) as exc:  # every refusal of the hub is an OSError: no such name, no access, …
        raise ModelError(f"{name!r} cannot be read from Hugging Face: {str(exc).splitlines()[0]}") from exc
    for file in (CONFIG, WEIGHTS):
        if not (Path(folder) / file).is_file():
            raise ModelError(f"the repository {name!r} has no {file}", hint="is it a Kronos checkpoint?")
    return Path(folder)
