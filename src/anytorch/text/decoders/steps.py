"""One token after another with nothing but replays: a decoder's step over tensors that stay where they are.

A step of a decoder launches hundreds of small kernels, and the host takes longer to launch them than the device to run them.
Here token ids, positions, keys and values have fixed places, so that a step can be recorded once and replayed. There is
a recording for every power of two of the context, as attention reads all places up to there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from anytorch.errors import InputError
from anytorch.recorded.graphs import Recorder
from anytorch.text.decoders.model import Decoder, KeyValues, Layer, rotated
from anytorch.text.decoders.rotary import tables

LEAST_PLACES = 64  # of the shortest recording


class RecordedSteps:
    """`rows` texts of up to `positions` tokens each, which go on independently of one another.

        steps = RecordedSteps(decoder, rows=2, positions=1024)
        steps.read(0, [1, 15, 7])              # a prompt; its logits say what follows
        steps.follow(0, token)                 # what follows was chosen
        logits = steps.step()                  # [rows, vocabulary], for every row's last token

    A row that nobody reads computes something that nobody looks at. Not for several threads at once.
    """

    def __init__(self, decoder: Decoder, rows: int = 1, positions: int | None = None) -> None:
        spec, weight = decoder.spec, decoder.lm_head.weight
        self.decoder, self.rows = decoder, rows
        self.positions = min(positions or spec.max_positions, spec.max_positions)
        self.kept = KeyValues(spec, rows, self.positions, weight.dtype, weight.device)
        self.lengths = [0] * rows  # tokens whose keys and values are kept
        self._ids = torch.zeros(rows, 1, dtype=torch.int64, device=weight.device)
        self._places = torch.zeros(rows, dtype=torch.int64, device=weight.device)  # of the tokens in `_ids`
        self._cos, self._sin = (one.to(weight.dtype) for one in tables(spec, self.positions, weight.device))
        self._every_row = torch.arange(rows, device=weight.device)
        self._every_place = torch.arange(self.positions, device=weight.device)
        self._recorder = Recorder(weight.device)

    @property
    def recorded(self) -> str:
        """ "" if steps are recorded where they can be, else why this device records none."""
        return self._recorder.failed

    def read(self, row: int, ids: Sequence[int]) -> Tensor:
        """Begin a row anew with a prompt; gives the logits of its last token, [vocabulary]. Raises InputError."""
        if not 0 <= row < self.rows:
            raise InputError(f"row {row} is not one of {self.rows}")
        if not ids or len(ids) > self.positions:
            raise InputError(f"a prompt of {len(ids)} tokens: there is room for 1 to {self.positions}")
        logits = self.decoder.read(ids, self.kept.of_row(row))
        self.lengths[row] = len(ids)
        # Steps of other rows compute this one, too, and write its key: to a place that has none yet.
        self._places[row] = min(len(ids), self.positions - 1)
        return logits

    def follow(self, row: int, token: int) -> None:
        """Put a token after a row's last one; the next step computes it."""
        if self.lengths[row] >= self.positions:
            raise InputError(f"row {row} is full: it has {self.positions} tokens")
        self._ids[row] = token
        self._places[row] = self.lengths[row]
        self.lengths[row] += 1

    def step(self) -> Tensor:
        """Logits of the tokens that `follow` put there, [rows, vocabulary]. They are overwritten by the next step."""
        longest = max(self.lengths)
        places = min(self.positions, max(LEAST_PLACES, 1 << (longest - 1).bit_length()))
        return self._recorder.run(places, lambda: self._computed(places))

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int] = ()) -> list[list[int]]:
        """The most likely tokens after each prompt: at most `tokens`, and up to the first of `ends`, which is left out."""
        if len(prompts) > self.rows:
            raise InputError(f"{len(prompts)} prompts: there are {self.rows} rows")
        made: list[list[int]] = [[] for _ in prompts]
        chosen = [int(self.read(row, ids).argmax()) for row, ids in enumerate(prompts)]
        open_rows = list(range(len(prompts)))
        while open_rows:
            for row in list(open_rows):
                if chosen[row] in ends or len(made[row]) == tokens:
                    open_rows.remove(row)
                    continue
                made[row].append(chosen[row])
                if len(made[row]) == tokens or self.lengths[row] == self.positions:
                    open_rows.remove(row)
                else:
                    self.follow(row, chosen[row])
            if open_rows:
                chosen = self.step().argmax(-1).tolist()
        return made

    def _computed(self, places: int) -> Tensor:
        """The step over the first so many places. Run again, it writes the same keys and values to the same places."""
        body = self.decoder.model
        x = body.embed_tokens(self._ids)
        cos, sin = (one[self._places][:, None, None] for one in (self._cos, self._sin))
        distance = self._places[:, None] - self._every_place[:places]  # [rows, places]
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
        for kept, new in ((self.kept.keys[number], k), (self.kept.values[number], v)):
            kept[self._every_row, :, self._places] = new[:, :, 0]
        keys, values = (kept[number, :, :, : seen.shape[-1]] for kept in (self.kept.keys, self.kept.values))
        mixed = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=spec.heads != spec.kv_heads)
        made: Tensor = own.o_proj(mixed.reshape(self.rows, 1, spec.q_width))
        return made
