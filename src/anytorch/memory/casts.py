"""Weights of linear layers in autocast's dtype, kept between calls.

Autocast forgets what it rounded at the end of each call. For a few rows, as in a text's next token, rounding every weight
again takes longer than the product in float32. So while a mode lasts, `forward` of `nn.Linear`, and of the `Conv1D` that
transformers' GPT-2 has in its place, looks here first.

A weight that was changed is rounded again, as far as torch can know: it counts changes in place, and reading or setting
`.data`, behind which they are not counted, is seen by the property that stands in its place meanwhile. Once read, or where
others have a view of its memory (an alias, a NumPy array, another process), a weight may be changed at any time, so it is
not kept. torch's fused optimizers do not count their changes: a weight is rounded again after every step of an optimizer,
and while it has a gradient. Unseen is what is made, written through and dropped between two calls:
`w.detach().numpy()[:] = 0`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # torch's own name for it: see `_Layer.watch`
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (input, weight, bias)
_plain_data: Any = torch.Tensor.data
# By the layer and not by the weight: torch refuses to swap tensors that anybody refers to weakly.
_casts: weakref.WeakKeyDictionary[nn.Module, _Cast] = weakref.WeakKeyDictionary()
_layer_of: dict[int, weakref.ref[nn.Module]] = {}  # by the id of its weight
_hooks: list[RemovableHandle] = []


class _Kept(NamedTuple):
    """A rounded weight and when it holds. Set at once, as several threads may call the layer."""

    value: Tensor
    stamp: tuple[Any, ...]
    storage: torch.UntypedStorage  # of the weight: as long as it is here, no other weight can lie at the same address


class _Cast:
    def __init__(self, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight_id = id(weight)
        self.given_out = False  # somebody may change the weight without torch's counting it
        self._kept: _Kept | None = None

    @property
    def nbytes(self) -> int:
        kept = self._kept
        return kept.value.nbytes if kept is not None else 0

    def forget(self) -> None:
        self._kept = None

    def of(self, weight: Tensor) -> Tensor | None:
        """The rounded weight; None where autocast itself has to round it, for its gradient or in another dtype."""
        kind = weight.device.type
        if self.given_out or id(weight) != self.weight_id or weight.dtype is not torch.float32:
            self.forget()
            return None
        if weight.grad is not None:
            self.forget()
            return None
        if weight.requires_grad and torch.is_grad_enabled():
            return None
        if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not self.dtype:
            return None
        stream, capturing = _stream(weight.device)
        storage = weight.untyped_storage()
        if capturing or _views(storage) > _alone():
            return None
        stamp = weight.data_ptr(), weight._version, stream  # made on one stream, it is not there yet for another
        kept = self._kept
        if kept is None or stamp != kept.stamp:
            self.forget()
            del kept  # and its memory, before there is another
            if weight.device.type == "cpu" and weight.is_shared():  # since `hold`: another process may write to it
                return None
            with torch.inference_mode(False), torch.no_grad():  # for calls with gradients of the input, too
                kept = _Kept(weight.detach().to(self.dtype), stamp, storage)
            self._kept = kept
        return kept.value


def _views(storage: torch.UntypedStorage) -> int:
    """How many refer to a weight's memory."""
    views: int = torch._C._storage_Use_Count(storage._cdata)
    return views


@cache
def _alone() -> int:
    """The same of memory that is one tensor's alone: the count has those that ask in it."""
    weight = nn.Parameter(torch.empty(1, device="cpu"))
    return _views(weight.untyped_storage())


def _stream(device: torch.device) -> tuple[Any, bool]:
    """The stream that a device computes on now, and whether it records a graph, which would read what is here for ever."""
    if device.type == "cpu":
        return None, False
    module = torch.get_device_module(device)
    stream, capturing = (getattr(module, name, None) for name in ("current_stream", "is_current_stream_capturing"))
    return stream(device) if stream is not None else None, bool(capturing is not None and capturing())


def _transposed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None  # Conv1D always has one
    return torch.addmm(bias, input.reshape(-1, input.size(-1)), weight).view(*input.shape[:-1], weight.size(1))


class _Layer:
    """A class of layers, and the `forward` that looks here first."""

    def __init__(self, kind: type[nn.Module], product: Product) -> None:
        self.kind, self.plain, self.product = kind, kind.forward, product
        layer = self

        def forward(self: nn.Module, input: Tensor) -> Tensor:
            # None outside of torch.jit's tracer, which torch's stubs do not know
            traced: Any = torch._C._get_tracing_state()
            if traced is None and not torch.compiler.is_compiling():
                weight = self._parameters.get("weight")
                cast = _casts.get(self)
                if cast is not None and weight is not None and (value := cast.of(weight)) is not None:
                    bias: Any = self.bias  # not what is stored under that name: it may be computed
                    return layer.product(input, value, bias)
            result: Tensor = layer.plain(self, input)
            return result

        self.forward: Any = forward

    def watch(self) -> None:
        if self.kind.forward is not self.forward:
            self.plain = self.kind.forward
            # torch.jit.script compiles the source of what is wrapped, with the names of this module.
            self.forward.__wrapped__ = self.plain
            setattr(self.kind, "forward", self.forward)  # noqa: B010  (a method, to the type checker)

    def unwatch(self) -> None:
        if self.kind.forward is self.forward:
            setattr(self.kind, "forward", self.plain)  # noqa: B010


_layers = [_Layer(nn.Linear, F.linear)]


def _cast_of(weight: Tensor) -> _Cast | None:
    layer = _layer_of[id(weight)]() if id(weight) in _layer_of else None
    return _casts.get(layer) if layer is not None and layer._parameters.get("weight") is weight else None


def _read_data(self: Tensor) -> Any:
    if (cast := _cast_of(self)) is not None:
        cast.given_out = True
        cast.forget()
    return _plain_data.__get__(self)


def _set_data(self: Tensor, value: Tensor) -> None:
    _plain_data.__set__(self, value)
    if (cast := _cast_of(self)) is not None:
        cast.forget()  # the new one may lie where the old one lay


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return  # compiled code counts what it changes
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if (cast := _cast_of(weight)) is not None:
                cast.forget()


def watch() -> None:
    """Put our functions in place of others; `unwatch` takes them away."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and not any(layer.kind is transformers.Conv1D for layer in _layers):
        _layers.append(_Layer(transformers.Conv1D, _transposed))
    for layer in _layers:
        layer.watch()
    setattr(torch.Tensor, "data", property(_read_data, _set_data))  # noqa: B010


def unwatch() -> None:
    while _hooks:
        _hooks.pop().remove()
    _casts.clear()
    _layer_of.clear()
    for layer in _layers:
        layer.unwatch()
    if "data" in torch.Tensor.__dict__:
        delattr(torch.Tensor, "data")  # torch's own is that of its base class


def layers_of(model: nn.Module) -> dict[nn.Module, nn.Parameter]:
    """The layers whose float32 weights would be kept: plain linear ones, each weight once; no tensors of other classes."""
    found: dict[int, tuple[nn.Module, nn.Parameter]] = {}
    for module in model.modules():
        plain = any(
            isinstance(module, one.kind) and type(module).forward in (one.forward, one.plain) for one in _layers
        )
        weight = module._parameters.get("weight") if plain else None
        if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or weight.is_inference():
            continue
        if weight.device.type != "cpu" or not weight.is_shared():  # another process may write to it
            found.setdefault(id(weight), (module, weight))
    return dict(found.values())


def hold(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the weights of this model from the first call on in which they are rounded."""
    if nn.Linear.forward is _layers[0].forward:
        watch()  # transformers may have been loaded since
    for layer, weight in layers_of(model).items():
        _casts[layer] = _Cast(weight, dtype)
        _layer_of[id(weight)] = weakref.ref(layer)


def release(model: nn.Module) -> None:
    for layer in model.modules():
        if (cast := _casts.pop(layer, None)) is not None:
            _layer_of.pop(cast.weight_id, None)


def held_nbytes(model: nn.Module) -> int:
    return sum(cast.nbytes for layer in model.modules() if (cast := _casts.get(layer)) is not None)
