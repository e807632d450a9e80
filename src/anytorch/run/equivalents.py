"""flash_attn and xformers, as far as torch has the same: their attention functions, by scaled_dot_product_attention.

The modules are made here, whether the packages are installed or not: theirs are CUDA kernels. What torch cannot do as
they do (ALiBi slopes, soft caps, returned probabilities) is refused with a message.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from anytorch.run.ledger import ledger
from anytorch.run.refusals import missing_name, refuse

NAMES = ("flash_attn", "xformers")
EVERYWHERE = (-1, -1)  # a window of attention without an edge
DO = "call torch.nn.functional.scaled_dot_product_attention"


def _mask(rows: int, columns: int, causal: bool, window: tuple[int, int], like: torch.Tensor) -> torch.Tensor | None:
    """True where a query may look. As in flash_attn, the last query is aligned with the last key."""
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return None
    distance = torch.arange(columns)[None, :] - (torch.arange(rows)[:, None] + columns - rows)
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    return seen.to(like.device)


def _refuse_what_torch_lacks(name: str, asked: dict[str, Any]) -> None:
    for option, plain in (
        ("alibi_slopes", None),
        ("softcap", 0.0),
        ("return_attn_probs", False),
        ("block_table", None),
    ):
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
    **asked: Any,
) -> torch.Tensor:
    """Attention of (batch, sequence, heads, width) tensors; k and v may have fewer heads."""
    _refuse_what_torch_lacks("flash_attn_func", asked)
    ledger.redirect("flash_attn, as scaled_dot_product_attention")
    if k.shape[2] != q.shape[2]:
        k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], dim=2) for one in (k, v))
    result = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=_mask(q.shape[1], k.shape[1], causal, window_size, q),
        dropout_p=dropout_p,
        scale=softmax_scale,
    )
    return result.nan_to_num().transpose(1, 2) if q.shape[1] > k.shape[1] else result.transpose(1, 2)


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
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of sequences that lie end to end in (tokens, heads, width) tensors."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for number in range(len(ends_q) - 1):
        rows, columns = (slice(ends[number], ends[number + 1]) for ends in (ends_q, ends_k))
        parts.append(flash_attn_func(q[None, rows], k[None, columns], v[None, columns], *args, **kwargs)[0])
    return torch.cat(parts)


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
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, ends, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The tokens of `unpad_input` in their places again, with zeros between them."""
    places = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    filled: torch.Tensor = places.index_copy(0, indices, hidden_states)
    return filled.view(batch, seqlen, *hidden_states.shape[1:])


class LowerTriangularMask:
    """xformers' causal mask: a query sees its own place and what is before it."""


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
    """Attention of (batch, sequence, heads, width) or (batch, sequence, width) tensors."""
    ledger.redirect("xformers, as scaled_dot_product_attention")
    one_head = query.dim() == 3
    if one_head:
        query, key, value = (one.unsqueeze(2) for one in (query, key, value))
    causal = isinstance(attn_bias, LowerTriangularMask) or attn_bias is LowerTriangularMask
    if attn_bias is not None and not causal and not isinstance(attn_bias, torch.Tensor):
        raise refuse(f"memory_efficient_attention with a {type(attn_bias).__name__}", DO)
    bias = None if causal else attn_bias
    if bias is not None and one_head and bias.dim() == 3:
        bias = bias.unsqueeze(1)
    result = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=bias,
        dropout_p=p,
        is_causal=causal,
        scale=scale,
    ).transpose(1, 2)
    return result.squeeze(2) if one_head else result


FLASH = {
    function.__name__: function
    for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func)
}
PADDING = {function.__name__: function for function in (index_first_axis, unpad_input, pad_input)}
XFORMERS = {
    "memory_efficient_attention": memory_efficient_attention,
    "LowerTriangularMask": LowerTriangularMask,
    "unbind": torch.unbind,
}
VERSION = "0.0.0+anytorch"  # no release: whoever asks for a certain one is told that this is none
# Module → its contents. A package has submodules here, and nothing else below it can be imported.
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **FLASH},
    "flash_attn.flash_attn_interface": FLASH,
    "flash_attn.bert_padding": PADDING,
    "xformers": {"__version__": VERSION, "_has_cpp_library": False},
    "xformers.ops": XFORMERS,
    "xformers.ops.fmha": XFORMERS,
    "xformers.version": {"__version__": VERSION},
}


def asked_by_import(frame: FrameType) -> bool:
    """True if the frame is at `from module import name`, which turns an AttributeError into a message of its own."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def fill(module: ModuleType) -> None:
    """Give a new module of one of these names its contents."""
    vars(module).update(MODULES[module.__name__])

    def lacking(name: str) -> Any:
        if not name.startswith("__") and asked_by_import(sys._getframe(1)):
            raise missing_name(module.__name__, name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = lacking
    parent, _, name = module.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)
