"""Which model, with which tokenizer and context: by name, by folder, or the tiny pair that comes with anytorch."""

from __future__ import annotations

from pathlib import Path

from anytorch.engines.forecast.assets import MAX_CONTEXT, TINY, tiny_folder
from anytorch.engines.forecast.predictor import KronosPredictor
from anytorch.errors import ModelError, UsageError
from anytorch.models.kronos import PUBLISHED, Kronos, KronosTokenizer
from anytorch.values import dataclass

DEFAULT_CONTEXT = 512  # of a model whose folder does not say: config.json has no such key


@dataclass(frozen=True)
class Choice:
    """What was asked for, found: what `from_pretrained` takes, and the rows a window may have."""

    model: str
    tokenizer: str
    max_context: int


def choose_checkpoint(
    model: str | Path = TINY, tokenizer: str | Path | None = None, max_context: int | None = None
) -> Choice:
    """The tokenizer and context that go with a model. Raises ModelError where only the caller can know the tokenizer.

    >>> choose_checkpoint("kronos-small").max_context
    512
    """
    name = str(model)
    if max_context is not None and max_context < 2:
        raise UsageError(f"max_context={max_context}: a window has at least 2 rows")
    if name == TINY:
        found = Choice(str(tiny_folder("model")), str(tiny_folder("tokenizer")), MAX_CONTEXT)
    elif published := next((p for p in PUBLISHED.values() if name.lower() in (p.name, p.model.lower())), None):
        found = Choice(published.model, published.tokenizer, published.max_context)
    elif tokenizer is None:
        raise ModelError(
            f"the model {name!r} does not say which tokenizer it was trained with",
            hint=f"name it with --tokenizer (tokenizer=…); known pairs: {', '.join([TINY, *PUBLISHED])}",
        )
    else:
        found = Choice(name, str(tokenizer), DEFAULT_CONTEXT)
    if tokenizer is not None:
        named = str(tiny_folder("tokenizer")) if str(tokenizer) == TINY else str(tokenizer)
        found = Choice(found.model, named, found.max_context)
    return found if max_context is None else Choice(found.model, found.tokenizer, max_context)


def load_predictor(
    model: str | Path = TINY,
    tokenizer: str | Path | None = None,
    *,
    device: str | None = "auto",
    max_context: int | None = None,
    quantization: str | None = None,
) -> KronosPredictor:
    """A predictor that is ready: "tiny" (comes with anytorch), "kronos-mini", "-small", "-base", a folder or a hub id.

    >>> load_predictor().max_context
    128
    """
    found = choose_checkpoint(model, tokenizer, max_context)
    return KronosPredictor(
        Kronos.from_pretrained(found.model),
        KronosTokenizer.from_pretrained(found.tokenizer),
        device=device,
        max_context=found.max_context,
        quantization=quantization,
    )
