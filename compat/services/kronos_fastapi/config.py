"""What the service serves and to whom, from the environment and from arguments. Arguments win.

KRONOS_MODEL          a published name (kronos-small), a folder or a hub id        --model       default: tiny
KRONOS_TOKENIZER      the tokenizer, where the model's folder does not say it      --tokenizer
KRONOS_MODEL_FOLDER   folders that /api/load-model may load from (`:` between)     --model-folder, may be repeated
KRONOS_DATA_FOLDER    folder of the candles that /api/data-files lists             --data-folder
KRONOS_DEVICE         auto, cpu, cuda, cuda:1, mps, …                              --device
KRONOS_HOST           address; anything but this machine needs a key               --host        default: 127.0.0.1
KRONOS_PORT           port                                                         --port        default: 8000
KRONOS_API_KEY_FILE   API keys, one per line (also ANYTORCH_API_KEY_FILE)          --api-key-file
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anytorch import limits, settings
from anytorch.errors import UsageError
from anytorch.serve.options import ServeOptions

EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class KronosOptions:
    serve: ServeOptions
    data_folder: Path | None


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> KronosOptions:
    """The options of a start. Raises UsageError for what cannot work, such as an open address without a key."""
    named = {name: environment.get(f"KRONOS_{name.upper()}") or None for name in NAMES}
    parser = argparse.ArgumentParser(prog="kronos_fastapi", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=named["model"] or "tiny")
    parser.add_argument("--tokenizer", default=named["tokenizer"])
    parser.add_argument("--model-folder", action="append", type=Path)
    parser.add_argument("--data-folder", type=Path, default=named["data_folder"])
    parser.add_argument("--device", default="auto")  # KRONOS_DEVICE is one of anytorch's own settings
    parser.add_argument("--host", default=named["host"])
    parser.add_argument("--port", default=named["port"] or "8000")
    parser.add_argument("--api-key-file", default=named["api_key_file"] or settings.get("api_key_file"))
    given = parser.parse_args(list(arguments))
    folders = given.model_folder or [Path(one) for one in (named["model_folder"] or "").split(os.pathsep) if one]
    folders = [folder.expanduser() for folder in folders]
    keys = Path(given.api_key_file).expanduser() if given.api_key_file else None
    try:
        port = int(limits.PORT.parse(given.port))
    except ValueError as exc:
        raise UsageError(f"--port (KRONOS_PORT) {exc}") from exc
    data = Path(given.data_folder).expanduser() if given.data_folder else None
    if data is not None and not data.is_dir():
        raise UsageError(f"KRONOS_DATA_FOLDER={data}: there is no such folder")
    options = ServeOptions(
        models=(found_in(folders, given.model),),
        tokenizer=given.tokenizer,
        model_folders=tuple(folders),
        device=given.device,
        # Under uvicorn its own --host says where it listens; this one says which names the service answers to.
        host=given.host or (EVERYWHERE if keys else "127.0.0.1"),
        port=port,
        api_key_file=keys,
    )
    options.require_safe()
    return KronosOptions(options, data)


NAMES = ("model", "tokenizer", "model_folder", "data_folder", "host", "port", "api_key_file")


def found_in(folders: Sequence[Path], name: str) -> str:
    """A model's folder below one of the model folders, if one has its name; else the name, as the hub knows it."""
    short = name.rpartition("/")[2].lower()
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.lower() == short and (path / "config.json").is_file():
                return str(path)
    return name
