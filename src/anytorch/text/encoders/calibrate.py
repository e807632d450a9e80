"""Quantize an encoder's layers as they are loaded, guided by the inputs each layer gets for a few texts.

Rounded without looking, MiniLM's vectors in int4 have a cosine of 0.967 to float32's; so, 0.99. It is done as our C++
encoder does it, with the same function: weights of features with large values are made larger before they are rounded (and
those features smaller when the layer runs), each group's range is searched for the least error weighed by the features'
squares, and a group has 16 weights. A layer is quantized as soon as its own inputs have been seen, before the next one is
read, so that no more than one is in memory unpacked; the texts go on through the layer as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from anytorch.quant.linear import QuantLinear
from anytorch.quant.model import replace_module
from anytorch.quant.tensor import pack
from anytorch.recorded.moves import gather_by_index
from anytorch.text.checkpoints.checkpoint import Ints
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.text.encoders.layers import Angles, EncoderModule, Rotary
from anytorch.text.encoders.layouts import Rows
from anytorch.text.encoders.shapes import RowShape, plan_rows
from anytorch.text.packed.calibration import Inputs, sample_tokens, smooth_groups

Texts = tuple[Ints, Ints]  # ids and starts

# What is meant by the engine's names. Eight bits lose nothing worth looking for; the others are in groups of 16.
FORMATS = {"int8": "int8", "int4": "int4-g16", "int2": "int2-g16", "fp4": "nvfp4"}
NEED_NO_TEXTS = ("int8",)
MOST_TOKENS = 4096  # of the texts: more say little more, and one layer's activations are held for all


class LayerQuantizer:
    """Called by `loading.load_module` with each layer when it is filled: `quantizer(module, number)`.

    `quantization` is one of FORMATS, or any name `anytorch.quant.parse` takes. `texts` are tokens of real texts; without
    them some are drawn from the vocabulary.
    """

    def __init__(self, spec: EncoderSpec, quantization: str, texts: Texts | None = None) -> None:
        self.format = FORMATS.get(quantization, quantization)
        self._texts = None if quantization in NEED_NO_TEXTS else first_texts(texts or sample_tokens(spec))
        self._blocks: list[Block] = []

    @torch.no_grad()
    def __call__(self, module: EncoderModule, number: int) -> None:
        layer = module.layers[number]
        linears = {name: one for name, one in layer.named_modules() if type(one) is nn.Linear}
        seen: dict[str, Inputs] = {}
        if self._texts is not None:
            if number == 0:
                self._blocks = embedded(module, *self._texts)
            seen = observed(self._blocks, module, number, linears)
            if number == len(module.layers) - 1:
                self._blocks = []
        for name, linear in linears.items():
            replace_module(layer, name, quantized(linear, self.format, seen.get(name)))


@dataclass
class Block:
    """Texts of similar length on their way through the layers."""

    layout: Rows
    states: Tensor
    angles: list[Angles]
    bias: Tensor | None


def embedded(module: EncoderModule, ids: Ints, starts: Ints) -> list[Block]:
    """The texts in front of the first layer."""
    device = module.embedding.word.weight.device
    for rotary in module.rotaries:
        assert isinstance(rotary, Rotary)
        rotary.fill(device)
    lengths = np.diff(starts)
    blocks = []
    for chunk in plan_rows(lengths, MOST_TOKENS, module.spec.max_positions, fixed=False):
        assert isinstance(chunk.shape, RowShape)
        longest = chunk.shape.length
        table = np.zeros((len(chunk.texts), longest), np.int32)
        table[np.arange(longest) < lengths[chunk.texts][:, None]] = gather_by_index(ids, starts, chunk.texts)[0]
        layout = Rows(torch.from_numpy(lengths[chunk.texts]).to(device), longest)
        states = module.embedding(torch.from_numpy(table.reshape(-1)).to(device), layout.positions)
        angles = [rotary(layout.positions) for rotary in module.rotaries]
        blocks.append(Block(layout, states, angles, None if module.relative is None else module.relative(longest)))
    return blocks


def observed(
    blocks: list[Block], module: EncoderModule, number: int, linears: dict[str, nn.Linear]
) -> dict[str, Inputs]:
    """Take the texts through a layer; what each of its products was given."""
    tops: dict[str, list[Tensor]] = {name: [] for name in linears}
    squares: dict[str, list[Tensor]] = {name: [] for name in linears}
    owned: list[Tensor] = []  # 1 for the tokens of a text, 0 for the filling behind it; of each block

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sizes = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float().abs() * owned[-1]
            tops[name].append(sizes.amax(0))
            squares[name].append(sizes.square().sum(0))

        return see

    hooks = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    try:
        for block in blocks:
            owned.append(block.layout.owned.reshape(-1, 1).float())
            angles = block.angles[module.rotary_of[number]] if block.angles else None
            block.states = module.layers[number](block.states, block.layout, angles, block.bias)
    finally:
        for hook in hooks:
            hook.remove()
    count = sum(float(one.sum()) for one in owned)
    return {
        name: Inputs(
            torch.stack(tops[name]).amax(0).cpu().numpy(), (torch.stack(squares[name]).sum(0) / count).cpu().numpy()
        )
        for name in linears
    }


def quantized(linear: nn.Linear, format: str, seen: Inputs | None) -> QuantLinear:
    """A layer in few bits, by what its inputs were; without that, each group by its own weights alone."""
    if seen is None:
        return QuantLinear.of(linear, format, packed=pack(linear.weight, format, refine=True))
    less = torch.from_numpy(smooth_groups(seen)).to(linear.weight.device)
    importance = torch.from_numpy(seen.square).to(linear.weight.device) * less.square()
    packed = pack(linear.weight.float() / less, format, refine=True, importance=importance)
    return QuantLinear.of(linear, format, packed=packed, input_scale=less)


def first_texts(texts: Texts) -> Texts:
    """As many of the texts as have MOST_TOKENS together; one at least. Those without a token say nothing."""
    ids, starts = texts
    count = max(1, int(np.searchsorted(starts[1:], MOST_TOKENS, side="right")))
    kept = np.unique(starts[: count + 1])
    return ids[: int(kept[-1])], kept.astype(np.int32)
