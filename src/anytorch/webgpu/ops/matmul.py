"""The ops that are matrix products: mm, bmm, addmm, baddbmm, linear and the ones made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.gpu.buffers import TAG
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.runtime import device_memory, open_runtime
from anytorch.gpu.wgsl.types import KINDS, supported
from anytorch.webgpu.direct import unwatched
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import check_devices, to_meta
from anytorch.webgpu.pointwise import name_of
from anytorch.webgpu.products import FLOATS, INTEGERS, Plan, dispatch, finisher, make_plan, product
from anytorch.webgpu.tensors import aten, new_contiguous, sized_tensor, storage_nbytes
from anytorch.webgpu.threads import Launch


def _usable(*tensors: torch.Tensor) -> bool:
    dtype = tensors[0].dtype
    if any(tensor.dtype is not dtype for tensor in tensors):
        return False
    return dtype in (*FLOATS, *INTEGERS, torch.float64) and supported(name_of(dtype), open_runtime().features)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Operands with a lazy negation carry it as a bit that no kernel looks at."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


_accepted: dict[Any, bool] = {}


def _accepts(op: Any, *tensors: torch.Tensor) -> bool:
    """Can a kernel of ours compute this? Raises torch's own errors about sizes and dtypes; both once per geometry."""
    key = (op, *[(tensor.size(), tensor.dtype) for tensor in tensors])
    found = _accepted.get(key)
    if found is None:
        check_devices(str(op), *tensors)
        op(*[to_meta(tensor) for tensor in tensors])
        found = _accepted[key] = _usable(*tensors)
    return found


def _into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    if out is None:
        return made
    if out.shape != made.shape:
        torch._prims_common.wrappers._maybe_resize_out(out, made.shape)
    return out.copy_(made)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not _accepts(aten.bmm.default, a, b):
        made: torch.Tensor = fallback(aten.bmm.default, a, b)
        return made
    result = new_contiguous((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
    return product(_plain(a), _plain(b), result)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not _accepts(aten.mm.default, a, b):
        made: torch.Tensor = fallback(aten.mm.default, a, b)
        return made
    return product(_plain(a), _plain(b), new_contiguous((a.shape[0], b.shape[1]), a.dtype))


_decomposed_linear = aten.linear.default.decompose


class Linear:
    """A layer's product seen before: its sizes, and the plan of the product of matrices it comes to."""

    __slots__ = ("finish", "nbytes", "parts", "plan", "result")

    def __init__(self, rows: torch.Tensor, made: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> None:
        self.result = (tuple(made.size()), tuple(made.stride()), made.dtype)
        self.nbytes = storage_nbytes(*self.result)
        self.plan = plan
        self.parts: tuple[int, ...] = ()
        self.finish: Launch | None = None
        if plan.two_steps:
            m, n = rows.shape[0], made.shape[-1]
            self.parts = (1, plan.splits, n, m) if plan.swapped else (1, plan.splits, m, n)
            parts = new_contiguous(self.parts, torch.float32)
            swapped = parts.transpose(2, 3) if plan.swapped else parts
            self.finish = finisher(swapped, made.view(1, m, n), bias, 1.0, 1.0, "")

    def __call__(self, px: int, pw: int, pd: int, bias: torch.Tensor | None) -> torch.Tensor:
        out = sized_tensor(*self.result, self.nbytes)
        if self.finish is None:
            dispatch(open_runtime(), self.plan, px, pw, out.data_ptr(), pd)
            return out
        parts = new_contiguous(self.parts, torch.float32)
        dispatch(open_runtime(), self.plan, px, pw, parts.data_ptr(), 0)
        if bias is not None:
            self.finish(parts, bias, out)
        else:
            self.finish(parts, out)
        return out


_linears: dict[Any, Linear | None] = device_memory()  # None: this geometry is left to torch's composition


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch makes this op of views and addmm, each of which costs a trip through Python. Without gradients: one launch."""
    if not unwatched(x, weight, bias):
        composed: torch.Tensor = _decomposed_linear(x, weight, bias)
        return composed
    px, pw = x.data_ptr(), weight.data_ptr()
    key: tuple[Any, ...] = (
        x.dtype,
        x.size(),
        x.stride(),
        weight.dtype,
        weight.size(),
        weight.stride(),
        px & 15,
        pw & 15,
    )
    pd = 0
    ours = px & pw & TAG
    if bias is not None:
        pd = bias.data_ptr()
        ours &= pd
        key = (*key, bias.dtype, bias.size(), bias.stride())
    known = _linears.get(key)
    if known is not None and ours:
        try:
            return known(px, pw, pd, bias)
        except BindingTooLarge:  # the same sizes in larger buffers
            return _decomposed_linear(x, weight, bias)  # type: ignore[no-any-return]
    made: torch.Tensor = _decomposed_linear(x, weight, bias)  # checks sizes and devices
    if key not in _linears:
        _linears[key] = _known_linear(x, weight, bias, made)
    return made


def _known_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, made: torch.Tensor
) -> Linear | None:
    """None where something must be copied or cast before or after."""
    tensors = (x, weight, made) if bias is None else (x, weight, made, bias)
    plain = all(tensor.dtype in FLOATS and tensor.numel() for tensor in tensors)
    whole = x.dim() > 1 and x.is_contiguous() and weight.dim() == 2 and (bias is None or bias.dim() == 1)
    if not (plain and whole and _usable(*tensors)):
        return None
    rows = x.view(-1, x.shape[-1])
    try:
        plan = make_plan(open_runtime(), rows, weight.t(), made.view(rows.shape[0], -1), bias, "")
    except BindingTooLarge:
        return None
    if plan.two_steps and KINDS[name_of(x.dtype)].lanes > 1:
        return None
    return Linear(rows, made, bias, plan)


def _added(
    op: Any, d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any, activation: str = ""
) -> torch.Tensor | None:
    """beta * d + alpha * a @ b in one kernel for floats; None where the CPU must do it."""
    if not _accepts(op, d, a, b) or isinstance(beta, complex) or isinstance(alpha, complex):
        return None
    dtype = a.dtype
    if dtype not in FLOATS:  # exact in integers: scaled and added by pointwise kernels
        whole = mm(a, b) if a.dim() == 2 else bmm(a, b)
        alpha, beta = int(alpha), int(beta)  # as torch does
        scaled = whole * alpha if alpha != 1 else whole
        return scaled if beta == 0 else torch.add(scaled, d, alpha=beta)
    result = new_contiguous((*a.shape[:-1], b.shape[-1]), dtype)
    added = _plain(d) if beta != 0 else None
    return product(_plain(a), _plain(b), result, added, float(alpha), float(beta), activation)


def addmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    made = _added(aten.addmm.default, d, a, b, beta, alpha)
    return fallback(aten.addmm.default, d, a, b, beta=beta, alpha=alpha) if made is None else made


def baddbmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    made = _added(aten.baddbmm.default, d, a, b, beta, alpha)
    return fallback(aten.baddbmm.default, d, a, b, beta=beta, alpha=alpha) if made is None else made


def addmm_activation(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> torch.Tensor:
    op = aten._addmm_activation.default
    made = _added(aten.addmm.default, d, a, b, beta, alpha, "gelu" if use_gelu else "relu")
    if made is None or a.dtype not in FLOATS:
        made = fallback(op, d, a, b, beta=beta, alpha=alpha, use_gelu=use_gelu)
    return made


def addmv(d: torch.Tensor, a: torch.Tensor, x: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    _accepts(aten.addmv.default, d, a, x)
    made = _added(aten.addmm.default, d.unsqueeze(-1), a, x.unsqueeze(1), beta, alpha)
    return fallback(aten.addmv.default, d, a, x, beta=beta, alpha=alpha) if made is None else made.squeeze(1)


def addbmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    accepted = _accepts(aten.addbmm.default, d, a, b)
    batch, rows, inner = a.shape
    if not accepted or isinstance(beta, complex) or isinstance(alpha, complex):
        made: torch.Tensor = fallback(aten.addbmm.default, d, a, b, beta=beta, alpha=alpha)
        return made
    # The sum over the batch is part of the sum over k.
    left = a.transpose(0, 1).reshape(rows, batch * inner)
    return addmm(d, left, b.reshape(batch * inner, b.shape[2]), beta=beta, alpha=alpha)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not _accepts(aten.dot.default, x, y):
        made: torch.Tensor = fallback(aten.dot.default, x, y)
        return made
    return mm(x.unsqueeze(0), y.unsqueeze(1)).view(())


def vdot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.is_complex() or y.is_complex() or not _usable(x, y):
        made: torch.Tensor = fallback(aten.vdot.default, x, y)
        return made
    return dot(x, y)


def _with_out(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return _into(out, function(*args, **kwargs))

    return kernel


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.copy_(function(self, *args, **kwargs))

    return kernel


def register(library: torch.library.Library) -> None:
    # Both keys: with autograd the op is taken apart before autograd sees it, in inference mode there is no autograd.
    library.impl("linear", linear, "AutogradPrivateUse1")
    library.impl("linear", linear, "PrivateUse1")
    for name, function in (
        ("mm", mm),
        ("bmm", bmm),
        ("addmm", addmm),
        ("baddbmm", baddbmm),
        ("addmv", addmv),
        ("addbmm", addbmm),
        ("_addmm_activation", addmm_activation),
        ("dot", dot),
        ("vdot", vdot),
    ):
        library.impl(name, function, "PrivateUse1")
        if name in ("dot", "vdot"):
            continue
        library.impl(f"{name}.out", _with_out(function), "PrivateUse1")
        if name.startswith(("add", "badd")):
            library.impl(f"{name}_", _in_place(function), "PrivateUse1")
