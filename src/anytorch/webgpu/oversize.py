"""Tensors beyond what the adapter binds at once (128 MiB at least, 2 GiB on most GPUs): the work is halved until it fits.

A kernel that walks its operands element by element moves a window over their buffers (`in_windows`). The others bind whole
buffers: the op runs on halves of its arguments along a dimension whose slices do not know of each other, each half in a
buffer of its own, and the results are joined (`halving`). All of it stays on the device. Which dimension that is, `RULES`
says; an op without a rule runs on the CPU or raises BindingTooLarge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu.launch import NoKernel
from anytorch.webgpu.tensors import is_ours, storage_nbytes

Windows = tuple[tuple[int, int], ...]
WINDOW_STEP = 256  # bindings start on multiples of this on every adapter


def halves(length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and length of each half; of what is long, the second starts where bindings may."""
    middle = length // 2 if length < 2 * WINDOW_STEP else length // 2 // WINDOW_STEP * WINDOW_STEP
    return (0, middle), (middle, length - middle)


# --- kernels that walk their operands ---------------------------------------------------------------------------------


def in_windows(tensors: Sequence[torch.Tensor], launch: Callable[[list[torch.Tensor], Windows], None]) -> None:
    """Call `launch` with parts of tensors of one shape, and for each the window of its buffer that holds it."""
    largest = max(storage_nbytes(tensor.size(), tensor.stride(), tensor.dtype) for tensor in tensors)
    if largest + 2 * WINDOW_STEP <= open_runtime().binding_limit:
        launch(list(tensors), tuple(window_of(tensor) for tensor in tensors))
        return
    sizes, strides = tensors[-1].shape, tensors[-1].stride()
    longest = max(range(len(sizes)), key=lambda d: sizes[d] * max(strides[d], 1) if sizes[d] > 1 else 0)
    for start, length in halves(sizes[longest]):
        in_windows([tensor.narrow(longest, start, length) for tensor in tensors], launch)


def window_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Offset and size in bytes of the part of its buffer that a tensor touches, as a binding may have them."""
    first = tensor.data_ptr() & OFFSET_MASK
    last = first + storage_nbytes(tensor.size(), tensor.stride(), tensor.dtype)
    start = first // WINDOW_STEP * WINDOW_STEP
    return start, min(-(-last // 16) * 16, open_runtime().buffers[tensor.data_ptr() >> SHIFT].nbytes) - start


# --- kernels that bind whole buffers ----------------------------------------------------------------------------------


class Split(NamedTuple):
    """Which arguments are halved along which dimension, and where the results are joined (None: they are added up).

    An op whose results are not all joined alike has an entry for each.
    """

    dim: int
    tensors: tuple[int, ...]
    joined: int | tuple[int | None, ...] | None
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add


Rule = Callable[[Sequence[Any]], "Split | None"]


def halving(
    op: Any, kernel: Callable[..., Any], otherwise: Callable[..., Any] | None = None, *, or_raise: bool = False
) -> Callable[..., Any]:
    """The kernel of `op`, on halves of arguments that the adapter cannot bind.

    Where that is no help (no rule, or one slice alone is too large), or the kernel says so (NoKernel), `otherwise` is called
    with the op and its arguments; without one the error is the caller's, and with `or_raise` BindingTooLarge is. An op that
    writes to its arguments is not halved: it would write to copies of them.
    """
    writes = op._schema.is_mutable

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return kernel(*args, **kwargs)
            except BindingTooLarge:
                if writes:
                    raise
                return _halved(op, kernel, args, kwargs)
        except (BindingTooLarge, NoKernel) as why:
            if otherwise is None or (or_raise and isinstance(why, BindingTooLarge)):
                raise
        return otherwise(op, *args, **kwargs)

    return call


def _halved(op: Any, kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The kernel's result from halves of its arguments, and from halves of those, until it no longer objects.

    It objects before it launches, so a vain attempt costs no work.
    """
    try:
        near = [bindable_copy(value) if isinstance(value, torch.Tensor) else value for value in args]
        return kernel(*near, **kwargs)
    except BindingTooLarge:
        rule = RULES.get(op._schema.name.removeprefix("aten::") + ("." + op._overloadname).replace(".default", ""))
        split = rule(_in_order(op, args, kwargs)) if rule is not None else None
        if split is None or args[split.tensors[0]].shape[split.dim] < 2:
            raise
    parts = []
    for start, length in halves(args[split.tensors[0]].shape[split.dim]):
        part = list(args)
        for position in split.tensors:
            part[position] = args[position].narrow(split.dim, start, length)
        parts.append(_halved(op, kernel, part, kwargs))
    if not isinstance(parts[0], tuple):
        assert not isinstance(split.joined, tuple)
        return _join(parts, split.joined, split.add)
    dims = split.joined if isinstance(split.joined, tuple) else (split.joined,) * len(parts[0])
    return tuple(_join(pair, dim, split.add) for pair, dim in zip(zip(*parts, strict=True), dims, strict=True))


def _join(parts: Sequence[Any], dim: int | None, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    if parts[0] is None:  # a gradient nobody asked for
        return None
    return torch.cat(list(parts), dim) if dim is not None else add(*parts)


def _in_order(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Every argument in the order of the op's schema, those left out with their defaults."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *[kwargs.get(a.name, a.default_value if a.has_default_value() else None) for a in rest]]


def check_bindable(*tensors: torch.Tensor) -> None:
    """Raise BindingTooLarge if a buffer is too large, for ops that change a tensor in more steps than one."""
    runtime = open_runtime()
    for tensor in tensors:
        nbytes = runtime.buffers[tensor.data_ptr() >> SHIFT].nbytes if tensor.numel() else 0
        if nbytes > runtime.binding_limit:
            raise BindingTooLarge(
                f"webgpu: {nbytes:,} bytes exceed this adapter's limit, {runtime.binding_limit:,} bytes"
            )


def bindable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is a small part of a buffer that is too large to bind."""
    runtime = open_runtime()
    if not is_ours(tensor) or not tensor.numel():
        return tensor
    if runtime.buffers[tensor.data_ptr() >> SHIFT].nbytes <= runtime.binding_limit:
        return tensor
    if tensor.numel() * tensor.dtype.itemsize > runtime.binding_limit:
        return tensor  # a copy would be too large as well
    return tensor.clone()  # channels_last stays


# --- rules: the arguments in the order of the op's schema -----------------------------------------------------------------


def _rows(dim_at: int, *tensors: int) -> Rule:
    """Any dimension but the one the op works along."""

    def rule(args: Sequence[Any]) -> Split | None:
        x = args[tensors[0]]
        return _longest(x, {args[dim_at] % max(x.dim(), 1)}, tensors)

    return rule


def _longest(x: torch.Tensor, taken: set[int], tensors: tuple[int, ...]) -> Split | None:
    free = [dim for dim in range(x.dim()) if dim not in taken and x.shape[dim] > 1]
    dim = max(free, key=lambda d: x.shape[d], default=None)
    return None if dim is None else Split(dim, tensors, dim)


def _first(rank: int | None = None, *others: int, joined: tuple[int | None, ...] | int = 0) -> Rule:
    """The batch: the first dimension of the first argument (and of `others`), if there is one."""

    def rule(args: Sequence[Any]) -> Split | None:
        x = args[0]
        return Split(0, (0, *others), joined) if x.dim() and x.shape[0] > 1 and rank in (None, x.dim()) else None

    return rule


def _norm(normalised_at: int, *others: int, joined: tuple[int | None, ...] | int = 0) -> Rule:
    """The rows; the gradients of weight and bias are sums over them."""

    def rule(args: Sequence[Any]) -> Split | None:
        rows = args[0].dim() > len(args[normalised_at]) and args[0].shape[0] > 1
        return Split(0, (0, *others), joined) if rows else None

    return rule


def _attention(first: int, *others: int) -> Rule:
    """The batch, or the heads where queries and keys have the same; a mask that has the dimension goes along, and in the
    gradients (which have `others`) that of a mask that all slices share is the sum of theirs."""

    def rule(args: Sequence[Any]) -> Split | None:
        q, k, _, mask = (*args, None)[first : first + 4]
        dim = 0 if q.shape[0] > 1 else 1
        if q.dim() != 4 or q.shape[dim] < 2 or (dim == 1 and q.shape[1] != k.shape[1]):
            return None
        with_mask = mask is not None and mask.dim() == 4 and mask.shape[dim] > 1
        tensors = (*range(first, first + 3 + with_mask), *others)
        return Split(dim, tensors, (dim, dim, dim, dim if with_mask else None) if others else dim)

    return rule


def _reduction(add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None) -> Rule:
    """A dimension that is kept; one that is reduced, if none is and partial results can be put together with `add`."""

    def rule(args: Sequence[Any]) -> Split | None:
        x, dims, keepdim = (*args, None, False)[:3]
        dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
        taken = {dim % x.dim() for dim in dims} if x.dim() else set()
        kept = _longest(x, taken, (0,))
        if kept is not None:
            joined = kept.dim if keepdim else kept.dim - sum(dim < kept.dim for dim in taken)
            return kept._replace(joined=joined)
        whole = _longest(x, set(), (0,))
        return None if whole is None or add is None else whole._replace(joined=None, add=add)

    return rule


def _product(a: int, added: int | None = None) -> Rule:
    """The batch, or the rows of the larger operand; what is added to the product goes along. No sum is taken apart."""

    def rule(args: Sequence[Any]) -> Split | None:
        left, right = args[a], args[a + 1]
        dims = [(-3, (a, a + 1)), (-2, (a,)), (-1, (a + 1,))]
        if right.numel() >= left.numel():
            dims[1], dims[2] = dims[2], dims[1]
        for dim, tensors in dims[3 - left.dim() :]:
            if args[tensors[0]].shape[dim] > 1:
                with_added = added is not None and args[added].dim() >= -dim and args[added].shape[dim] > 1
                return Split(dim, (*tensors, added) if with_added and added is not None else tensors, dim)
        return None

    return rule


def _matrix_times_vector(args: Sequence[Any]) -> Split | None:
    """The rows of the matrix, and of what is added if it has as many."""
    added, matrix = args[:2]
    return Split(0, (1, 0) if added.dim() and added.shape[0] > 1 else (1,), 0) if matrix.shape[0] > 1 else None


RULES: dict[str, Rule] = {
    "addmv": _matrix_times_vector,
    "mm": _product(0),
    "bmm": _product(0),
    "addmm": _product(1, 0),
    "baddbmm": _product(1, 0),
    "_addmm_activation": _product(1, 0),
    "_softmax": _rows(1, 0),
    "_log_softmax": _rows(1, 0),
    "_softmax_backward_data": _rows(2, 0, 1),
    "_log_softmax_backward_data": _rows(2, 0, 1),
    "native_layer_norm": _norm(1),
    "_fused_rms_norm": _norm(1),
    "native_layer_norm_backward": _norm(2, 1, 3, 4, joined=(0, None, None)),
    "_fused_rms_norm_backward": _norm(2, 1, 3, joined=(0, None)),
    "sort.stable": _rows(2, 0),
    "topk": _rows(2, 0),
    "sum": _reduction(torch.add),
    "sum.dim_IntList": _reduction(torch.add),
    "mean.dim": _reduction(None),
    "amax": _reduction(torch.maximum),
    "amin": _reduction(torch.minimum),
    "all.dim": _reduction(torch.logical_and),
    "any.dim": _reduction(torch.logical_or),
    "cumsum": _rows(1, 0),
    "convolution_overrideable": _first(),
    "convolution_backward_overrideable": _first(None, 1, joined=(0, None, None)),
    "max_pool2d_with_indices": _first(4),
    "max_pool3d_with_indices": _first(5),
    "max_pool2d_with_indices_backward": _first(4, 1, 7),
    "max_pool3d_with_indices_backward": _first(5, 1, 7),
    "avg_pool2d": _first(4),
    "avg_pool3d": _first(5),
    "avg_pool2d_backward": _first(4, 1),
    "avg_pool3d_backward": _first(5, 1),
    "scaled_dot_product_attention": _attention(0),
    # The gradient, the output and the row sums go with the query.
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention(1, 0, 6, 7),
}
