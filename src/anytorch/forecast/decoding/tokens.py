"""Between candles and ids, without computing a shared row twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from anytorch.forecast.decoding.decoder import versions
from anytorch.forecast.decoding.replayed import Replayed
from anytorch.forecast.model import KronosTokenizer
from anytorch.forecast.model.fused import FusedBlock, fused, plain, side_by_side, through_window


class Codec:
    """A tokenizer with fused blocks. Without `fuse` its weights stay where they are: less memory, a little more work."""

    def __init__(self, tokenizer: KronosTokenizer, fuse: bool = True, record: bool = False) -> None:
        self.tokenizer = tokenizer
        self.replayed = Replayed(tokenizer.embed.weight.device, record)
        join_layers = fused(plain) if fuse else side_by_side
        self.encoder = [FusedBlock.of(block, join_layers) for block in tokenizer.encoder]  # type: ignore[arg-type]
        self.decoder = [FusedBlock.of(block, join_layers) for block in tokenizer.decoder]  # type: ignore[arg-type]
        self.device = tokenizer.embed.weight.device
        self.dtype = tokenizer.embed.weight.dtype
        self.built_from = versions(tokenizer)

    def fits(self, tokenizer: KronosTokenizer) -> bool:
        """True if this still matches `tokenizer`."""
        return tokenizer is self.tokenizer and versions(tokenizer) == self.built_from

    def encode(self, values: Sequence[Tensor], keep: int, limit_rows: int) -> list[tuple[Tensor, Tensor]]:
        """Normalised candles [rows, 6] of each series → s1 and s2 of its last `keep` rows.

        The whole history is encoded, as published. Series are padded at the end, where causal attention does not look.
        """
        found: list[tuple[Tensor, Tensor]] = []
        for part in pieces(values, limit_rows):
            x = torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True).to(self.dtype)
            s1, s2 = self.replayed(("encode", limit_rows), partial(self._ids, limit_rows), x)
            found += [
                (s1[row, max(0, len(one) - keep) : len(one)], s2[row, max(0, len(one) - keep) : len(one)])
                for row, one in enumerate(part)
            ]
        return found

    def _ids(self, limit_rows: int, x: Tensor) -> Tensor:
        hidden = self.tokenizer.embed(x)
        if self.encoder:
            hidden, _ = through_window(self.encoder, hidden, None, limit_rows)
        return torch.stack(self.tokenizer.ids(self.tokenizer.quant_embed(hidden)))

    def decode(self, shared: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor], limit_rows: int) -> Tensor:
        """Ids of windows → normalised candles of their own rows, float32 [series × samples, n, 6].

        shared: s1 and s2 [series, L] of the windows' first rows, or None; own: [series × samples, n].
        """

        def work(*ids: Tensor) -> Tensor:
            return self._decode(None if shared is None else (ids[2], ids[3]), (ids[0], ids[1]), limit_rows)

        return self.replayed(("decode", limit_rows), work, *own, *(shared or ()))

    def _decode(self, shared: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor], limit_rows: int) -> Tensor:
        before = 0 if shared is None else shared[0].shape[1]
        if shared is not None and shared[0].shape[0] == own[0].shape[0]:  # one sample each: there is nothing to share
            whole = [torch.cat(parts, dim=1) for parts in zip(shared, own, strict=True)]
            at_once = max(1, limit_rows // whole[0].shape[1])
            parts_decoded = [
                self.tokenizer.decode([part[start : start + at_once] for part in whole], half=True)[:, before:]
                for start in range(0, len(whole[0]), at_once)
            ]
            return torch.cat(parts_decoded).float()
        first = self._embed(*shared) if shared is not None and before else None
        second: Tensor | None = self._embed(*own)
        if self.decoder:
            _, second = through_window(self.decoder, first, second, limit_rows)
        assert second is not None
        values: Tensor = self.tokenizer.head(second)
        return values.float()

    def _embed(self, s1: Tensor, s2: Tensor) -> Tensor:
        embedded: Tensor = self.tokenizer.post_quant_embed(self.tokenizer.codes(s1, s2))
        return embedded


def pieces(values: Sequence[Tensor], limit_rows: int) -> list[Sequence[Tensor]]:
    """Consecutive series whose padded rows stay below the limit; a single one may pass it."""
    found: list[Sequence[Tensor]] = []
    start = 0
    while start < len(values):
        end = start + 1
        while end < len(values) and (end + 1 - start) * max(map(len, values[start : end + 1])) <= limit_rows:
            end += 1
        found.append(values[start:end])
        start = end
    return found
