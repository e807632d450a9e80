"""Keys and values of the tokens so far: transformers' cache with room to grow, and several requests in one.

transformers' own layers copy all keys and values for every token. These keep a buffer with room, and write into it.
Requests of different lengths share a batch by beginning at different places: shorter ones have unused places first,
which the attention mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64  # places that are added at least when the buffer is full


class GrowingLayer(DynamicLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """One layer's keys and values, [requests, heads, places, width], in buffers larger than what is used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        end = self.length + key_states.shape[-2]
        self._keys = self._written(self._keys, key_states, end)
        self._values = self._written(self._values, value_states, end)
        self.set_length(end)
        return self.keys, self.values

    def _written(self, buffer: torch.Tensor | None, new: torch.Tensor, end: int) -> torch.Tensor:
        if buffer is None or end > buffer.shape[-2]:
            room = max(end + ROOM, 2 * self.length) if self.length else end + ROOM
            grown = new.new_empty((*new.shape[:-2], room, new.shape[-1]))
            if buffer is not None:
                grown[..., : self.length, :] = buffer[..., : self.length, :]
            buffer = grown
        buffer[..., self.length : end, :] = new
        return buffer

    def set_length(self, length: int) -> None:
        """Use the first so many places; those after them are free again."""
        self.length = length
        if self._keys is not None and self._values is not None:
            self.keys, self.values = self._keys[..., :length, :], self._values[..., :length, :]

    def hold(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Take the first `length` places of these as what has been so far; the rest of them is room."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._keys, self._values = keys, values
        self.set_length(length)

    def get_seq_length(self, *args: Any) -> int:
        return self.length


def new_cache(config: Any) -> Any:
    """An empty cache for one request, of the kinds of layers the model has; plain ones grow in place."""
    cache = DynamicCache(config=config)
    if cache.layers:
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    else:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def can_share(cache: Any) -> bool:
    """True if this cache's request can share a batch: only with plain layers, where unused places can be masked."""
    return bool(cache.layers) and all(type(layer) is GrowingLayer for layer in cache.layers)


def truncate(cache: Any, length: int) -> None:
    """Remove what a failed computation has written."""
    for layer in cache.layers:
        if layer.length > length:
            layer.set_length(length)


def joined(parts: Sequence[tuple[Any, int, int]]) -> Any:
    """One cache of several requests, each one's places at the end. `parts`: for each the cache it is in, its row there,
    and how many places it uses."""
    longest = max(length for _, _, length in parts)
    whole = DynamicCache()
    whole.layers = []
    for number in range(len(parts[0][0].layers)):
        layers = [(cache.layers[number], row, length) for cache, row, length in parts]
        layer = GrowingLayer()
        keys = _stacked([(one.keys, row, length) for one, row, length in layers], longest)
        values = _stacked([(one.values, row, length) for one, row, length in layers], longest)
        layer.hold(keys, values, longest)
        whole.layers.append(layer)
    return whole


def _stacked(parts: Sequence[tuple[torch.Tensor, int, int]], longest: int) -> torch.Tensor:
    first = parts[0][0]
    # Zeros, not whatever is there: a hidden place counts for 0, and 0 times NaN is NaN.
    whole = first.new_zeros((len(parts), first.shape[1], longest + ROOM, first.shape[3]))
    for place, (tensor, row, length) in enumerate(parts):
        whole[place, :, longest - length : longest] = tensor[row, :, tensor.shape[2] - length :]
    return whole


def rows_of(cache: Any) -> int:
    """How many requests a cache holds."""
    return int(cache.layers[0].keys.shape[0])
