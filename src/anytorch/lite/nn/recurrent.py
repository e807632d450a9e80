"""LSTM and GRU with layers, both directions and dropout between layers; the steps themselves are in `ops.recurrent`."""

from __future__ import annotations

import math
from typing import Any

from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.create import zeros
from anytorch.lite.dtypes import float32, is_floating
from anytorch.lite.nn.layers import uniform
from anytorch.lite.nn.module import Module
from anytorch.lite.ops.recurrent import gru_steps, lstm_steps
from anytorch.lite.tensors import CustomTensor


class Recurrent(Module):
    """What LSTM and GRU share. Parameters are named as torch names them: weight_ih_l0, weight_hh_l0_reverse, …"""

    gates: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.dropout = batch_first, dropout
        self.directions = 2 if bidirectional else 1
        bound = 1 / math.sqrt(hidden_size)
        for layer in range(num_layers):
            inputs = input_size if layer == 0 else hidden_size * self.directions
            for suffix in self.suffixes(layer):
                setattr(self, f"weight_ih_{suffix}", uniform(bound, self.gates * hidden_size, inputs))
                setattr(self, f"weight_hh_{suffix}", uniform(bound, self.gates * hidden_size, hidden_size))
                setattr(self, f"bias_ih_{suffix}", uniform(bound, self.gates * hidden_size))
                setattr(self, f"bias_hh_{suffix}", uniform(bound, self.gates * hidden_size))

    def suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.directions]

    def weights(self, suffix: str) -> list[CustomTensor]:
        return [getattr(self, f"{name}_{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    def run(self, x: CustomTensor, states: list[CustomTensor]) -> tuple[CustomTensor, list[CustomTensor]]:
        """All layers and directions: (L, B, I) → (L, B, H · directions) and the last states, each (layers·dirs, B, H)."""
        if x.ndim != 3 or x.shape[2 if self.batch_first else -1] != self.input_size:
            raise UsageError(f"{type(self).__name__} takes 3 dimensions, the last of {self.input_size}; got {x.shape}")
        if self.batch_first:
            x = x.transpose(0, 1)
        shape = (self.num_layers * self.directions, x.shape[1], self.hidden_size)
        dtype = x.dtype if is_floating(x.dtype) else float32
        states = states or [zeros(*shape, dtype=dtype, device=x.device) for _ in range(self.state_count)]
        last: list[list[CustomTensor]] = [[] for _ in states]
        for layer in range(self.num_layers):
            outs = []
            for direction, suffix in enumerate(self.suffixes(layer)):
                start = [state[layer * self.directions + direction] for state in states]
                given = flip(x) if direction else x
                out, ends = self.steps(given, start, self.weights(suffix))
                outs.append(flip(out) if direction else out)
                for kept, end in zip(last, ends, strict=True):
                    kept.append(end)
            x = outs[0] if len(outs) == 1 else F.cat(outs, 2)
            if layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        return (x.transpose(0, 1) if self.batch_first else x), [F.stack(kept) for kept in last]

    state_count = 1

    def steps(
        self, x: CustomTensor, start: list[CustomTensor], weights: list[CustomTensor]
    ) -> tuple[CustomTensor, list[CustomTensor]]:
        raise NotImplementedError


def flip(x: CustomTensor) -> CustomTensor:
    return x[::-1]


class LSTM(Recurrent):
    """`output, (h, c) = lstm(x, (h, c))`"""

    gates = 4
    state_count = 2

    def steps(
        self, x: CustomTensor, start: list[CustomTensor], weights: list[CustomTensor]
    ) -> tuple[CustomTensor, list[CustomTensor]]:
        packed = lstm_steps(x, start[0], start[1], *weights)  # (L + 1, B, H)
        return packed[:-1], [packed[-2] if len(packed) > 1 else start[0], packed[-1]]

    def forward(self, x: CustomTensor, state: tuple[CustomTensor, CustomTensor] | None = None) -> Any:
        out, ends = self.run(x, list(state or ()))
        return out, tuple(ends)


class GRU(Recurrent):
    """`output, h = gru(x, h)`"""

    gates = 3

    def steps(
        self, x: CustomTensor, start: list[CustomTensor], weights: list[CustomTensor]
    ) -> tuple[CustomTensor, list[CustomTensor]]:
        out = gru_steps(x, start[0], *weights)
        return out, [out[-1] if len(out) else start[0]]

    def forward(self, x: CustomTensor, h: CustomTensor | None = None) -> Any:
        out, ends = self.run(x, [] if h is None else [h])
        return out, ends[0]
