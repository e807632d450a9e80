"""From what names a checkpoint to the folder it lies in: a path, a short name, "tiny", or a Hugging Face repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anytorch.errors import ModelError
from anytorch.models.kronos.published import HUB
from anytorch.models.kronos.tiny import TINY, tiny_folder

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
    if not isinstance(source, (str, Path)):
        raise ModelError(
            f"a {kind} is named by a path or a text, not by a {type(source).__name__}",
            hint="give a folder, or a name such as NeoQuasar/Kronos-small",
        )
    folder = Path(source).expanduser()
    if folder.is_dir():
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
    name = HUB.get(str(source).lower(), str(source))
    if folder.exists() or not REPOSITORY.fullmatch(name):
        known = ", ".join([TINY, *HUB])
        raise ModelError(
            f"{str(source)!r} is neither a folder nor the name of a Hugging Face repository",
            hint=f"give a folder, an id such as NeoQuasar/Kronos-small, or one of: {known}",
        )
    return download(
        name,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        token=token,
        force_download=force_download,
    )


def download(name: str, **options: Any) -> Path:
    """`options` are those of huggingface_hub's snapshot_download."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"{name!r} is no folder here, and reading it from Hugging Face needs {exc.name}",
            hint="pip install 'anytorch[forecast]', or give a folder",
        ) from exc
    try:
        folder = snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **options)
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"{name!r} is neither a folder, nor downloaded earlier, and Hugging Face cannot be asked now",
            hint=f"on a machine with a network: huggingface-cli download {name}; then copy the folder here and name it",
        ) from exc
    except (HFValidationError, OSError) as exc:  # every refusal of the hub is an OSError: no such name, no access, …
        raise ModelError(f"{name!r} cannot be read from Hugging Face: {str(exc).splitlines()[0]}") from exc
    for file in (CONFIG, WEIGHTS):
        if not (Path(folder) / file).is_file():
            raise ModelError(f"the repository {name!r} has no {file}", hint="is it a Kronos checkpoint?")
    return Path(folder)
