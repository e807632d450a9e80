"""The ops that are matrix products: mm, bmm, addmm, baddbmm, linear and the ones made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.gpu.buffers import TAG
from anytorch.gpu.launch import Plan
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.dtypes import FLOATS, computable, name_of
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import in_place, op_of, refused, with_out
from anytorch.webgpu.launch import NoKernel, Result, check_devices, infer, result_of, unwatched
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.products import Product, finisher, make_product, product
from anytorch.webgpu.tensors import KEY, aten, new_contiguous, sized_tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _usable(*tensors: torch.Tensor) -> bool:
    dtype = tensors[0].dtype
    if any(tensor.dtype is not dtype for tensor in tensors):
        return False
    return dtype in (*FLOATS, *INTEGERS, torch.float64) and computable(dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Operands with a lazy negation carry it as a bit that no kernel looks at."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _check(op: Any, *tensors: torch.Tensor) -> None:
    """NoKernel unless a kernel of ours can compute this. Raises torch's own errors about sizes and dtypes too; once per
    geometry."""
    key = ("accepts", op, *[(tensor.size(), tensor.dtype) for tensor in tensors])
    found = plans[key]
    if found is None:
        check_devices(op, *tensors)
        a, b = tensors[-2:]
        if a.dim() == b.dim() == 2 and a.shape[1] != b.shape[0]:
            sizes = " and ".join(f"{t.shape[0]}x{t.shape[1]}" for t in (a, b))
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({sizes})")
        infer(op, *tensors)
        found = plans[key] = _usable(*tensors)
    if not found:
        raise NoKernel


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(aten.bmm.default, a, b)
    return product(_plain(a), _plain(b), new_contiguous((a.shape[0], a.shape[1], b.shape[2]), a.dtype))


LONG = 4096  # elements that a thread of a product's may add up one after the other
MOST_BESIDE = 1 << 20


def _by_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """a @ b in float32 where each element is a long sum and there are few of them: parts of it as a batch of products, added
    up by levels, so that the error does not grow with the length. None: one product will do."""
    k = a.shape[1]
    parts = k // LONG
    if parts < 2 or a.shape[0] * b.shape[1] * parts > MOST_BESIDE or a.dtype not in FLOATS:
        return None
    whole, size = parts * LONG, (a.shape[0], b.shape[1])
    left = a.narrow(1, 0, whole).unflatten(1, (parts, LONG)).transpose(0, 1)
    right = b.narrow(0, 0, whole).unflatten(0, (parts, LONG))
    total = product(left, right, new_contiguous((parts, *size), torch.float32)).sum(0)
    if whole < k:
        rest = product(
            a.narrow(1, whole, k - whole), b.narrow(0, whole, k - whole), new_contiguous(size, torch.float32)
        )
        total = total.add_(rest)
    return total


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(aten.mm.default, a, b)
    if a.shape[1] >= 2 * LONG:
        total = _by_parts(_plain(a), _plain(b))
        if total is not None:
            return total.to(a.dtype)
    return product(_plain(a), _plain(b), new_contiguous((a.shape[0], b.shape[1]), a.dtype))


_decomposed_linear = aten.linear.default.decompose


class Linear:
    """A layer's product seen before: its sizes, and the plan of the product of matrices it comes to."""

    __slots__ = ("finish", "parts", "product", "result")

    def __init__(self, product: Product, made: torch.Tensor, bias: torch.Tensor | None, m: int) -> None:
        self.product = product
        self.result = result_of(made.size(), made.dtype, made.stride())
        self.parts: Result | None = None
        self.finish: Plan | None = None
        if product.beside:
            self.parts = result_of(product.parts(m, made.shape[-1]), torch.float32)
            parts = sized_tensor(*self.parts)
            ordered = parts.transpose(2, 3) if product.swapped else parts
            self.finish = finisher(ordered, made.view(1, m, -1), bias, 1.0, 1.0, "")

    def __call__(self, x: int, weight: int, bias: int) -> torch.Tensor:
        out = sized_tensor(*self.result)
        if self.finish is None or self.parts is None:
            self.product(x, weight, out.data_ptr(), bias)
            return out
        parts = sized_tensor(*self.parts)
        self.product(x, weight, parts.data_ptr())
        address = parts.data_ptr()
        self.finish((address, bias, out.data_ptr()) if bias else (address, out.data_ptr()))
        return out


LEFT_TO_TORCH = "something must be copied or cast before or after"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch makes this op of views and addmm, each of which costs a trip through Python. Without gradients: one launch."""
    if not unwatched(x, weight, bias):
        composed: torch.Tensor = _decomposed_linear(x, weight, bias)
        return composed
    px, pw, pd = x.data_ptr(), weight.data_ptr(), 0
    ours = px & pw & TAG
    key: tuple[Any, ...] = (
        *("linear", x.dtype, x.size(), x.stride(), px & 15),
        *(weight.dtype, weight.size(), weight.stride(), pw & 15),
    )
    if bias is not None:
        pd = bias.data_ptr()
        ours &= pd
        key = (*key, bias.dtype, bias.size(), bias.stride())
    known = plans[key]
    if type(known) is Linear and ours:
        try:
            return known(px, pw, pd)
        except BindingTooLarge:  # the same sizes in larger buffers
            return _decomposed_linear(x, weight, bias)  # type: ignore[no-any-return]
    made: torch.Tensor = _decomposed_linear(x, weight, bias)  # checks sizes and devices
    if known is None:
        plans[key] = _known_linear(x, weight, bias, made)
    return made


def _known_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, made: torch.Tensor) -> Linear | str:
    tensors = (x, weight, made) if bias is None else (x, weight, made, bias)
    plain = all(tensor.dtype in FLOATS and tensor.numel() for tensor in tensors)
    whole = x.dim() > 1 and x.is_contiguous() and weight.dim() == 2 and (bias is None or bias.dim() == 1)
    if not (plain and whole and _usable(*tensors)):
        return LEFT_TO_TORCH
    rows = x.view(-1, x.shape[-1])
    try:
        found = make_product(rows, weight.t(), made.view(rows.shape[0], -1), bias, "")
    except BindingTooLarge:
        return LEFT_TO_TORCH
    if found.beside and KINDS[name_of(x.dtype)].lanes > 1:
        return LEFT_TO_TORCH
    return Linear(found, made, bias, rows.shape[0])


def _added(
    op: Any, d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any, activation: str = ""
) -> torch.Tensor:
    """beta * d + alpha * a @ b in one kernel for floats."""
    _check(op, d, a, b)
    dtype = a.dtype
    if isinstance(beta, complex) or isinstance(alpha, complex) or (activation and dtype not in FLOATS):
        raise NoKernel
    if dtype not in FLOATS:  # integers, exactly, and float64: scaled and added by pointwise kernels
        whole = mm(a, b) if a.dim() == 2 else bmm(a, b)
        if not dtype.is_floating_point:
            alpha, beta = int(alpha), int(beta)  # as torch does
        scaled = whole * alpha if alpha != 1 else whole
        return scaled if beta == 0 else torch.add(scaled, d, alpha=beta)
    if a.dim() == 2 and a.shape[1] >= 2 * LONG and not activation:
        total = _by_parts(_plain(a), _plain(b))
        if total is not None:
            scaled = total if alpha == 1 else total.mul_(alpha)
            return (scaled if beta == 0 else scaled.add(_plain(d), alpha=beta)).to(dtype)
    result = new_contiguous((*a.shape[:-1], b.shape[-1]), dtype)
    added = _plain(d) if beta != 0 else None
    return product(_plain(a), _plain(b), result, added, float(alpha), float(beta), activation)


def addmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    return _added(aten.addmm.default, d, a, b, beta, alpha)


def baddbmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    return _added(aten.baddbmm.default, d, a, b, beta, alpha)


def addmm_activation(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> torch.Tensor:
    return _added(aten.addmm.default, d, a, b, beta, alpha, "gelu" if use_gelu else "relu")


def addmv(d: torch.Tensor, a: torch.Tensor, x: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    _check(aten.addmv.default, d, a, x)
    return _added(aten.addmm.default, d.unsqueeze(-1), a, x.unsqueeze(1), beta, alpha).squeeze(1)


def addbmm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    _check(aten.addbmm.default, d, a, b)
    if isinstance(beta, complex) or isinstance(alpha, complex):
        raise NoKernel
    # The sum over the batch is part of the sum over k.
    batch, rows, inner = a.shape
    left = a.transpose(0, 1).reshape(rows, batch * inner)
    return torch.addmm(d, left, b.reshape(batch * inner, b.shape[2]), beta=beta, alpha=alpha)


def addr(d: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """beta * d + alpha * x yᵀ. Torch's own for every device takes 2.5 as a factor of integers, and makes it 2."""
    refused(aten.addr.default, (d, x, y), {"beta": beta, "alpha": alpha}, shaped=False)
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), d.dtype)
    if dtype is torch.bool:
        alpha, beta = bool(alpha), bool(beta)
    made = torch.outer(x.to(dtype), y.to(dtype))
    d = d.to(dtype).expand(made.shape)
    if alpha != 1:
        made = made * alpha
    if beta == 0:  # whatever d holds
        return made
    return made + (d if beta == 1 else d * beta)


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _check(aten.dot.default, x, y)
    if x.dtype in FLOATS:  # a sum by levels, however long
        return reduce_dims("dot", (_plain(x), _plain(y)), (0,), [x.dtype], (), compute="f32")[0]
    return mm(x.unsqueeze(0), y.unsqueeze(1)).view(())


def vdot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not _usable(x, y):
        raise NoKernel
    return dot(x, y)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "mm": mm,
    "bmm": bmm,
    "addmm": addmm,
    "baddbmm": baddbmm,
    "addmv": addmv,
    "addbmm": addbmm,
    "addr": addr,
    "_addmm_activation": addmm_activation,
    "dot": dot,
    "vdot": vdot,
}


def _growing(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`in_place`, but what is added to becomes as large as the result, as in torch's addbmm_ on the CPU, and in it alone.

    There a column that grows is read after it was overwritten; here it has its values.
    """

    def changed(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = kernel(first, *args, **kwargs)
        if first.shape != made.shape:
            first.resize_(made.shape)
        return first.copy_(made)

    return changed


def register(library: torch.library.Library) -> None:
    # Both keys: with autograd the op is taken apart before autograd sees it, in inference mode there is no autograd.
    library.impl("linear", linear, "AutogradPrivateUse1")
    library.impl("linear", linear, KEY)
    for name, kernel in KERNELS.items():
        kernel = halving(op_of(name), kernel, fallback, or_raise=True)
        library.impl(name, kernel, KEY)
        if name in ("dot", "vdot"):
            continue
        library.impl(f"{name}.out", with_out(kernel, ["out"]), KEY)
        if name.startswith(("add", "badd")):
            library.impl(f"{name}_", _growing(kernel) if name == "addbmm" else in_place(kernel), KEY)
