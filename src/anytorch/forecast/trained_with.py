"""The tokenizer and context of a fine-tuned model, stored in its folder.

FOLDER/config.json, model.safetensors   the published layout, and nothing but it
FOLDER/tokenizer/                       the tokenizer it was trained on, in the same layout
FOLDER/anytorch.json                    names that tokenizer, and the rows of a window; written last: never half true
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from anytorch._version import __version__
from anytorch.errors import ModelError
from anytorch.files import replace_file
from anytorch.forecast.model import KronosTokenizer
from anytorch.forecast.model.pretrained import REPOSITORY, read_json
from anytorch.forecast.model.published import HUB, TINY
from anytorch.values import dataclass

FILE = "anytorch.json"
TOKENIZER = "tokenizer"  # the folder inside the model's


@dataclass(frozen=True)
class TrainedWith:
    """The content of the file. `tokenizer` is a path (a relative one starts at the model's folder) or a published name."""

    tokenizer: str
    max_context: int
    lookback: int | None = None
    horizon: int | None = None
    anytorch: str = ""  # the version that wrote it

    def source(self, folder: Path) -> str:
        """The tokenizer as `from_pretrained` takes it. Raises ModelError if it is a path and nothing is there."""
        path = folder / Path(self.tokenizer).expanduser()
        if path.is_dir():
            return str(path)
        name = self.tokenizer.lower()
        if name == TINY or name in HUB or (REPOSITORY.fullmatch(name) and not name.startswith(".")):
            return self.tokenizer
        raise ModelError(
            f"the model {str(folder)!r} was trained with the tokenizer {self.tokenizer!r}, as its {FILE} says, but there "
            f"is no folder {path}",
            hint="put that folder back, or name the tokenizer with --tokenizer (tokenizer=…)",
        )


def write_trained_with(folder: Path, tokenizer: KronosTokenizer, max_context: int, lookback: int, horizon: int) -> None:
    """Copy the tokenizer into the model's folder, then say so."""
    tokenizer.save_pretrained(folder / TOKENIZER)
    told = TrainedWith(TOKENIZER, max_context, lookback, horizon, __version__)
    replace_file(folder / FILE, (json.dumps(asdict(told), indent=2) + "\n").encode())


def forget_trained_with(folder: Path) -> None:
    """Remove the file before new weights are written, so that it never describes other ones."""
    (folder / FILE).unlink(missing_ok=True)


def read_trained_with(folder: Path) -> TrainedWith | None:
    """Read the file of a folder; None if there is none. Raises ModelError for an invalid file."""
    path = folder / FILE
    if not path.is_file():
        return None
    said = read_json(path)
    tokenizer, context = said.get("tokenizer"), said.get("max_context")
    if not isinstance(tokenizer, str) or not tokenizer.strip():
        wrong = f"its tokenizer is {tokenizer!r}, not a path or a name"
    elif not isinstance(context, int) or isinstance(context, bool) or context < 2:
        wrong = f"its max_context is {context!r}, not a number of rows from 2 on"
    else:
        known = {name: said[name] for name in TrainedWith.__dataclass_fields__ if name in said}
        return TrainedWith(**known)  # a later version may say more
    raise ModelError(
        f"{path} is invalid: {wrong}",
        hint="correct it, or delete it and name both with --tokenizer and --context (tokenizer=…, max_context=…)",
    )
