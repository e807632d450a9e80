"""flash_attn's functions, by scaled_dot_product_attention: theirs are CUDA kernels.

What torch cannot do as they do (returned probabilities, rotary embedding inside the cache's kernel) is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from anytorch.run.ledger import ledger
from anytorch.run.refusals import refuse

EVERYWHERE = (-1, -1)  # a window of attention without an edge
DO = "call torch.nn.functional.scaled_dot_product_attention"
LACKING = {  # argument → the value that asks for nothing
    "return_attn_probs": False,
    "return_softmax_lse": False,
    "rotary_cos": None,
    "rotary_sin": None,
}


def _distance(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """How far each key is behind (below 0) or ahead of each query. The last query is aligned with the last key."""
    keys = torch.arange(columns, device=like.device)
    queries = torch.arange(rows, device=like.device) + (columns - rows)
    return keys[None, :] - queries[:, None]


def _mask(distance: torch.Tensor, causal: bool, window: tuple[int, int]) -> torch.Tensor | None:
    """True where a query may look."""
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return None
    seen = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    return seen


def _refuse_what_torch_lacks(name: str, asked: dict[str, Any]) -> None:
    for option, plain in LACKING.items():
        value = asked.get(option, plain)
        if value is not plain and value != plain:
            raise refuse(f"{name}({option}=…)", DO)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **asked: Any,
) -> torch.Tensor:
    """Attention of (batch, sequence, heads, width) tensors; k and v may have fewer heads."""
    _refuse_what_torch_lacks("flash_attn_func", {"return_attn_probs": return_attn_probs, **asked})
    ledger.redirect("flash_attn, as scaled_dot_product_attention")
    if k.shape[2] != q.shape[2]:
        k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], dim=2) for one in (k, v))
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    rows, columns = q.shape[2], k.shape[2]
    distance = _distance(rows, columns, q)
    mask = _mask(distance, causal, window_size)
    if alibi_slopes is not None:  # of the heads, or of the heads of each sequence
        bias = -alibi_slopes.to(q.dtype)[..., None, None] * distance.abs().to(q.dtype)
        bias = bias if bias.dim() == 4 else bias[None]
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if softcap:
        result = _capped(q, k, v, softcap, mask, dropout_p, softmax_scale)
    else:
        result = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=softmax_scale)
    return (result.nan_to_num() if rows > columns else result).transpose(1, 2)  # a query that sees nothing gets zeros


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cap: float,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """Attention whose scores stay within ±cap, as Gemma's do: torch's own function has no such thing."""
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0).to(v.dtype) @ v


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of one (batch, sequence, 3, heads, width) tensor."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of q with one (batch, sequence, 2, heads, width) tensor."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of sequences that lie end to end in (tokens, heads, width) tensors; k and v may be pages of a table."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = [q.new_empty(0, q.shape[1], v.shape[-1])]
    for number in range(len(ends_q) - 1):
        rows, columns = (slice(ends[number], ends[number + 1]) for ends in (ends_q, ends_k))
        if block_table is None:
            keys, values = k[columns], v[columns]
        else:
            keys, values = (one[block_table[number]].flatten(0, 1)[: columns.stop - columns.start] for one in (k, v))
        slopes = alibi_slopes[number] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        made = flash_attn_func(
            q[None, rows], keys[None], values[None], dropout_p, softmax_scale, causal, window_size, softcap, slopes,
            deterministic, return_attn_probs,
        )  # fmt: skip
        parts.append(made[0])
    return torch.cat(parts)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int = 0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Attention of sequences that lie end to end in one (tokens, 3, heads, width) tensor."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The same with keys and values in one (tokens, 2, heads, width) tensor."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **kwargs)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Attention of (batch, sequence, heads, width) queries with a cache of keys and values, to which `k` and `v` are added
    first. The cache is (rows, sequence, heads, width), or pages of it, which `block_table` lists for each sequence."""
    asked = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "return_softmax_lse": return_softmax_lse}
    _refuse_what_torch_lacks("flash_attn_with_kvcache", asked)
    batch = q.shape[0]
    whole = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = _per_sequence(whole if cache_seqlens is None else cache_seqlens, batch)
    starts = _per_sequence(0 if cache_leftpad is None else cache_leftpad, batch)
    rows = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
    parts = []
    for number, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        kept = []
        for cache, new in ((k_cache, k), (v_cache, v)):
            end = length
            if new is not None:
                end += new.shape[1]
                _store(cache, new[number], length, rows[number], None if block_table is None else block_table[number])
            held = cache[rows[number]] if block_table is None else cache[block_table[number]].flatten(0, 1)
            kept.append(held[None, start:end])
        slopes = alibi_slopes[number] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        keys, values = kept
        one = flash_attn_func(q[number : number + 1], keys, values, softcap=softcap, alibi_slopes=slopes, **options)
        parts.append(one)
    return torch.cat(parts)


def _per_sequence(told: int | torch.Tensor, batch: int) -> list[int]:
    return [told] * batch if isinstance(told, int) else [int(one) for one in told.tolist()]


def _store(cache: torch.Tensor, new: torch.Tensor, start: int, row: int, pages: torch.Tensor | None) -> None:
    """Write new keys or values of one sequence behind what its cache holds."""
    if pages is None:
        cache[row, start : start + new.shape[0]] = new
        return
    places = torch.arange(start, start + new.shape[0], device=cache.device)
    cache[pages.long()[places // cache.shape[1]], places % cache.shape[1]] = new


def index_first_axis(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows of those numbers."""
    return rows.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens that a (batch, sequence) mask keeps, end to end; their numbers, the sequences' ends, the longest one, and
    how many tokens of each sequence are used."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, ends, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The tokens of `unpad_input` in their places again, with zeros between them."""
    places = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    filled: torch.Tensor = places.index_copy(0, indices, hidden_states)
    return filled.view(batch, seqlen, *hidden_states.shape[1:])


FLASH = {
    function.__name__: function
    for function in (
        *(flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_with_kvcache),
        *(flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func),
    )
}
PADDING = {function.__name__: function for function in (index_first_axis, unpad_input, pad_input)}
