"""Find a model with its tokenizer and context: by name, by folder, or the built-in tiny pair.

A fine-tuned model's folder says both:

FOLDER/config.json, model.safetensors   the published layout, and nothing but it
FOLDER/tokenizer/                       the tokenizer it was trained on, in the same layout
FOLDER/anytorch.json                    names that tokenizer, and the rows of a window; written last: never half true

A published model's folder (`Kronos-small/`, downloaded as it is) says neither: its name and its configuration do, and the
tokenizer is the folder of its published name beside it (`Kronos-Tokenizer-base/`), else the published one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from anytorch import limits
from anytorch._version import __version__
from anytorch.errors import ModelError
from anytorch.files import replace_file
from anytorch.forecast.inputs import whole_number
from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer
from anytorch.forecast.model.pretrained import (
    HUB,
    MAX_CONTEXT,
    REPOSITORY,
    TINY,
    UNSAID_CONTEXT,
    Checkpoint,
    check_name,
    kind_of,
    no_such,
    read_json,
    tiny_folder,
)
from anytorch.forecast.predictor import KronosPredictor
from anytorch.values import dataclass

FILE = "anytorch.json"
MOST_ROWS = 2**24  # of a window: beyond every memory
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


def read_trained_with(folder: Path) -> TrainedWith | None:
    """Read the file of a folder; None if there is none. Raises ModelError for an invalid file."""
    path = folder / FILE
    if not path.is_file():
        return None
    said = read_json(path)
    tokenizer, context = said.get("tokenizer"), said.get("max_context")
    if not isinstance(tokenizer, str) or not tokenizer.strip():
        wrong = f"its tokenizer is {tokenizer!r}, not a path or a name"
    elif not isinstance(context, int) or isinstance(context, bool) or not 2 <= context <= MOST_ROWS:
        told = repr(context) if not isinstance(context, int) or abs(context) < 2**63 else "too large"
        wrong = f"its max_context is {told}, not a number of rows from 2 on"
    else:
        known = {name: said[name] for name in TrainedWith.__dataclass_fields__ if name in said}
        return TrainedWith(**known)  # a later version may say more
    raise ModelError(
        f"{path} is invalid: {wrong}",
        hint="correct it, or delete it and name both with --tokenizer and --context (tokenizer=…, max_context=…)",
    )


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A model and its tokenizer as `from_pretrained` takes them, and the most rows of a window."""

    model: str
    tokenizer: str
    max_context: int


def choose_checkpoint(
    model: str | Path = TINY, tokenizer: str | Path | None = None, max_context: int | None = None
) -> ChosenCheckpoint:
    """The tokenizer and context for a model; the arguments override what is known about it.

    Raises InputError for an invalid context; ModelError for an unknown name, and where only the caller can know the
    tokenizer, and where the one that a folder names is gone.

    >>> choose_checkpoint("kronos-small").max_context
    512
    """
    check_name(model, "model")
    if tokenizer is not None:
        check_name(tokenizer, "tokenizer")
    name = str(model)
    if max_context is not None:
        max_context = whole_number("max_context", max_context, limits.WINDOW, "a window has at least 2 rows")
    told: TrainedWith | None = None
    if name in (TINY, str(tiny_folder("model"))):
        found = ChosenCheckpoint(str(tiny_folder("model")), TINY, MAX_CONTEXT)
    elif published := next((p for p in PUBLISHED.values() if name.lower() in (p.name, p.model.lower())), None):
        found = ChosenCheckpoint(published.model, published.tokenizer, published.max_context)
    else:
        folder = Path(name).expanduser()
        here = folder.is_dir() and bool(name.strip())
        if not here and (folder.exists() or not REPOSITORY.fullmatch(name)):
            raise no_such(model, "model")
        if here:
            check_is_a_model(folder, name)
        told = read_trained_with(folder)
        pair = published_pair(folder) if here and told is None else None
        if pair is not None:
            found = ChosenCheckpoint(name, tokenizer_beside(folder, pair.tokenizer), pair.max_context)
        else:
            found = ChosenCheckpoint(name, "", UNSAID_CONTEXT if told is None else told.max_context)
    if tokenizer is not None:
        known = str(tokenizer)
    elif told is not None:
        known = told.source(Path(name).expanduser())
    elif not (known := found.tokenizer):
        words = f"the model {name!r} does not say" if here else f"{name!r} is not a folder here, and it is unknown"
        raise ModelError(
            f"{words} which tokenizer it was trained with",
            hint=f"name it with --tokenizer (tokenizer=…); known pairs: {', '.join([TINY, *PUBLISHED])}",
        )
    if known == TINY:
        known = str(tiny_folder("tokenizer"))
    return ChosenCheckpoint(found.model, known, found.max_context if max_context is None else max_context)


def published_pair(folder: Path) -> Checkpoint | None:
    """The published model that a folder holds: it has its name and its configuration; None for any other folder."""
    pair = PUBLISHED.get(folder.resolve().name.lower())
    if pair is None or not (folder / "config.json").is_file():
        return None
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        return None  # loading says what is wrong with it
    return pair if all(config.get(name) == value for name, value in pair.config.items()) else None


def tokenizer_beside(folder: Path, repository: str) -> str:
    """The folder of a published tokenizer beside a model's, inside it as "tokenizer", or else its published name."""
    wanted = repository.rpartition("/")[2].lower()
    if (folder / TOKENIZER / "config.json").is_file():
        return str(folder / TOKENIZER)
    for other in sorted(folder.resolve().parent.iterdir()):
        if other.name.lower() == wanted and (other / "config.json").is_file():
            return str(other)
    return repository


def check_is_a_model(folder: Path, name: str) -> None:
    """Raise ModelError if the folder is a training run's or a tokenizer's, not a model's."""
    if not (folder / "config.json").exists():
        if (folder / "best_model" / "config.json").exists():
            hint = f"its model is {folder / 'best_model'}"
            raise ModelError(f"{name!r} is the folder of a run, not of a model", hint=hint)
        return
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        return  # loading says what is wrong with it
    if kind_of(config) == "tokenizer":
        raise ModelError(f"{name!r} is a tokenizer, not a model", hint="name it with --tokenizer (tokenizer=…)")


def load_predictor(
    model: str | Path = TINY,
    tokenizer: str | Path | None = None,
    *,
    device: str | None = "auto",
    max_context: int | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
) -> KronosPredictor:
    """Load a predictor: "tiny" (comes with anytorch), "kronos-mini", "-small", "-base", a folder or a hub id.

    A folder from fine-tuning knows its tokenizer and its context; for another one, name them. `dtype` and `quantization` are
    those of `KronosPredictor`.

    >>> load_predictor().max_context
    128
    """
    found = choose_checkpoint(model, tokenizer, max_context)
    return KronosPredictor(
        Kronos.from_pretrained(found.model),
        KronosTokenizer.from_pretrained(found.tokenizer),
        device=device,
        max_context=found.max_context,
        dtype=dtype,
        quantization=quantization,
    )
