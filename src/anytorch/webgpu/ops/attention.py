"""scaled_dot_product_attention: one kernel forward; backward recomputes the probabilities from the kept row sums.

torch chooses between implementations through a table that only C++ can enter, so the op itself is ours: what the kernel
handles goes to `_scaled_dot_product_fused_attention_overrideable`, which autograd knows; the rest (dropout, odd head sizes)
goes to torch's composition of matmul and softmax, which runs on this device too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, TAG
from anytorch.gpu.launch import MOST_GROUPS, Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import Runtime, open_runtime
from anytorch.gpu.wgsl.attention import render
from anytorch.gpu.wgsl.attention_kernel import Attention
from anytorch.webgpu import matrix_attention
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import FLOATS, computable, name_of
from anytorch.webgpu.folds import has_subgroups
from anytorch.webgpu.launch import Result, check_devices, result_of, unwatched
from anytorch.webgpu.matrix_products import in_use
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.per_element import per_element
from anytorch.webgpu.products import product
from anytorch.webgpu.tensors import KEY, aten, new_contiguous, new_tensor, sized_tensor

MATH, OVERRIDEABLE = 0, 4  # torch.nn.attention.SDPBackend
SHORT = 4  # up to this many queries, a workgroup each
FEW = 8  # up to this many queries, the keys are split over workgroups if there are more than
UNSPLIT = 256  # of them: a second launch costs as much as reading so many
MOST_LINES = 8  # queries, of all heads that share the keys, in such a workgroup
ENOUGH_GROUPS = 512
LARGEST = 256  # head dimension
_fused = aten._scaled_dot_product_fused_attention_overrideable.default


def choice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Which implementation scaled_dot_product_attention takes for these operands."""
    same = q.dtype is k.dtype is v.dtype and q.dtype in FLOATS and computable(q.dtype)
    plain = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    if not same or not plain or dropout > 0.0 or (mask is not None and causal):
        return MATH
    dimension = q.shape[3]
    if dimension % 4 or not 4 <= dimension <= LARGEST or v.shape[3] != dimension or k.shape[3] != dimension:
        return MATH
    heads = k.shape[1]
    if v.shape[1] != heads or heads == 0 or q.shape[1] % heads or (q.shape[1] != heads and not enable_gqa):
        return MATH
    if q.numel() == 0 or k.numel() == 0 or k.shape[2] != v.shape[2]:
        return MATH
    if mask is not None and (
        mask.requires_grad
        or mask.device != q.device
        or mask.dtype not in (torch.bool, q.dtype, torch.float32)
        or not broadcasts(mask, (*q.shape[:3], k.shape[2]))
    ):
        return MATH
    return OVERRIDEABLE


def broadcasts(mask: torch.Tensor, size: tuple[int, ...]) -> bool:
    padded = (1,) * (len(size) - mask.dim()) + tuple(mask.shape)
    return mask.dim() <= len(size) and all(have in (1, want) for have, want in zip(padded, size, strict=False))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Rows must be whole aligned vec4s; for matrix cores, whole units of 16 bytes."""
    eights = tensor.dtype.itemsize == 2 and tensor.shape[3] % 8 == 0 and in_use(open_runtime(), tensor.dtype)
    unit = 8 if eights else 4
    aligned = (tensor.data_ptr() & OFFSET_MASK) // tensor.dtype.itemsize % unit == 0
    if tensor.stride(3) == 1 and aligned and all(step % unit == 0 for step in tensor.stride()[:3]):
        return tensor
    dense = contiguous(tensor)
    return dense if (dense.data_ptr() & 15) == 0 else dense.clone()


def _kernel(runtime: Runtime, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Attention:
    dtype, dimension, queries = name_of(q.dtype), q.shape[3], q.shape[2]
    whole = Attention("row", dtype, dimension, causal, name_of(mask.dtype) if mask is not None else "")
    if runtime.adapter.software:
        return whole
    limit = int(runtime.limits["max-compute-workgroup-storage-size"])
    keys = min(k.shape[2], queries) if causal else k.shape[2]
    if queries <= FEW and keys > UNSPLIT:
        split = _split_kernel(runtime, whole, q, k)
        if split.shared_bytes <= limit:
            return split
    if queries <= SHORT:
        return replace(whole, form="short")
    for block, keys in ((64, 64), (32, 64), (32, 32), (16, 16)):
        kernel = replace(whole, form="tile", queries=block, keys=keys)
        if kernel.shared_bytes <= limit:
            return kernel
    return whole


def _split_kernel(runtime: Runtime, whole: Attention, q: torch.Tensor, k: torch.Tensor) -> Attention:
    """As many keys per workgroup as leave enough workgroups to keep a large GPU's memory busy."""
    lines = q.shape[1] // k.shape[1] * q.shape[2]
    block = min(lines, MOST_LINES)
    others = q.shape[0] * k.shape[1] * -(-lines // block)
    keys = next((n for n in (128, 64) if others * (k.shape[2] // n) >= ENOUGH_GROUPS), 32)
    return replace(whole, form="split", queries=block, keys=keys, subgroups=has_subgroups(runtime))


def _like_query(q: torch.Tensor) -> torch.Tensor:
    """torch's fake kernel promises a dense output whose dimensions are nested as the query's; ours keep rows whole."""
    order = sorted(range(3), key=lambda axis: q.stride(axis), reverse=True)
    strides = [0, 0, 0, 1]
    step = q.shape[3]
    for axis in reversed(order):
        strides[axis] = step
        step *= q.shape[axis]
    return new_tensor(q.shape, strides, q.dtype)


class Attend:
    """The plan for operands of one geometry, and where keys are split over workgroups a second that joins the parts."""

    __slots__ = ("join", "parts", "plan", "result")

    def __init__(self, kernel: Attention, bound: Sequence[torch.Tensor], scale: float) -> None:
        """`bound` are q, k, v, the mask if there is one, the result and the sums if they are wanted."""
        q, k, v, *rest = bound
        mask = rest.pop(0) if kernel.mask else None
        out = rest[0]
        read = bound[: len(bound) - len(rest)]
        kernel = replace(kernel, sums=len(rest) > 1)
        batch, heads, queries, dimension = q.shape
        shared = heads // k.shape[1]
        blocks, total = queries, batch * heads * queries
        lines, parts = total, 1
        if kernel.form in ("tile", matrix_attention.FORM):
            blocks = -(-queries // kernel.queries)
            total = batch * heads * blocks
        elif kernel.form == "split":
            blocks = -(-shared * queries // kernel.queries)
            parts = -(-k.shape[2] // kernel.keys)
            total = batch * k.shape[1] * blocks * parts
        groups = -(-total // kernel.threads) if kernel.form == "row" else total
        x, y = grid(groups)
        if kernel.form == "split":  # the second launch has its own grid, but the same parameters: lines are few
            x = min(x, lines, MOST_GROUPS)
            y = -(-groups // x)
        strides = [step for tensor in (q, k, v, out) for step in tensor.stride()[:3]]
        hidden = mask.stride() if mask is not None else (0, 0, 0, 0)
        tail = (queries, k.shape[2], heads, shared, blocks, x, total, float(scale), parts, *strides, *hidden)
        read_places, written = ([tensor.dtype.itemsize for tensor in tensors] for tensors in (read, rest))
        self.result = result_of(out.size(), out.dtype, out.stride())
        self.join: Plan | None = None
        self.parts: Result | None = None
        if kernel.form == "split":
            join = Attention("join", kernel.dtype, dimension, sums=kernel.sums)
            self.parts = result_of((lines * parts * (dimension + 4),), torch.float32)
            self.join = Plan(join, render, (x, -(-lines // x)), [4, *written], join.writable, tail=tail)
            written = [4]
        runtime = open_runtime()
        cores = kernel.form == matrix_attention.FORM
        self.plan = Plan(
            kernel,
            partial(matrix_attention.rendered, runtime) if cores else render,
            (x, y),
            [*read_places, *written],
            kernel.writable,
            tail=tail,
        )

    def __call__(self, read: Sequence[int], *written: int) -> None:
        """Launch, given the addresses of q, k, v and the mask, and of the result and the sums, where there are such."""
        if self.join is None or self.parts is None:
            self.plan((*read, *written))
            return
        parts = sized_tensor(*self.parts)
        self.plan((*read, parts.data_ptr()))
        self.join((parts.data_ptr(), *written))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    *,
    wants_sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, Attend]:
    """The output, laid out as the query is, and the row sums' logarithms; the plans they were made by."""
    q, k, v = _readable(q), _readable(k), _readable(v)
    batch, heads, queries, _ = q.shape
    if mask is not None:
        mask = mask.expand(batch, heads, queries, k.shape[2])
    out = _like_query(q)
    sums = new_contiguous((batch, heads, queries), torch.float32) if wants_sums else None
    read = [t for t in (q, k, v, mask) if t is not None]
    written = [t for t in (out, sums) if t is not None]
    bound = [*read, *written]
    key = ("attention", causal, scale, wants_sums, *[(t.dtype, t.size(), t.stride()) for t in bound])
    attend = plans[key]
    if attend is None:
        runtime = open_runtime()

        def run(kernel: Attention) -> torch.Tensor:
            own = _like_query(q)
            Attend(kernel, [*read, own], scale)([tensor.data_ptr() for tensor in read], own.data_ptr())
            return own

        kernel = _kernel(runtime, q, k, mask, causal)
        if kernel.form in ("tile", "row"):
            kernel = matrix_attention.choose(runtime, kernel, (batch * heads, queries, k.shape[2]), run)
        attend = plans[key] = Attend(kernel, bound, scale)
    attend([tensor.data_ptr() for tensor in read], *[tensor.data_ptr() for tensor in written])
    return out, sums, attend


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    check_devices("scaled_dot_product_attention", q, k, v, mask)
    if choice(q, k, v, None, dropout, causal, scale=scale, enable_gqa=True) != OVERRIDEABLE:
        raise RuntimeError(
            "webgpu: this fused attention takes 4-D float tensors of equal batch, without dropout, with a head dimension "
            f"that is a multiple of 4 and at most {LARGEST}; got {tuple(q.shape)} {q.dtype}, dropout {dropout}"
        )
    out, sums, _ = forward(q, k, v, mask, causal, _scale(q, scale))
    nothing = new_contiguous((0,), torch.int64)
    return out, sums, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    grad_input_mask: Any,
    out: torch.Tensor,
    sums: torch.Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """With P the probabilities, dP = g V', dS = P (dP - rowsum(g out)); then three products. Scores exist in f32 here."""
    _sums_q, _sums_k, _max_q, _max_k, _dropout, causal, *_philox = rest
    batch, heads, queries, dimension = q.shape
    keys, key_heads = k.shape[2], k.shape[1]
    factor = _scale(q, scale)
    repeated = heads // key_heads
    flat = (batch * heads, -1, dimension)
    left, g = q.reshape(flat), gradient.reshape(flat)
    right, values = ((t.repeat_interleave(repeated, 1) if repeated > 1 else t).reshape(flat) for t in (k, v))
    scores = product(left, right.transpose(1, 2), new_contiguous((batch * heads, queries, keys), torch.float32))
    inner = product(g, values.transpose(1, 2), new_contiguous(scores.shape, torch.float32))
    outer = (gradient.float() * out.float()).sum(-1).contiguous()
    inputs = [("scores", scores), ("inner", inner), ("outer", outer), ("sums", sums)]
    weights, steps = _probabilities(inputs, mask, causal, factor, (batch, heads, queries, keys), q.dtype)
    to_q = product(steps, right, new_contiguous(left.shape, q.dtype), alpha=factor).view(q.shape)
    to_k = product(steps.transpose(1, 2), left, new_contiguous(right.shape, q.dtype), alpha=factor)
    to_v = product(weights.transpose(1, 2), g, new_contiguous(right.shape, q.dtype))
    shape = (batch, key_heads, repeated, keys, dimension)
    if repeated > 1:
        return to_q, to_k.view(shape).sum(2), to_v.view(shape).sum(2), None
    whole = (batch, heads, keys, dimension)
    to_mask = steps.view(batch, heads, queries, keys) if mask is not None and grad_input_mask[3] else None
    if to_mask is not None and mask is not None:
        to_mask = to_mask.sum_to_size(mask.shape)
    return to_q, to_k.view(whole), to_v.view(whole), to_mask


def _probabilities(
    inputs: list[tuple[str, torch.Tensor]],
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """P and dS of the scores, dP ("inner"), rowsum(g out) ("outer") and the row sums' logarithms."""
    batch, heads, queries, keys = sizes
    weights, steps = (new_contiguous(inputs[0][1].shape, torch.float32) for _ in range(2))
    numbers: list[tuple[str, str, Any]] = [("queries", "u32", queries), ("keys", "u32", keys), ("scale", "f32", scale)]
    value = "load_scores(i) * p.scale"
    if mask is not None:
        mask = mask.expand(batch, heads, queries, keys)
        inputs.append(("mask", mask))
        numbers.append(("heads", "u32", heads))
        numbers += [(f"m{j}", "u32", step) for j, step in enumerate(mask.stride())]
        place = (
            "(row / (p.queries * p.heads)) * p.m0 + ((row / p.queries) % p.heads) * p.m1 + query * p.m2 + key * p.m3"
        )
        if mask.dtype is torch.bool:
            value = f"select(-3.0e38, {value}, load_mask({place}) != 0)"
        else:
            value = f"max({value} + load_mask({place}), -3.0e38)"
    hidden = "key > query" if causal else "false"
    body = (
        "  let row = i / p.keys; let key = i % p.keys; let query = row % p.queries;\n"
        f"  var w = 0.0; let s = {value};\n"
        f"  if (!({hidden}) && s > -3.0e38) {{ w = exp(s - load_sums(row)); }}\n"
        "  store_weights(i, w); store_steps(i, w * (load_inner(i) - load_outer(row)));"
    )
    per_element(inputs, [("weights", weights), ("steps", steps)], numbers, weights.numel(), body)
    return narrowed(weights, dtype), narrowed(steps, dtype)


def scaled_dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    direct = unwatched(q, k, v, mask)
    if direct:  # the same kernel without a second trip through the dispatcher
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        ours = addresses[0] & addresses[1] & addresses[2] & TAG
        aligned = (addresses[0] | addresses[1] | addresses[2]) & 15
        if mask is not None:
            addresses.append(mask.data_ptr())
            ours &= addresses[3]
        key = (
            *("sdpa", q.dtype, q.size(), q.stride(), k.dtype, k.size(), k.stride(), v.dtype, v.size(), v.stride()),
            (mask.dtype, mask.size(), mask.stride()) if mask is not None else None,
            *(aligned, ours, dropout, causal, scale, enable_gqa),
        )
        known = plans[key]
        if known is not None:
            out = sized_tensor(*known.result)
            known(addresses, out.data_ptr())
            return out
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got "
            f"query.dim: {q.dim()} key.dim: {k.dim()} and value.dim: {v.dim()} instead."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {q.dtype} "
            f"key.dtype: {k.dtype} and value.dtype: {v.dtype} instead."
        )
    if choice(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa) == OVERRIDEABLE:
        if direct:
            made, _, used = forward(q, k, v, mask, causal, _scale(q, scale), wants_sums=False)
            if _readable(q) is q and _readable(k) is k and _readable(v) is v:
                plans[key] = used
            return made
        fused: torch.Tensor = _fused(q, k, v, mask, dropout, causal, scale=scale)[0]
        return fused
    if mask is not None and mask.dtype is torch.bool:
        shown = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        mask = shown.masked_fill(mask.logical_not(), float("-inf"))
    math_op = aten._scaled_dot_product_attention_math.default
    composed: torch.Tensor = math_op(q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return composed


def register(library: torch.library.Library) -> None:
    # Both keys: under autograd the op is taken apart before autograd sees it, in inference mode there is no autograd.
    whole = halving(aten.scaled_dot_product_attention.default, scaled_dot_product_attention)
    library.impl("scaled_dot_product_attention", whole, "AutogradPrivateUse1")
    library.impl("scaled_dot_product_attention", whole, KEY)
    library.impl("_fused_sdp_choice", choice, KEY)
    library.impl(_fused, attention, KEY)
    backward = aten._scaled_dot_product_fused_attention_overrideable_backward.default
    library.impl(backward, halving(backward, attention_backward), KEY)
