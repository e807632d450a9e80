"""xformers' attention and its masks, by scaled_dot_product_attention: theirs are CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from anytorch.run.ledger import ledger
from anytorch.run.refusals import refuse

DO = "call torch.nn.functional.scaled_dot_product_attention"


class AttentionBias:
    """What is added to the scores: `materialize` gives it as a tensor."""

    def _allowed(self, rows: int, columns: int) -> torch.Tensor:
        raise NotImplementedError

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Zeros where a query may look and -inf elsewhere, in the shape of the scores."""
        allowed = self._allowed(*shape[-2:])
        bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
        return bias.expand(*shape).to(device)


class LowerTriangularMask(AttentionBias):
    """A query sees its own place and what is before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _allowed(self, rows: int, columns: int) -> torch.Tensor:
        return torch.ones(rows, columns, dtype=torch.bool).tril()

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The same, and a tensor that is added."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        return super().materialize(shape, dtype, device) + self._bias.to(device, dtype)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees every key, the one before it one less."""

    def _allowed(self, rows: int, columns: int) -> torch.Tensor:
        return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


class BlockDiagonalMask(AttentionBias):
    """Sequences that lie end to end in one row: each sees its own keys. `inner` is the mask within a sequence."""

    inner: type[AttentionBias] | None = None

    def __init__(self, q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
        self._queries, self._keys = list(q_seqlen), list(kv_seqlen)

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **unused: Any) -> Any:
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """The mask of (batch, sequence, …) tensors, and the tensors in one row."""
        lengths = [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]
        mask = cls.from_seqlens(lengths)
        mask._batches = [tensor.shape[0] for tensor in tensors]
        return mask, torch.cat([tensor.flatten(0, 1)[None] for tensor in tensors], dim=1)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The sequences of a (1, tokens, …) tensor, again with the batches of `from_tensor_list`."""
        batches = getattr(self, "_batches", [1] * len(self._queries))
        starts = list(accumulate(batches, initial=0))
        sizes = [sum(self._queries[start : start + count]) for start, count in zip(starts, batches, strict=False)]
        parts = tensor[0].split(sizes)
        return [part.unflatten(0, (count, -1)) for part, count in zip(parts, batches, strict=True)]

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self._queries, self._keys)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self._queries, self._keys)

    def _allowed(self, rows: int, columns: int) -> torch.Tensor:
        blocks = [
            torch.ones(queries, keys, dtype=torch.bool) if self.inner is None else self.inner()._allowed(queries, keys)
            for queries, keys in zip(self._queries, self._keys, strict=True)
        ]
        allowed: torch.Tensor = torch.block_diag(*blocks).bool()
        if allowed.shape != (rows, columns):
            raise ValueError(
                f"the sequences of the mask have {tuple(allowed.shape)} tokens, the tensors {(rows, columns)}"
            )
        return allowed

    def blocks(self) -> list[tuple[slice, slice, AttentionBias | None]]:
        """For each sequence its queries, its keys and the mask between them."""
        ends_q, ends_k = (list(accumulate(lengths, initial=0)) for lengths in (self._queries, self._keys))
        inner = None if self.inner is None else self.inner()
        return [
            (slice(ends_q[n], ends_q[n + 1]), slice(ends_k[n], ends_k[n + 1]), inner) for n in range(len(self._queries))
        ]


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Within each sequence a query sees what is before it."""

    inner = LowerTriangularMask


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The same, with the last query at the last key."""

    inner = LowerTriangularFromBottomRightMask


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    **asked: Any,
) -> torch.Tensor:
    """Attention of (batch, sequence, heads, width), (batch, sequence, groups, heads, width) or (batch, sequence, width)."""
    ledger.redirect("xformers, as scaled_dot_product_attention")
    if isinstance(attn_bias, type) and issubclass(attn_bias, LowerTriangularMask):
        attn_bias = attn_bias()
    if attn_bias is not None and not isinstance(attn_bias, (torch.Tensor, AttentionBias)):
        raise refuse(f"memory_efficient_attention with a {type(attn_bias).__name__}", DO)
    shape = query.shape
    if query.dim() == 5:
        query, key, value = (one.flatten(2, 3) for one in (query, key, value))
        attn_bias = (
            attn_bias.flatten(1, 2) if isinstance(attn_bias, torch.Tensor) and attn_bias.dim() == 5 else attn_bias
        )
    if query.dim() == 3:
        query, key, value = (one.unsqueeze(2) for one in (query, key, value))
        attn_bias = (
            attn_bias.unsqueeze(1) if isinstance(attn_bias, torch.Tensor) and attn_bias.dim() == 3 else attn_bias
        )
    if isinstance(attn_bias, BlockDiagonalMask):
        parts = [
            _attention(query[:, rows], key[:, columns], value[:, columns], inner, p, scale)
            for rows, columns, inner in attn_bias.blocks()
        ]
        result = torch.cat(parts, dim=1)
    else:
        result = _attention(query, key, value, attn_bias, p, scale)
    return result.reshape(*shape[:-1], value.shape[-1])


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, p: float, scale: float | None
) -> torch.Tensor:
    causal = type(bias) is LowerTriangularMask
    if isinstance(bias, AttentionBias):
        rows, columns = query.shape[1], key.shape[1]
        bias = None if causal else bias.materialize((1, 1, rows, columns), query.dtype, query.device)
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    result = scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, is_causal=causal, scale=scale)
    return result.transpose(1, 2)


MASKS = {
    kind.__name__: kind
    for kind in (
        *(AttentionBias, LowerTriangularMask, LowerTriangularMaskWithTensorBias, LowerTriangularFromBottomRightMask),
        *(BlockDiagonalMask, BlockDiagonalCausalMask, BlockDiagonalCausalFromBottomRightMask),
    )
}
OPS = {"memory_efficient_attention": memory_efficient_attention, "unbind": torch.unbind, **MASKS}
