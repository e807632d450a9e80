"""What a quantized model is made of, and which kernel computes each layer and why: a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anytorch.quant.choose import KernelChoice
from anytorch.quant.linear import QuantLinear


@dataclass(frozen=True)
class Row:
    layer: str
    format: str
    bits: float  # per weight, scales included
    m: int  # input rows
    kernel: str
    why: str
    speedup: float | None  # against the ordinary float multiplication
    like_it: int = 1  # layers of the same shape, for which the same was measured


@dataclass(frozen=True)
class Explanation:
    rows: tuple[Row, ...]
    nbytes: int  # of all packed weights
    nbytes_float: int  # of the same weights unpacked

    @property
    def slower(self) -> tuple[Row, ...]:
        """The cases in which the packed layer is slower than the ordinary one would be."""
        return tuple(row for row in self.rows if row.speedup is not None and row.speedup < 1.0)

    def __str__(self) -> str:
        head = ("layer", "format", "bits", "rows", "kernel", "why")
        body = [
            (
                row.layer + (f" (and {row.like_it - 1} like it)" if row.like_it > 1 else ""),
                row.format,
                f"{row.bits:.2f}",
                str(row.m),
                row.kernel,
                row.why,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [head, *body]
        ]
        ratio = self.nbytes / self.nbytes_float if self.nbytes_float else 0.0
        lines.append(f"packed weights: {self.nbytes / 1e6:.1f} MB, {ratio:.3f}× of {self.nbytes_float / 1e6:.1f} MB")
        if self.slower:
            lines.append(
                f"slower than float here: {len(self.slower)} of {len(self.rows)} cases; "
                "prefer='speed' keeps those layers' float weights beside the packed ones"
            )
        return "\n".join(lines)


def explain(model: nn.Module, m: Sequence[int] = (1, 64), dtype: torch.dtype | None = None) -> Explanation:
    """One line per kind of packed layer and number of input rows. What was not measured yet is measured now."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    kinds: dict[tuple[object, ...], list[tuple[str, QuantLinear]]] = {}
    for name, layer in layers:
        kind = (layer.out_features, layer.in_features, layer.format, layer.prefer, layer.codes.device)
        kinds.setdefault(kind, []).append((name, layer))
    rows = []
    for alike in kinds.values():
        name, layer = alike[0]
        for size in m:
            choice: KernelChoice = layer.choice(size, dtype)
            bits = layer.packed.bits_per_weight
            rows.append(
                Row(name, str(layer.format), bits, size, choice.kernel, choice.why, choice.speedup, like_it=len(alike))
            )
    nbytes = sum(layer.nbytes for _, layer in layers)
    full = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for _, layer in layers)
    return Explanation(tuple(rows), nbytes, full)
