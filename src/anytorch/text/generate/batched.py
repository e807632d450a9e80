"""A model of transformers, op by op: requests with plain caches share a batch, others are computed in turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anytorch.text.generate.cache import can_share, joined, new_cache, rows_of, truncate
from anytorch.text.generate.forward import CHANGING, Forward, rope_types
from anytorch.text.generate.requests import Computed, TextRequest


class Batched:
    """The `Way` of whatever transformers knows as a causal language model, also packed or in tiers."""

    def __init__(self, model: Any, folder: Path, device: torch.device) -> None:
        self._device = device
        self._forward: Any = Forward(model, folder)
        config = (
            model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
        )
        changing = CHANGING & rope_types(config)
        self._angles_change = bool(changing)  # with the length of the text: read in one go, and beside no other
        # From here on all angles of a text are others, so what is kept is computed again, as transformers does it for Phi-3.
        self._turning = getattr(config, "original_max_position_embeddings", None) if "longrope" in changing else None

    def read(self, request: TextRequest, portion: int) -> Computed:
        if request.cache is None:
            request.cache = new_cache(self._forward.model.config)
        # A window of keys or a state is only ever filled in one go: that is what every model supports.
        left = len(request.tokens) - request.length
        # Kinds of layers are known at once, except that a model may make them as it goes.
        growing = not self._angles_change and (not request.cache.layers or can_share(request.cache))
        count = min(left, portion) if growing else left
        ids = request.tokens[request.length : request.length + count]
        logits = self._forward(
            torch.tensor([ids], device=self._device),
            request.cache,
            torch.arange(request.length, request.length + count, device=self._device)[None],
            None,
        )
        return count, logits if count == left else None

    def together(self, requests: Sequence[TextRequest]) -> list[TextRequest]:
        if self._angles_change or not {"position_ids", "attention_mask"} <= self._forward.parameters:
            return []
        return [request for request in requests if can_share(request.cache)]

    def step(self, requests: Sequence[TextRequest]) -> Computed:
        if requests[0].length == self._turning:  # alone, see `together`
            return self._read_again(requests[0])
        cache = requests[0].cache
        alone = len(requests) == 1 and (not can_share(cache) or rows_of(cache) == 1)
        settled = all(r.cache is cache and r.row == row for row, r in enumerate(requests))
        if not alone and not (settled and rows_of(cache) == len(requests)):
            cache = joined([(r.cache, r.row, r.length) for r in requests])
            for row, request in enumerate(requests):
                request.cache, request.row = cache, row
        mask = None
        if len(requests) > 1:
            longest = max(r.length for r in requests)
            places = torch.arange(longest + 1)
            begins = torch.tensor([longest - r.length for r in requests])
            mask = (places >= begins[:, None]).long().to(self._device)
        logits = self._forward(
            torch.tensor([[r.tokens[-1]] for r in requests], device=self._device),
            cache,
            torch.tensor([[r.length] for r in requests], device=self._device),
            mask,
        )
        return 1, logits

    def _read_again(self, request: TextRequest) -> Computed:
        """The step of one request, for which the whole text is read into a new cache."""
        cache = new_cache(self._forward.model.config)
        count = len(request.tokens)
        logits = self._forward(
            torch.tensor([request.tokens], device=self._device),
            cache,
            torch.arange(count, device=self._device)[None],
            None,
        )
        request.cache = cache
        return count - request.length, logits

    def several(self, requests: Sequence[TextRequest], most: int) -> None:
        return None

    def tokens(self, requests: Sequence[TextRequest]) -> None:
        return None

    def undo(self, requests: Sequence[TextRequest]) -> None:
        truncate(requests[0].cache, max(request.length for request in requests))

    def leave(self, request: TextRequest) -> None:
        request.cache = None

    def close(self) -> None:
        self._forward = None
