"""A block over whole windows whose products are each computed the way that measured best."""

from __future__ import annotations

import torch
from torch import Tensor

from anytorch.forecast.kernels.products import Layer, Products, Work
from anytorch.forecast.model.fused import Apply, FusedBlock, Tables


class ChosenBlock:
    """What `FusedBlock` computes, from the same weights."""

    def __init__(self, block: FusedBlock, layer: Layer, products: Products) -> None:
        self.block, self.layer, self.products = block, layer, products

    def project(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        work = self.to_qkv(x.reshape(-1, x.shape[-1]))
        self.products(work)
        return self.block.turned(work.out, x.shape, tables)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.rest(rows, attended.transpose(1, 2).reshape(rows.shape)).view(x.shape)

    def through(self, x: Tensor, attend: Apply) -> Tensor:
        """The whole block; `attend` takes q, k and v side by side, [rows, 3 × width], and gives [rows, width]."""
        rows = x.reshape(-1, x.shape[-1])
        work = self.to_qkv(rows)
        self.products(work)
        return self.rest(rows, attend(work.out)).view(x.shape)

    def rest(self, rows: Tensor, attended: Tensor) -> Tensor:
        back = self.back(attended, rows)
        self.products(back)
        gate = self.to_gate(back.out)
        self.products(gate)
        down = self.down(gate.out, back.out)
        self.products(down)
        return down.out

    def works(self, rows: Tensor) -> list[Work]:
        """All products of so many rows, with memory of their own: for choosing."""
        gate = self.to_gate(rows)
        return [self.to_qkv(rows), self.back(rows, rows), gate, self.down(gate.out, rows)]

    def to_qkv(self, rows: Tensor) -> Work:
        layer = self.layer
        return Work(rows, layer.qkv, made(rows, len(layer.qkv)), bias=layer.qkv_bias, norm=layer.norm1)

    def back(self, attended: Tensor, rows: Tensor) -> Work:
        layer = self.layer
        return Work(attended, layer.out, torch.empty_like(attended), bias=layer.out_bias, residual=rows)

    def to_gate(self, rows: Tensor) -> Work:
        layer = self.layer
        return Work(rows, layer.gate, made(rows, len(layer.gate) // 2), norm=layer.norm2, gated=True)

    def down(self, inner: Tensor, rows: Tensor) -> Work:
        return Work(inner, self.layer.down, torch.empty_like(rows), residual=rows)


def made(rows: Tensor, columns: int) -> Tensor:
    return rows.new_empty(len(rows), columns)
