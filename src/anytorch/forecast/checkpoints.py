"""Find a model with its tokenizer and context: by name, by folder, or the built-in tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

from anytorch.errors import ModelError
from anytorch.forecast.inputs import whole_number
from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer
from anytorch.forecast.model.pretrained import REPOSITORY, check_name, no_such, tiny_folder
from anytorch.forecast.model.published import MAX_CONTEXT, TINY, UNSAID_CONTEXT
from anytorch.forecast.predictor import KronosPredictor
from anytorch.forecast.trained_with import TrainedWith, read_trained_with
from anytorch.values import dataclass


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

    Raises InputError for a context that is none; ModelError for a name that is none, where only the caller can know the
    tokenizer, and where the one that a folder names is gone.

    >>> choose_checkpoint("kronos-small").max_context
    512
    """
    check_name(model, "model")
    if tokenizer is not None:
        check_name(tokenizer, "tokenizer")
    name = str(model)
    if max_context is not None:
        max_context = whole_number("max_context", max_context, 2, "a window has at least 2 rows")
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


def check_is_a_model(folder: Path, name: str) -> None:
    """Raise ModelError if the folder is a training run's or a tokenizer's, not a model's."""
    if not (folder / "config.json").exists():
        if (folder / "best_model" / "config.json").exists():
            hint = f"its model is {folder / 'best_model'}"
            raise ModelError(f"{name!r} is the folder of a run, not of a model", hint=hint)
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # loading says what is wrong with it
    if isinstance(config, dict) and "n_enc_layers" in config:
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
