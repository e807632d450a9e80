"""A linear layer whose weight is packed. Inputs get gradients, so adapters can be trained on top; the weight is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytorch.errors import UsageError
from anytorch.quant.choose import KernelChoice, Prefer, choose, kernels, row_class
from anytorch.quant.formats import Format, parse
from anytorch.quant.kernels.base import Run
from anytorch.quant.kernels.dense import input_gradient
from anytorch.quant.tensor import PARTS, QuantTensor, expected_parts, pack, unpack


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: QuantLinear) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            # Saved as autograd saves tensors, not with the layer: codes may be elsewhere by the time backward comes, and
            # whoever moves them (`anytorch.memory`) hears of it here and brings them back.
            packed = layer.packed
            ctx.stands_for = (packed.format, packed.shape, packed.dtype, tuple(packed.parts))
            ctx.save_for_backward(*packed.parts.values())
        ctx.needs_bias = bias is not None and bias.requires_grad
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        for_x = None
        if ctx.needs_input_grad[0]:
            format, shape, dtype, names = ctx.stands_for
            parts = dict(zip(names, ctx.saved_tensors, strict=True))
            for_x = input_gradient(QuantTensor(format, shape, dtype, parts), gradient)
        for_bias = gradient.sum(0) if ctx.needs_bias else None
        return for_x, for_bias, None


def weight_is_packed() -> UsageError:
    return UsageError(
        "a packed layer's weight cannot be set: it is stored in few bits",
        hint="make the model ordinary again with anytorch.quant.dequantize(model), or use set_packed(pack(weight, format))",
    )


class QuantLinear(nn.Module):
    """Takes the place of `nn.Linear`. Make one with `QuantLinear.of(linear, "int4")`.

    `prefer` says which kernels may compute it: "memory" (none that keeps a second copy of the weight), "speed" (the
    fastest, be it the unpacked weight), "invariant" (only kernels whose rows do not depend on the rest of the batch).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: str | Format,
        *,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        prefer: Prefer = "memory",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format, self.dtype, self.prefer = parse(format), dtype, prefer
        for name, (shape, stored) in expected_parts(self.format, (out_features, in_features)).items():
            self.register_buffer(name, torch.empty(shape, dtype=stored, device=device))
        self.register_buffer("input_scale", None)  # set by calibration: inputs are multiplied by it
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False)
        else:
            self.register_parameter("bias", None)
        self._bound: dict[tuple[Any, ...], tuple[str, Run]] = {}

    @classmethod
    def of(
        cls,
        linear: nn.Linear | QuantLinear,
        format: str | Format,
        *,
        prefer: Prefer = "memory",
        packed: QuantTensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> QuantLinear:
        """The packed form of a layer; `packed` gives its weight where it has been rounded already."""
        if packed is None:
            packed = pack(linear.weight, format)
        layer = cls(
            linear.in_features,
            linear.out_features,
            packed.format,
            bias=linear.bias is not None,
            dtype=linear.weight.dtype,
            device="meta",
            prefer=prefer,
        )
        layer.set_packed(packed)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=linear.bias.requires_grad)
        layer.input_scale = input_scale
        layer.train(linear.training)
        return layer

    @property
    def packed(self) -> QuantTensor:
        parts = {name: getattr(self, name) for name in PARTS if name in self._buffers}
        return QuantTensor(self.format, (self.out_features, self.in_features), self.dtype, parts)

    def set_packed(self, packed: QuantTensor) -> None:
        packed.check()
        for name, part in packed.parts.items():
            setattr(self, name, part)
        self._bound.clear()

    @property
    def matrix(self) -> torch.Tensor:
        """The weight [out, in], unpacked at each access."""
        full = unpack(self.packed)
        return full if self.input_scale is None else full * self.input_scale.to(full.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, unpacked at each access. Code that only wants its dtype or device gets that, too; at a price."""
        return self.matrix

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        raise weight_is_packed()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":  # `layer.weight = nn.Parameter(…)`, as `torch.func.functional_call` does
            raise weight_is_packed()
        super().register_parameter(name, param)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.input_scale is not None:
            x = x * self.input_scale.to(x.dtype)
        flat = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling() or flat.shape[0] == 0 or x.device.type == "meta":
            bias = None if self.bias is None else self.bias.to(x.dtype)
            out = functional.linear(flat, unpack(self.packed, x.dtype), bias)
        elif torch.is_grad_enabled() and (flat.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            out = _Multiply.apply(flat, self.bias, self)
        else:
            out = self.compute(flat)
        return out.reshape(*x.shape[:-1], self.out_features)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """x (m × in_features) through the kernel chosen for it; no gradients."""
        bias = self.bias
        trained = bias is not None and bias.requires_grad  # its values change: kernels may not keep a copy
        key = (row_class(x.shape[0], x.device), x.dtype, trained)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound.setdefault(key, self._bind(x, None if trained else bias, key))
        out = bound[1](x.detach())
        return out + bias.detach().to(out.dtype) if trained and bias is not None else out

    def _bind(self, x: torch.Tensor, bias: torch.Tensor | None, key: tuple[Any, ...]) -> tuple[str, Run]:
        choice = choose(self.packed, bias, x.dtype, x.shape[0], self.prefer)
        for other, bound in list(self._bound.items()):  # one kernel serves several sizes, and may hold a copy
            if other[1:] == key[1:] and bound[0] == choice.kernel:
                return bound
        kernel = next(one for one in kernels(self.prefer) if one.name == choice.kernel)
        return kernel.name, kernel.prepare(self.packed, bias, x.dtype).run

    def choice(self, m: int, dtype: torch.dtype | None = None) -> KernelChoice:
        """What computes `m` input rows, measured now if it was not before."""
        return choose(self.packed, self.bias, dtype or self.dtype, m, self.prefer)

    # What is bound to a kernel points at the buffers: it goes when they do.

    def _apply(self, fn: Any, recurse: bool = True) -> QuantLinear:
        """Packed parts follow to another device and keep their dtypes: `.half()` is about activations."""
        self._bound.clear()
        parts = {name: self._buffers.pop(name) for name in PARTS if name in self._buffers}
        super()._apply(fn, recurse)
        for name, part in parts.items():
            assert part is not None
            moved = fn(part)
            self._buffers[name] = moved if moved.dtype == part.dtype else part.to(moved.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._bound.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": {}}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}, bias={self.bias is not None}"
