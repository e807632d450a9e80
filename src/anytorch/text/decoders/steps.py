"""One token after another with nothing but replays: a decoder's step over tensors that stay where they are.

A step of a decoder launches hundreds of small kernels, and the host takes longer to launch them than the device to run them.
Here token ids, positions, keys and values have fixed places, so that a step can be recorded once and replayed. There is
a recording for every power of two of the context and of the rows in use, as attention reads all places up to there.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from anytorch.recorded.graphs import Recorder
from anytorch.text.decoders.model import Decoder, KeyValues, Layer, rotated
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.rows import Rows

LEAST_PLACES = 64  # of the shortest recording


class PlacedSteps(Rows):
    """`Rows` whose tokens and places lie where a recording of the step reads them: one replay for a token of all rows.

    A row that is not in use computes something that is never read. Not for several threads at once.
    """

    def __init__(self, rows: int, positions: int, device: torch.device) -> None:
        self.rows, self.positions = rows, positions
        self.lengths, self._stopping = [0] * rows, ctypes.c_int32()
        self._next = torch.zeros(2, rows, dtype=torch.int64)  # tokens and their places, on the host
        self._given = self._next.to(device, copy=True)  # the same for the device, at one place for all recordings
        self._ids, self._places = self._given
        self._recorder = Recorder(device)

    @abstractmethod
    def _computed(self, rows: int, places: int) -> Tensor:
        """The step of the first so many rows and places: logits, [rows, vocabulary]. It may be run again without harm, which
        warming up and recording need."""

    def _kept_alive(self, rows: int, places: int) -> Tensor:
        return self._computed(rows, places)

    @property
    def recorded(self) -> str:
        """ "" if steps are recorded where they can be, else why this device records none."""
        return self._recorder.failed

    def step(self) -> Tensor:
        """Logits of the tokens that `follow` put there, of as many rows as have a text or more, [rows, vocabulary]. They are
        overwritten by the next step."""
        rows, places = self._extent()
        self._given.copy_(self._next)
        return self._recorder.run((rows, places), lambda: self._kept_alive(rows, places))

    def _extent(self, ahead: int = 0) -> tuple[int, int]:
        """Rows and places that a step computes, whose texts are so many tokens longer than `lengths` says."""
        rows = max((row + 1 for row in range(self.rows) if self.lengths[row]), default=1)
        rows = min(self.rows, 1 << (rows - 1).bit_length())
        places = 1 << (max(self.lengths) + ahead - 1).bit_length()
        return rows, min(self.positions, max(LEAST_PLACES, places))

    def _put(self, row: int, token: int, place: int) -> None:
        self._next[:, row] = torch.tensor((token, place))

    def _wait(self, row: int) -> None:
        # Steps of other rows compute this one, too, and write its key: to a place that has none yet.
        self._next[1, row] = min(self.lengths[row], self.positions - 1)


class RecordedSteps(PlacedSteps):
    """`rows` texts of up to `positions` tokens each by a decoder on any device."""

    def __init__(self, decoder: Decoder, rows: int = 1, positions: int | None = None) -> None:
        spec, weight = decoder.spec, decoder.lm_head.weight
        super().__init__(rows, min(positions or spec.max_positions, spec.max_positions), weight.device)
        self.decoder = decoder
        self.kept = KeyValues(spec, rows, self.positions, weight.dtype, weight.device)
        self._cos, self._sin = (one.to(weight.dtype) for one in tables(spec, self.positions, weight.device))
        self._every_row = torch.arange(rows, device=weight.device)
        self._every_place = torch.arange(self.positions, device=weight.device)
        self._held: dict[int, Tensor] = {}  # weights that recordings read, even if a kernel lays them out anew

    def _kept_alive(self, rows: int, places: int) -> Tensor:
        self._held.update((one.data_ptr(), one.detach()) for one in self.decoder.parameters())
        return self._computed(rows, places)

    @torch.no_grad()
    def _computed(self, rows: int, places: int) -> Tensor:
        """The step of the first so many rows and places. Run again, it writes the same keys and values."""
        body = self.decoder.model
        x = body.embed_tokens(self._ids[:rows, None])
        own = self._places[:rows]
        cos, sin = (one[own][:, None, None] for one in (self._cos, self._sin))
        distance = own[:, None] - self._every_place[:places]  # [rows, places]
        for number, layer in enumerate(body.layers):
            assert isinstance(layer, Layer)
            window = layer.self_attn.window
            seen = distance >= 0 if not window else (distance >= 0) & (distance < window)
            x = x + self._attended(layer, number, layer.input_layernorm(x), cos, sin, seen[:, None, None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self.decoder.lm_head(body.norm(x))[:, 0]
        return logits

    def _attended(self, layer: Layer, number: int, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        spec, own = self.decoder.spec, layer.self_attn
        q, k, v = own.projected(x)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        rows, places = x.shape[0], seen.shape[-1]
        for kept, new in ((self.kept.keys[number], k), (self.kept.values[number], v)):
            kept[self._every_row[:rows], :, self._places[:rows]] = new[:, :, 0]
        keys, values = (kept[number, :rows, :, :places] for kept in (self.kept.keys, self.kept.values))
        mixed = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=spec.heads != spec.kv_heads)
        made: Tensor = own.o_proj(mixed.reshape(rows, 1, spec.q_width))
        return made
