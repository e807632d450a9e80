"""Binary spherical quantisation: a vector becomes the signs of its values, and signs become an index.

An index has its least significant bit first: index = Σ bit_j · 2^j.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def signs_to_index(signs: Tensor) -> Tensor:
    """[…, bits] of values above zero or not → int64 […]. Zero counts as "not"."""
    weights = 2 ** torch.arange(signs.shape[-1], device=signs.device)
    return ((signs > 0).long() * weights).sum(-1)


def index_to_signs(index: Tensor, bits: int) -> Tensor:
    """The inverse: int64 […] → float32 […, bits] of +1 and -1."""
    shifts = torch.arange(bits, device=index.device)
    return (((index.unsqueeze(-1) >> shifts) & 1) * 2 - 1).float()


def binary_entropy(p: Tensor) -> Tensor:
    return -p * torch.log(p + 1e-8) - (1 - p) * torch.log(1 - p + 1e-8)


class BinarySphericalQuantizer(nn.Module):
    """Normalise, take the sign, and pass the gradient straight through; with the loss that keeps all codes in use."""

    basis: Tensor
    group_basis: Tensor

    def __init__(self, embed_dim: int, beta: float, gamma0: float, gamma: float, zeta: float, group_size: int) -> None:
        super().__init__()
        self.width = embed_dim
        self.beta, self.gamma0, self.gamma, self.zeta = beta, gamma0, gamma, zeta
        # In the published state dict, and used by nothing: indices are least-significant-bit first.
        self.register_buffer("basis", 2 ** torch.arange(embed_dim - 1, -1, -1))
        self.register_buffer("group_basis", 2 ** torch.arange(group_size - 1, -1, -1))

    def quantise(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The code of every vector (values ±1/√width) with a straight-through gradient, and the normalised vector."""
        unit = F.normalize(z, dim=-1)
        sign = torch.where(unit > 0, 1.0, -1.0).to(unit.dtype)
        # Scaled after the straight-through step, as published: the gradient is scaled, too.
        return (unit + (sign - unit).detach()) / math.sqrt(self.width), unit

    def forward(self, z: Tensor, collect_metrics: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """→ (code with straight-through gradient, loss, {"indices": over all bits}); neither of both without metrics."""
        code, unit = self.quantise(z)
        if not collect_metrics:
            return code, code.new_zeros(()), {}
        return code, self.loss(code, unit), {"indices": signs_to_index(code)}

    def loss(self, code: Tensor, unit: Tensor) -> Tensor:
        """Distance to the code, less the entropy of each bit over the batch, plus the entropy of each vector's bits."""
        commitment = self.beta * (code.detach() - unit).square().sum(-1).mean()
        p = torch.sigmoid(-4 * unit / math.sqrt(self.width))
        each = binary_entropy(p).sum(-1).mean()
        together = binary_entropy(p.flatten(0, -2).mean(0)).sum()
        return commitment + self.zeta * (self.gamma0 * each - self.gamma * together)
