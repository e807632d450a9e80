"""Which files a sharded checkpoint has. Needs neither torch nor NumPy: `text.checkpoints` reads them, too."""

from __future__ import annotations

import json
from pathlib import Path

from anytorch.errors import ModelError

INDEX = "model.safetensors.index.json"


def shard_files(index: Path) -> list[Path]:
    """The files that an index of shards names, sorted; every one is beside it and exists. Raises ModelError else."""
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted({index.parent / str(name) for name in names})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
        raise ModelError(f"{index}: cannot be read as an index of shards: {exc}", hint="fetch it again") from exc
    for file in files:
        if file.parent != index.parent:  # an index is data from elsewhere: it may not point out of its folder
            raise ModelError(f"{index}: names a file in another folder: {file}")
        if not file.is_file():
            raise ModelError(f"{file}: this shard is missing, {index.name} names it", hint="fetch it again")
    return files
