"""A KV cache that lives in tiers: the keys and values of most layers rest on the host or the disk between their uses."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch

from anytorch.errors import ModelError
from anytorch.memory.stack import TensorStack


def tiered_cache(stack: TensorStack | Mapping[str, Any], config: Any = None) -> Any:
    """A transformers cache for `model.generate(…, past_key_values=tiered_cache(stack))`.

    Keys and values are kept in the stack, within its budgets; a layer's are brought to level 0 when the layer runs, and the
    next layer's are fetched meanwhile. `stack` may be the configuration of one. Needs transformers.
    """
    try:
        from transformers.cache_utils import Cache, DynamicLayer
    except ModuleNotFoundError as exc:
        raise ModelError(
            "a KV cache needs transformers, which is not installed", hint="pip install transformers"
        ) from exc
    owner = stack if isinstance(stack, TensorStack) else TensorStack(stack)
    numbers = count()

    class TieredLayer(DynamicLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
        """One layer's keys and values, under two keys of the stack. The cache makes its layers in their order."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
            self.index = next(numbers)
            self.length = 0

        def _names(self, index: int) -> tuple[str, str]:
            return f"keys {index}", f"values {index}"

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            device = key_states.device
            fresh = []
            for name, new in zip(self._names(self.index), (key_states, value_states), strict=True):
                old = owner.access(name)
                whole = new if old is None else torch.cat([old.to(device), new], dim=-2)
                owner.register(name, whole)
                fresh.append(whole)
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, device
            self.length = fresh[0].shape[-2]
            following = [name for name in self._names(self.index + 1) if name in owner]
            if following:
                owner.prefetch(following)
            return fresh[0], fresh[1]

        def get_seq_length(self, *args: Any) -> int:
            return self.length

        def _change(self, function: Any) -> None:
            for name in self._names(self.index):
                old = owner.access(name)
                if old is not None:
                    changed = function(old)
                    owner.register(name, changed)
                    self.length = changed.shape[-2]

        def reorder_cache(self, beam_idx: Any) -> None:
            self._change(lambda old: old.index_select(0, beam_idx.to(old.device)))

        def crop(self, max_length: int) -> None:
            keep = self.length + max_length if max_length < 0 else max_length
            if keep < self.length:
                self._change(lambda old: old[..., :keep, :].clone())

        def batch_repeat_interleave(self, repeats: int) -> None:
            self._change(lambda old: old.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Any) -> None:
            self._change(lambda old: old[indices.to(old.device)])

        def reset(self) -> None:
            for name in self._names(self.index):
                owner.remove(name)
            self.length = 0

    class TieredCache(Cache):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__(layer_class_to_replicate=TieredLayer)
            self.stack = owner

        def close(self) -> None:
            owner.close()

    return TieredCache()
