"""A decoder written down layer by layer, with Mirage's names, and computed by torch on tensors that stay where they are.

Every call checks its shapes, names the layer in its error, and adds one piece of work to the step. `grid_dim` and
`block_dim`, which say there how a GPU is to be used, are accepted and decide nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anytorch.errors import UsageError

EPS = 1e-6


@dataclass(frozen=True)
class Handle:
    """A tensor of the program. `groups`: how many parts its last dimension has, or its rows, each with a piece of every
    matrix that was fused into it."""

    name: str
    tensor: Tensor
    groups: int = 1

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


class Layers:
    """What is attached, and the work of one step in its order."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self.work: list[Callable[[], None]] = []
        self.input: Handle | None = None  # token ids, which the kernel puts there
        self.words = 0  # token ids that there are
        self.output: Handle | None = None  # token ids that were chosen
        self._groups: dict[str, int] = {}  # of outputs
        self._places: Tensor | None = None  # of the tokens of a step, [rows]

    # --- tensors -----------------------------------------------------------------------------------------------------

    def attach_input(self, torch_tensor: Tensor, name: str | None = None) -> Handle:
        """A tensor of yours, which stays yours: the kernel reads and, for a cache, writes it where it is."""
        if not isinstance(torch_tensor, Tensor):
            raise UsageError(f"attach_input takes a tensor, not a {type(torch_tensor).__name__}")
        return self._named(Handle(self._fresh(name, "attach_input"), torch_tensor.detach()))

    def new_tensor(
        self,
        dims: Sequence[int],
        strides: Sequence[int] | None = None,
        dtype: Any = torch.bfloat16,
        name: str | None = None,
        io_category: str = "cuda_tensor",
    ) -> Handle:
        """Room for what one layer hands to the next, on the device of what was attached before it."""
        if io_category != "cuda_tensor":
            raise UsageError(
                f"io_category={io_category!r} is not supported: a tensor cannot be shared by several cards",
                hint='use "cuda_tensor", which is a tensor of the device at hand, whichever it is',
            )
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(getattr(dtype, "name", dtype)), None)
        if not isinstance(kind, torch.dtype):
            raise UsageError(f"dtype={dtype!r} is not a type of numbers", hint="use torch.bfloat16, or its name")
        first = next(iter(self.handles.values()), None)
        if first is None:
            raise UsageError("new_tensor: nothing is attached yet", hint="attach the token ids and weights first")
        if not all(isinstance(size, int) and size > 0 for size in dims):
            raise UsageError(
                f"new_tensor: dims={dims!r} is invalid", hint="pass whole numbers from 1 on: (rows, width)"
            )
        made = torch.zeros(tuple(dims), dtype=kind, device=first.tensor.device)
        if strides is not None:
            made = torch.empty_strided(tuple(dims), tuple(strides), dtype=kind, device=made.device).zero_()
        return self._named(Handle(self._fresh(name, "new_tensor"), made))

    def fuse_tensors(
        self, inputs: Sequence[Handle], fused_dim: int, num_groups: int, name: str | None = None
    ) -> Handle:
        """Matrices in one: `num_groups` groups, each with its part of the rows of every one of them."""
        if fused_dim != 0:
            raise UsageError(f"fused_dim={fused_dim} is not supported: only rows can be fused", hint="use 0")
        for one in inputs:
            if num_groups < 1 or one.dims[0] % num_groups:
                raise UsageError(f"{one.dims[0]} rows of {one.name!r} cannot be split into {num_groups} equal groups")
        parts = [one.tensor.unflatten(0, (num_groups, -1)) for one in inputs]
        return self._named(Handle(self._fresh(name, "fuse_tensors"), torch.cat(parts, 1).flatten(0, 1), num_groups))

    shuffle_tensors = fuse_tensors  # its later name

    # --- layers ------------------------------------------------------------------------------------------------------

    def embed_layer(
        self, input: Handle, weight: Handle, output: Handle, grid_dim: Any = None, block_dim: Any = None
    ) -> None:
        self._shapes("embed_layer", output, (input.tensor.numel(), weight.dims[1]), "tokens, width")
        if self.input is None:
            self.input, self.words = input, weight.dims[0]
        self._add(lambda: output.tensor.copy_(weight.tensor[input.tensor.flatten()]))

    def rmsnorm_layer(
        self,
        input: Handle,
        weight: Handle,
        output: Handle,
        grid_dim: Any = None,
        block_dim: Any = None,
        eps: float = EPS,
    ) -> None:
        self._shapes("rmsnorm_layer", output, input.dims, "as its input")
        self._shapes("rmsnorm_layer", weight, input.dims[-1:], "width")
        self._add(lambda: output.tensor.copy_(normed(input.tensor, weight.tensor, eps)))

    def linear_layer(
        self, input: Handle, weight: Handle, output: Handle, grid_dim: Any = None, block_dim: Any = None
    ) -> None:
        self._product("linear_layer", input, weight, output)
        self._add(lambda: output.tensor.copy_(F.linear(input.tensor, weight.tensor)))

    def rmsnorm_linear_layer(
        self,
        input: Handle,
        weight_norm: Handle,
        weight_linear: Handle,
        output: Handle,
        grid_dim: Any = None,
        block_dim: Any = None,
        eps: float = EPS,
    ) -> None:
        self._shapes("rmsnorm_linear_layer", weight_norm, input.dims[-1:], "width")
        self._product("rmsnorm_linear_layer", input, weight_linear, output)
        self._add(
            lambda: output.tensor.copy_(F.linear(normed(input.tensor, weight_norm.tensor, eps), weight_linear.tensor))
        )

    def linear_with_residual_layer(
        self,
        input: Handle,
        weight: Handle,
        residual: Handle,
        output: Handle,
        grid_dim: Any = None,
        block_dim: Any = None,
    ) -> None:
        self._product("linear_with_residual_layer", input, weight, output)
        self._shapes("linear_with_residual_layer", residual, output.dims, "as its output")
        self._add(lambda: output.tensor.copy_(F.linear(input.tensor, weight.tensor) + residual.tensor))

    def silu_mul_layer(self, input: Handle, output: Handle, grid_dim: Any = None, block_dim: Any = None) -> None:
        """silu of the gates by the ups: halves of the input, or of each group of it if its weights were fused in groups."""
        self._shapes("silu_mul_layer", output, (input.dims[0], input.dims[1] // 2), "rows, half the input")
        groups = self._groups_of("silu_mul_layer", input, 2)
        self._add(lambda: output.tensor.copy_(silu_mul(input.tensor, groups)))

    def silu_mul_linear_with_residual_layer(
        self,
        input: Handle,
        weight: Handle,
        residual: Handle,
        output: Handle,
        grid_dim: Any = None,
        block_dim: Any = None,
    ) -> None:
        name = "silu_mul_linear_with_residual_layer"
        self._shapes(name, weight, (output.dims[1], input.dims[1] // 2), "outputs, half the input")
        self._shapes(name, residual, output.dims, "as its output")
        groups = self._groups_of(name, input, 2)
        self._add(
            lambda: output.tensor.copy_(F.linear(silu_mul(input.tensor, groups), weight.tensor) + residual.tensor)
        )

    def attention_layer(
        self,
        input: Handle,
        k_cache: Handle,
        v_cache: Handle,
        q_norm: Handle | None,
        k_norm: Handle | None,
        cos_pos_embed: Handle | None,
        sin_pos_embed: Handle | None,
        output: Handle,
        grid_dim: Any = None,
        block_dim: Any = None,
        eps: float = EPS,
    ) -> None:
        """Queries, keys and values in; norm, rotation, the new key and value into the caches, attention to all so far out.

        Caches are [rows, positions, heads of keys, head]; cosines and sines [positions, head]; of the input the heads of
        queries, keys and values follow one another, in each group of heads if its weights were fused in groups."""
        if len(k_cache.dims) != 4 or k_cache.dims != v_cache.dims:
            raise UsageError(
                f"attention_layer: caches are {list(k_cache.dims)} and {list(v_cache.dims)}, "
                "not both [rows, positions, heads, head]"
            )
        rows, positions, kv_heads, head = k_cache.dims
        heads = output.dims[1] // head
        self._shapes(
            "attention_layer", input, (rows, (heads + 2 * kv_heads) * head), "rows, (heads + 2 kv_heads) x head"
        )
        for one in (q_norm, k_norm):
            if one is not None:
                self._shapes("attention_layer", one, (head,), "head")
        for one in (cos_pos_embed, sin_pos_embed):
            if one is not None and (one.dims[-1] != head or one.dims[0] < positions):
                raise UsageError(
                    f"attention_layer: {one.name!r} is {list(one.dims)}, not [{positions} or more, {head}]"
                )
        groups = self._groups_of("attention_layer", input, 1)
        if kv_heads % groups:
            raise UsageError(f"attention_layer: {kv_heads} key heads cannot be split into {groups} equal groups")
        places, each = self._placed(rows, input.tensor.device), heads // kv_heads
        every_row = torch.arange(rows, device=places.device)
        every_place = torch.arange(positions, device=places.device)

        def attend() -> None:
            own = kv_heads // groups
            parts = input.tensor.view(rows, groups, (each + 2) * own, head)
            q = parts[:, :, : each * own].reshape(rows, heads, head)
            k = parts[:, :, each * own : (each + 1) * own].reshape(rows, kv_heads, head)
            v = parts[:, :, (each + 1) * own :].reshape(rows, kv_heads, head)
            if q_norm is not None:
                q = normed(q, q_norm.tensor, eps)
            if k_norm is not None:
                k = normed(k, k_norm.tensor, eps)
            if cos_pos_embed is not None and sin_pos_embed is not None:
                cos, sin = (one.tensor[places][:, None].to(q.dtype) for one in (cos_pos_embed, sin_pos_embed))
                q, k = turned(q, cos, sin), turned(k, cos, sin)
            for cache, new in ((k_cache.tensor, k), (v_cache.tensor, v)):
                cache[every_row, places] = new.to(cache.dtype)
            keys, values = (cache.tensor.transpose(1, 2).to(q.dtype) for cache in (k_cache, v_cache))
            seen = (every_place <= places[:, None])[:, None, None]
            mixed = F.scaled_dot_product_attention(q[:, :, None], keys, values, seen, enable_gqa=heads != kv_heads)
            output.tensor.copy_(mixed.reshape(rows, heads * head))

        self._add(attend)

    def argmax_layer(self, input: Handle, output: Handle, grid_dim: Any = None, block_dim: Any = None) -> None:
        """The most likely token of each row: what the kernel takes as chosen."""
        self._chooses("argmax_layer", input, output)
        self._add(lambda: output.tensor.copy_(input.tensor.argmax(-1).view(output.dims)))

    def argmax_partial_layer(
        self, input: Handle, output: Sequence[Handle], grid_dim: Any = None, block_dim: Any = None
    ) -> None:
        """The best of each part of the words: values and rows, [rows, parts] each."""
        values, rows = output
        parts = values.dims[1]
        if rows.dims != values.dims or input.dims[1] % parts:
            raise UsageError(
                f"argmax_partial_layer: {input.dims[1]} words cannot be split into {parts} parts for outputs "
                f"{list(values.dims)} and {list(rows.dims)}"
            )
        each = input.dims[1] // parts
        begins = torch.arange(0, input.dims[1], each, device=input.tensor.device)

        def best() -> None:
            most, at = input.tensor.view(-1, parts, each).max(-1)
            values.tensor.copy_(most)
            rows.tensor.copy_(at + begins)

        self._add(best)

    def argmax_reduce_layer(
        self, input: Sequence[Handle], output: Handle, grid_dim: Any = None, block_dim: Any = None
    ) -> None:
        values, rows = input
        self._chooses("argmax_reduce_layer", values, output)
        self._add(
            lambda: output.tensor.copy_(rows.tensor.gather(1, values.tensor.argmax(-1, keepdim=True)).view(output.dims))
        )

    def sampling_layer(
        self,
        input: Handle,
        output: Handle,
        temperature: float = 1.0,
        grid_dim: Any = None,
        block_dim: Any = None,
    ) -> None:
        """A token drawn with the probabilities of the logits: the largest of logits with Gumbel noise. Seeded by torch."""
        if not temperature > 0:
            raise UsageError(f"sampling_layer: temperature={temperature} is not above 0", hint="use argmax_layer")
        self._chooses("sampling_layer", input, output)

        def draw() -> None:
            noise = -torch.log(-torch.log(torch.rand_like(input.tensor, dtype=torch.float32).clamp_(1e-20, 1 - 1e-7)))
            output.tensor.copy_((input.tensor.float() / temperature + noise).argmax(-1).view(output.dims))

        self._add(draw)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _add(self, work: Callable[[], Any]) -> None:
        self.work.append(work)

    def _fresh(self, name: str | None, call: str) -> str:
        if not name or name in self.handles:
            raise UsageError(f"{call}: name={name!r} is missing or taken", hint="give every tensor a name of its own")
        return name

    def _named(self, handle: Handle) -> Handle:
        first = next(iter(self.handles.values()), handle)
        if handle.tensor.device != first.tensor.device:
            raise UsageError(
                f"{handle.name!r} is on {handle.tensor.device}, {first.name!r} on {first.tensor.device}",
                hint="put all tensors of a kernel on one device",
            )
        self.handles[handle.name] = handle
        return handle

    def _shapes(self, layer: str, handle: Handle, wanted: Sequence[int], rule: str) -> None:
        if handle.dims != tuple(wanted):
            raise UsageError(f"{layer}: {handle.name!r} is {list(handle.dims)}, not {list(wanted)} ({rule})")

    def _product(self, layer: str, input: Handle, weight: Handle, output: Handle) -> None:
        if len(weight.dims) != 2 or weight.dims[1] != input.dims[-1]:
            raise UsageError(
                f"{layer}: the weight {weight.name!r} is {list(weight.dims)}, not [outputs, {input.dims[-1]}]"
            )
        self._shapes(layer, output, (input.dims[0], weight.dims[0]), "rows, outputs")
        self._groups[output.name] = weight.groups

    def _groups_of(self, layer: str, handle: Handle, least: int) -> int:
        groups = self._groups.get(handle.name, handle.groups)
        if handle.dims[1] % (groups * least):
            raise UsageError(f"{layer}: {handle.dims[1]} numbers of {handle.name!r} do not divide into {groups} groups")
        return groups

    def _chooses(self, layer: str, input: Handle, output: Handle) -> None:
        if output.tensor.dtype not in (torch.int64, torch.int32) or output.tensor.numel() != input.dims[0]:
            raise UsageError(
                f"{layer}: the output {output.name!r} is {output.tensor.dtype} of {list(output.dims)}; "
                f"it takes one whole number for each of {input.dims[0]} rows"
            )
        self.output = output

    def _placed(self, rows: int, device: torch.device) -> Tensor:
        if self._places is None:
            self._places = torch.zeros(rows, dtype=torch.int64, device=device)
        if len(self._places) != rows:
            raise UsageError(f"attention_layer: a cache has {rows} rows, another one {len(self._places)}")
        return self._places


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x by angles whose table repeats its first half, as transformers keeps it."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def silu_mul(x: Tensor, groups: int) -> Tensor:
    gate, up = x.view(x.shape[0], groups, 2, -1).unbind(2)
    return (F.silu(gate) * up).flatten(1)
