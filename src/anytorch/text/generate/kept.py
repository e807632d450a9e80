"""What steps of transformers' models keep of the tokens so far, in tensors that stay where they are.

Of a layer is kept what its kind needs, for every row:

- full attention: keys and values of all places;
- a sliding window: those of the last so many, each token's in place of the one that left the window;
- a state (Mamba, convolutions): the state before the step and the one after it, so that a step may be run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from anytorch.errors import ModelError, UsageError
from anytorch.text.generate.cache import GrowingLayer

# Older versions of transformers have none of these.
SlidingLayer: Any = getattr(cache_utils, "DynamicSlidingWindowLayer", None)
StateLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
BothLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
STATES = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class State:
    """One of a layer's states: which of its kinds, its number there, and its shape without rows."""

    kind: str  # one of STATES
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KeptOfLayer:
    """What is kept of a layer, as one that has read a prompt shows it."""

    kind: Any  # the class of the layer
    keys: tuple[int, int] = (0, 0)  # heads, width
    values: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32
    window: int | None = None  # None: all tokens are kept
    states: tuple[State, ...] = ()
    most_states: int = 1  # that its class is made for

    @property
    def attends(self) -> bool:
        return self.keys != (0, 0)

    @property
    def token_nbytes(self) -> int:
        return (prod(self.keys) + prod(self.values)) * self.dtype.itemsize


def kept_of(layer: Any) -> KeptOfLayer:
    """What to keep for a layer like this one, which has read a prompt. Raises ModelError for unknown kinds."""
    kind, most = type(layer), 1
    states: tuple[State, ...] = ()
    if kind not in (GrowingLayer, SlidingLayer, StateLayer, BothLayer):
        raise ModelError(f"it keeps its tokens in a {kind.__name__}, which is not supported")
    if kind in (StateLayer, BothLayer):
        found = [(name, *one) for name in STATES for one in getattr(layer, name).items() if one[1] is not None]
        states = tuple(State(name, number, tuple(one.shape[1:]), one.dtype) for name, number, one in found)
        most = layer.number_of_states
    if kind is StateLayer or not layer.is_initialized:
        return KeptOfLayer(kind, states=states, most_states=most)
    keys, values = ((one.shape[1], one.shape[3]) for one in (layer.keys, layer.values))
    window = layer.sliding_window if kind is SlidingLayer else None
    return KeptOfLayer(kind, keys, values, layer.keys.dtype, window, states, most)


# --- a layer of the cache that a model is given in a step --------------------------------------------------------------


class FixedLayer(DynamicLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """Keys and values: a token of each row is written to its own place, and all places are read."""

    def hold(
        self, keys: Tensor, values: Tensor, places: int, rows: Tensor, at: Tensor, *, sliding: bool, masked: bool
    ) -> None:
        """Take these, [rows, heads, places or more, width], as what is kept; the new ones go to places `at` of `rows`."""
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device, self.is_sliding = keys.dtype, keys.device, sliding
        self.rows, self.at, self.places = rows, at, min(places, int(keys.shape[2]))
        # transformers then looks into no mask for whether it could do without one, which a recording cannot.
        self.is_compileable = masked

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        kept: Any = (self.keys, self.values)
        for one, new in zip(kept, (key_states, value_states), strict=True):
            one[self.rows, :, self.at] = new[:, :, 0]
        return tuple(one[:, :, : self.places] for one in kept)

    def get_seq_length(self, *_: Any) -> int:
        return self.places - 1

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.places, 0


class FixedBoth(FixedLayer, BothLayer or object):  # type: ignore[misc]
    """Attention and states in one layer."""


def fixed(of: KeptOfLayer, states: dict[State, Tensor]) -> Any:
    """A layer like this one with its states in these tensors, which its model overwrites."""
    if of.kind not in (StateLayer, BothLayer):
        return FixedLayer()  # type: ignore[no-untyped-call,unused-ignore]
    kind: Any = StateLayer if of.kind is StateLayer else FixedBoth
    layer = kind(of.most_states)
    for state, tensor in states.items():
        getattr(layer, state.kind)[state.number] = tensor
        getattr(layer, f"is_{state.kind}_initialized")[state.number] = True
        layer.has_previous_state[state.number] = True
        if state.kind == "conv_states":
            layer.conv_kernel_size[state.number] = tensor.shape[-1]
    return layer


# --- states of many rows -----------------------------------------------------------------------------------------------


class States:
    """The states of all rows before the step that comes next, and after the one that came last.

    A step begins with the first and leaves the second. It is accepted when the next one comes: until then it can be taken
    back, or run again.
    """

    def __init__(self, states: Sequence[tuple[int, State]], rows: int, device: torch.device) -> None:
        self._at: list[tuple[int, State, int]] = []  # layer, state, and where it begins in its row
        widths: dict[torch.dtype, int] = {}
        for layer, state in states:
            self._at.append((layer, state, widths.get(state.dtype, 0)))
            widths[state.dtype] = widths.get(state.dtype, 0) + prod(state.shape)
        made = [{kind: torch.zeros(rows, n, dtype=kind, device=device) for kind, n in widths.items()} for _ in range(2)]
        self._before, self._after = made
        self._accepted = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self._lengths = [0] * rows  # tokens that `_before` has seen
        self._done: set[int] = set()  # rows whose last step is not accepted yet

    def of_layer(self, number: int, rows: int) -> dict[State, Tensor]:
        return {state: one for layer, state, one in self._views(self._after, slice(0, rows)) if layer == number}

    def begin(self, rows: int) -> None:
        for kind, after in self._after.items():
            after[:rows].copy_(self._before[kind][:rows])

    def under_way(self, rows: Collection[int]) -> None:
        """Note that a step of these rows has been computed."""
        if self._at:
            self._done = set(rows)

    def accept(self) -> None:
        """Keep the last step's states: the next step begins where it ended."""
        if not self._done:
            return
        self._accepted.copy_(torch.tensor([[row in self._done] for row in range(len(self._lengths))]))
        for kind, before in self._before.items():
            before.copy_(torch.where(self._accepted, self._after[kind], before))
        for row in self._done:
            self._lengths[row] += 1
        self._done = set()

    def read(self, row: int, layers: Sequence[Any], length: int) -> None:
        """Begin a row with what these layers have after so many tokens."""
        for number, state, mine in self._views(self._before, slice(row, row + 1)):
            mine.copy_(getattr(layers[number], state.kind)[state.number])
        self._lengths[row] = length
        self._done.discard(row)

    def cut(self, row: int, length: int) -> None:
        """Go back to so many tokens: to none, or to before the last step. Raises UsageError."""
        if not self._at or length >= self._lengths[row] + (row in self._done):
            return
        if length not in (0, self._lengths[row]):
            raise UsageError(f"row {row} cannot go back to {length} tokens: states of a text so far are not kept")
        self._lengths[row] = length
        self._done.discard(row)

    def take(self, row: int, other: States, source: int) -> None:
        other.accept()
        self.accept()
        for kind, before in self._before.items():
            before[row].copy_(other._before[kind][source])
        self._lengths[row] = other._lengths[source]

    def _views(self, of: dict[torch.dtype, Tensor], rows: slice) -> Iterator[tuple[int, State, Tensor]]:
        for layer, state, begin in self._at:
            flat = of[state.dtype][rows, begin : begin + prod(state.shape)]
            yield layer, state, flat.view(-1, *state.shape)
