# mypy: disable-error-code="no-any-return"
"""`KronosTokenizer`: candles to pairs of token ids, and back, by binary spherical quantisation.

A vector becomes the signs of its values, and signs become an index, its least significant bit first: index = Σ bit_j · 2^j.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch.errors import InputError, UsageError
from anytorch.forecast.model.layers import TransformerBlock
from anytorch.forecast.model.pretrained import Pretrained, check_shape


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

    def loss(self, code: Tensor, unit: Tensor, whole: Callable[[Tensor], Tensor] = lambda mean: mean) -> Tensor:
        """Distance to the code, less the entropy of each bit over the batch, plus the entropy of each vector's bits.

        `whole` makes the bits' mean in this batch that of a larger one which it is a part of.
        """
        commitment = self.beta * (code.detach() - unit).square().sum(-1).mean()
        p = torch.sigmoid(-4 * unit / math.sqrt(self.width))
        each = binary_entropy(p).sum(-1).mean()
        together = binary_entropy(whole(p.flatten(0, -2).mean(0))).sum()
        return commitment + self.zeta * (self.gamma0 * each - self.gamma * together)


class BitQuantizer(nn.Module):
    """The quantiser of both tokens, by the names it has in published checkpoints."""

    def __init__(
        self, s1_bits: int, s2_bits: int, beta: float, gamma0: float, gamma: float, zeta: float, group_size: int
    ) -> None:
        super().__init__()
        self.s1_bits, self.s2_bits, self.codebook_dim = s1_bits, s2_bits, s1_bits + s2_bits
        self.bsq = BinarySphericalQuantizer(self.codebook_dim, beta, gamma0, gamma, zeta, group_size)

    def bits_to_indices(self, bits: Tensor) -> Tensor:
        """Codes […, bits] → int64 […], the least significant bit first."""
        return signs_to_index(bits)

    def forward(
        self, z: Tensor, half: bool = False, collect_metrics: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | list[Tensor]]:
        """→ (loss, codes, ids): one index over all bits, or with `half` the pair. No loss without `collect_metrics`."""
        code, loss, _ = self.bsq(z, collect_metrics)
        return loss, code, list(split_ids(code, self.s1_bits)) if half else signs_to_index(code)


def split_ids(signs: Tensor, s1_bits: int) -> tuple[Tensor, Tensor]:
    """s1 and s2 of vectors whose signs are the bits."""
    return signs_to_index(signs[..., :s1_bits]), signs_to_index(signs[..., s1_bits:])


class KronosTokenizer(Pretrained):
    """An autoencoder whose middle is a row of bits. Values in are normalised candles [batch, rows, d_in].

    The first `s1_bits` bits of a row are its coarse token s1, the other `s2_bits` its fine token s2. All attention is
    causal: row t of a decoded window depends on rows up to t only.
    """

    kind = "tokenizer"

    def __init__(
        self,
        d_in: int,
        d_model: int,
        n_heads: int,
        ff_dim: int,
        n_enc_layers: int,
        n_dec_layers: int,
        ffn_dropout_p: float,
        attn_dropout_p: float,
        resid_dropout_p: float,
        s1_bits: int,
        s2_bits: int,
        beta: float,
        gamma0: float,
        gamma: float,
        zeta: float,
        group_size: int,
    ) -> None:
        super().__init__()
        check_shape(d_model, n_heads, s1_bits, s2_bits)
        if (s1_bits + s2_bits) % group_size:
            raise UsageError(f"group_size {group_size} does not divide s1_bits + s2_bits = {s1_bits + s2_bits}")
        self.config = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.d_in, self.d_model, self.n_heads, self.ff_dim = d_in, d_model, n_heads, ff_dim
        self.enc_layers, self.dec_layers = n_enc_layers, n_dec_layers
        self.ffn_dropout_p, self.attn_dropout_p = ffn_dropout_p, attn_dropout_p
        self.resid_dropout_p = resid_dropout_p
        self.s1_bits, self.s2_bits, self.codebook_dim = s1_bits, s2_bits, s1_bits + s2_bits
        shape = (d_model, n_heads, ff_dim, ffn_dropout_p, attn_dropout_p, resid_dropout_p)
        self.embed = nn.Linear(d_in, d_model)
        self.head = nn.Linear(d_model, d_in)
        # One block fewer than the configuration says, on both sides: so are the published checkpoints.
        self.encoder = nn.ModuleList(TransformerBlock(*shape) for _ in range(n_enc_layers - 1))
        self.decoder = nn.ModuleList(TransformerBlock(*shape) for _ in range(n_dec_layers - 1))
        self.quant_embed = nn.Linear(d_model, self.codebook_dim)
        self.post_quant_embed_pre = nn.Linear(s1_bits, d_model)
        self.post_quant_embed = nn.Linear(self.codebook_dim, d_model)
        self.tokenizer = BitQuantizer(s1_bits, s2_bits, beta, gamma0, gamma, zeta, group_size)

    def encode_vectors(self, x: Tensor) -> Tensor:
        """What the quantiser sees: [batch, rows, s1_bits + s2_bits]."""
        z = self.embed(x)
        for block in self.encoder:
            z = block(z)
        return self.quant_embed(z)

    def decode_vectors(self, z: Tensor) -> Tensor:
        """Embedded codes [batch, rows, d_model] → normalised candles."""
        for block in self.decoder:
            z = block(z)
        return self.head(z)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
        """For training: ((decoded from s1 alone, decoded from both), quantiser loss, codes, indices over all bits)."""
        loss, code, index = self.tokenizer(self.encode_vectors(x))
        coarse = self.decode_vectors(self.post_quant_embed_pre(code[..., : self.s1_bits]))
        whole = self.decode_vectors(self.post_quant_embed(code))
        return (coarse, whole), loss, code, index

    def encode(self, x: Tensor, half: bool = False) -> Tensor | list[Tensor]:
        """Token ids: with `half` the pair [s1, s2], else one index s1 + s2 · 2^s1_bits; int64 [batch, rows]."""
        # The sign is all that counts, so the normalisation can be left out.
        signs = self.encode_vectors(x)
        return list(split_ids(signs, self.s1_bits)) if half else signs_to_index(signs)

    def codes(self, s1: Tensor, s2: Tensor) -> Tensor:
        """The quantised vectors of pairs of ids: values ±1/√bits, [batch, rows, bits]."""
        signs = torch.cat((index_to_signs(s1, self.s1_bits), index_to_signs(s2, self.s2_bits)), dim=-1)
        return (signs / math.sqrt(self.codebook_dim)).to(self.post_quant_embed.weight.dtype)

    def indices_to_bits(self, x: Tensor | list[Tensor] | tuple[Tensor, Tensor], half: bool = False) -> Tensor:
        """As published: the codes of a pair (`half`) or of one index over all bits."""
        if half:
            # One tensor is a pair only where somebody stacked one: of two series it would unpack the batch.
            if len(x) != 2 or (isinstance(x, Tensor) and x.dim() != 3):
                found = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"{len(x)} parts"
                raise InputError(
                    f"half=True decodes a pair [s1, s2], and this is {found}",
                    hint="leave half out for ids that encode(x) gave; encode(x, half=True) gives pairs",
                )
            return self.codes(x[0], x[1])
        if not isinstance(x, Tensor):
            raise InputError(
                f"one tensor of ids is decoded without half=True, and this is a {type(x).__name__}",
                hint="pass half=True for a pair [s1, s2]",
            )
        return self.codes(x % 2**self.s1_bits, x >> self.s1_bits)

    def decode(self, x: Tensor | list[Tensor] | tuple[Tensor, Tensor], half: bool = False) -> Tensor:
        """Token ids, as `encode` gives them, → normalised candles [batch, rows, d_in]."""
        return self.decode_vectors(self.post_quant_embed(self.indices_to_bits(x, half)))
