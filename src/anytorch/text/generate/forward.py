"""Calling a causal language model of transformers, whatever the names of its forward's arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from anytorch.errors import ModelError
from anytorch.memory.first_runs import NotWatched

CHANGING = frozenset({"longrope", "dynamic"})  # transformers chooses their angles by the largest position of a step
CACHES = ("past_key_values", "cache_params")  # the names under which a forward takes what is kept of tokens


class Forward:
    """`forward(ids, cache, positions, mask)` gives the logits of each row's last token. Raises ModelError for a model that
    keeps nothing of the tokens it has read."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.parameters = frozenset(inspect.signature(model.forward).parameters)
        cache = next((name for name in CACHES if name in self.parameters), None)
        if cache is None:
            raise ModelError(
                f"{folder}: {type(model).__name__} takes no cache of what it has read, which this generator needs",
                hint="use transformers' own model.generate for it",
            )
        self._cache = cache

    def __call__(
        self, ids: torch.Tensor, cache: Any, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of last tokens, [rows, vocabulary]. `ids` and `positions`: [rows, tokens], `mask`: [rows, places]."""
        options: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if "position_ids" in self.parameters:
            options["position_ids"] = positions
        if mask is not None:
            options["attention_mask"] = mask
        if "logits_to_keep" in self.parameters:
            options["logits_to_keep"] = 1  # the others are a vocabulary's width of work each, for nothing
        with NotWatched():  # a mode is for the program's own models; what is recorded here must not change under it
            logits: torch.Tensor = self.model(input_ids=ids, **options).logits
        return logits[:, -1]


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary angles that a config names, for all layers or for each kind of them."""
    found = set()
    for name in ("rope_parameters", "rope_scaling"):
        told = getattr(config, name, None)
        for one in (told, *(told.values() if isinstance(told, dict) else ())):
            if isinstance(one, dict):
                found.add(one.get("rope_type", one.get("type")))
    return {one for one in found if isinstance(one, str)}
