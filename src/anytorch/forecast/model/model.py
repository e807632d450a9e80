# mypy: disable-error-code="no-any-return"
"""`Kronos`: a causal transformer over pairs of token ids that predicts s1, then s2 given s1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch.errors import InputError, UsageError
from anytorch.forecast.model.layers import CrossAttention, RMSNorm, TransformerBlock, initialise_linear, refuse_mask
from anytorch.forecast.model.pretrained import Pretrained, check_shape

DEPENDENCY_HEADS = 4  # whatever n_heads is: so are the published checkpoints
STAMPS = {"minute": 60, "hour": 24, "weekday": 7, "day": 32, "month": 13}  # the columns of a stamp, and their sizes


class PairEmbedding(nn.Module):
    """Both ids looked up, scaled by √width, and fused into one vector."""

    def __init__(self, s1_bits: int, s2_bits: int, d_model: int = 256) -> None:
        super().__init__()
        self.s1_bits, self.s2_bits, self.d_model = s1_bits, s2_bits, d_model
        self.emb_s1 = nn.Embedding(2**s1_bits, d_model)
        self.emb_s2 = nn.Embedding(2**s2_bits, d_model)
        self.fusion_proj = nn.Linear(2 * d_model, d_model)

    def split_token(self, token_ids: Tensor, s2_bits: int) -> tuple[Tensor, Tensor]:
        """s1 and s2 of one id whose low `s2_bits` bits are s2.

        As published, and not the layout of `KronosTokenizer.encode`, whose single index has s1 in its low bits.
        """
        if isinstance(s2_bits, bool) or not isinstance(s2_bits, int) or s2_bits < 1:
            raise InputError(f"s2_bits is {s2_bits!r}, not a whole number above 0")
        ids = token_ids.long()
        return ids >> s2_bits, ids & (2**s2_bits - 1)

    def forward(self, token_ids: tuple[Tensor, Tensor] | list[Tensor] | Tensor) -> Tensor:
        """A pair (s1, s2), each [batch, rows]; or one tensor of ids that `split_token` takes apart."""
        if isinstance(token_ids, Tensor):
            s1, s2 = self.split_token(token_ids, self.s2_bits)
        else:
            s1, s2 = token_ids
        scale = math.sqrt(self.d_model)
        return self.fusion_proj(torch.cat((self.emb_s1(s1) * scale, self.emb_s2(s2) * scale), dim=-1))


class FixedEmbedding(nn.Module):
    """Sinusoids that are not trained. (A checkpoint's own values replace them, and theirs may be others.)"""

    def __init__(self, c_in: int, d_model: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(c_in, d_model)
        self.emb.weight.requires_grad_(False)
        self.initialise()

    def initialise(self) -> None:
        size, width = self.emb.weight.shape
        place = self.emb.weight.device
        steps = torch.exp(torch.arange(0, width, 2, device=place).float() * -(math.log(10000.0) / width))
        angles = torch.arange(size, device=place).float()[:, None] * steps
        with torch.no_grad():
            self.emb.weight[:, 0::2] = angles.sin()
            self.emb.weight[:, 1::2] = angles[:, : width // 2].cos()

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.emb(index)
        return out.detach()


class TimeEmbedding(nn.Module):
    """The sum of five tables: minute, hour, weekday, day of the month, month."""

    def __init__(self, d_model: int, learn_pe: bool) -> None:
        super().__init__()
        made = nn.Embedding if learn_pe else FixedEmbedding
        for name, size in STAMPS.items():
            setattr(self, f"{name}_embed", made(size, d_model))

    def forward(self, stamp: Tensor) -> Tensor:
        stamp = stamp.long()
        month, day, weekday, hour, minute = (
            getattr(self, f"{name}_embed")(stamp[..., list(STAMPS).index(name)])
            for name in ("month", "day", "weekday", "hour", "minute")
        )
        return hour + weekday + day + month + minute


class DependencyLayer(nn.Module):
    """Tells the context which s1 was chosen: norm(context + attention(query = s1's embedding, keys = context))."""

    def __init__(
        self, d_model: int, n_heads: int = DEPENDENCY_HEADS, attn_dropout_p: float = 0.0, resid_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.cross_attn = CrossAttention(d_model, n_heads, attn_dropout_p, resid_dropout)
        self.norm = RMSNorm(d_model)

    def forward(
        self,
        hidden_states: Tensor,
        sibling_embed: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        causal: bool | None = None,
    ) -> Tensor:
        refuse_mask(key_padding_mask)
        return self.norm(hidden_states + self.cross_attn(sibling_embed, hidden_states, causal=causal))


class DualHead(nn.Module):
    """Logits of s1 from the context, logits of s2 from the context that knows s1."""

    def __init__(self, s1_bits: int, s2_bits: int, d_model: int) -> None:
        super().__init__()
        self.vocab_s1, self.vocab_s2 = 2**s1_bits, 2**s2_bits
        self.proj_s1 = nn.Linear(d_model, self.vocab_s1)
        self.proj_s2 = nn.Linear(d_model, self.vocab_s2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of s1 from the context."""
        return self.proj_s1(x)

    def cond_forward(self, x2: Tensor) -> Tensor:
        """Logits of s2 from the context that knows s1."""
        return self.proj_s2(x2)

    def compute_loss(
        self,
        s1_logits: Tensor,
        s2_logits: Tensor,
        s1_targets: Tensor,
        s2_targets: Tensor,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """→ (their mean, cross entropy of s1, cross entropy of s2). Rows count where `padding_mask` [batch, rows] is 0."""
        if padding_mask is not None:
            counted = padding_mask == 0
            s1_logits, s2_logits = s1_logits[counted], s2_logits[counted]
            s1_targets, s2_targets = s1_targets[counted], s2_targets[counted]
        s1 = F.cross_entropy(s1_logits.reshape(-1, s1_logits.shape[-1]), s1_targets.reshape(-1))
        s2 = F.cross_entropy(s2_logits.reshape(-1, s2_logits.shape[-1]), s2_targets.reshape(-1))
        return (s1 + s2) / 2, s1, s2


class Kronos(Pretrained):
    """The published forecasting model. Ids are int64 [batch, rows]; a stamp is int64 [batch, rows, 5] (see STAMPS)."""

    kind = "model"

    def __init__(
        self,
        s1_bits: int,
        s2_bits: int,
        n_layers: int,
        d_model: int,
        n_heads: int,
        ff_dim: int,
        ffn_dropout_p: float,
        attn_dropout_p: float,
        resid_dropout_p: float,
        token_dropout_p: float,
        learn_te: bool,
    ) -> None:
        super().__init__()
        check_shape(d_model, n_heads, s1_bits, s2_bits)
        check_shape(d_model, DEPENDENCY_HEADS, s1_bits, s2_bits)
        self.config = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.s1_bits, self.s2_bits = s1_bits, s2_bits
        self.n_layers, self.d_model, self.n_heads, self.ff_dim = n_layers, d_model, n_heads, ff_dim
        self.ffn_dropout_p, self.attn_dropout_p = ffn_dropout_p, attn_dropout_p
        self.resid_dropout_p, self.token_dropout_p = resid_dropout_p, token_dropout_p
        self.learn_te, self.s1_vocab_size = learn_te, 2**s1_bits
        self.embedding = PairEmbedding(s1_bits, s2_bits, d_model)
        self.time_emb = TimeEmbedding(d_model, learn_te)
        self.token_drop = nn.Dropout(token_dropout_p)
        self.transformer = nn.ModuleList(
            TransformerBlock(d_model, n_heads, ff_dim, ffn_dropout_p, attn_dropout_p, resid_dropout_p)
            for _ in range(n_layers)
        )
        self.norm = RMSNorm(d_model)
        self.dep_layer = DependencyLayer(d_model)
        self.head = DualHead(s1_bits, s2_bits, d_model)
        self.initialise()

    def initialise(self) -> None:
        """Draw new weights: Xavier for linear layers, N(0, 1/√width) for tables, sinusoids where they are fixed."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=self.d_model**-0.5)
            else:
                initialise_linear(module)
        for module in self.modules():
            if isinstance(module, FixedEmbedding):
                module.initialise()

    def context(self, s1: Tensor, s2: Tensor, stamp: Tensor | None = None) -> Tensor:
        """Normalised hidden states of all rows: [batch, rows, d_model]."""
        x = self.embedding((s1, s2))
        if stamp is not None:
            x = x + self.time_emb(stamp)
        x = self.token_drop(x)
        for block in self.transformer:
            x = block(x)
        return self.norm(x)

    def forward(
        self,
        s1_ids: Tensor,
        s2_ids: Tensor,
        stamp: Tensor | None = None,
        padding_mask: Tensor | None = None,
        use_teacher_forcing: bool = False,
        s1_targets: Tensor | None = None,
        *,
        s2_causal: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits of s1 and s2 at every row.

        With teacher forcing the s2 path is told `s1_targets`, else an s1 drawn at every row. As published, the s2 path
        is causal in train mode and sees the future in eval mode; `s2_causal=True` is for validation that must not.
        """
        refuse_mask(padding_mask)
        context = self.context(s1_ids, s2_ids, stamp)
        s1_logits = self.head.proj_s1(context)
        if use_teacher_forcing:
            if s1_targets is None:
                raise UsageError("use_teacher_forcing=True needs s1_targets, which are missing")
            chosen = s1_targets
        else:
            likely = F.softmax(s1_logits.detach().float(), dim=-1)
            chosen = torch.multinomial(likely.reshape(-1, likely.shape[-1]), 1).view(s1_ids.shape)
        causal = self.training if s2_causal is None else s2_causal
        knowing = self.dep_layer(context, self.embedding.emb_s1(chosen), causal=causal)
        return s1_logits, self.head.proj_s2(knowing)

    def decode_s1(
        self, s1_ids: Tensor, s2_ids: Tensor, stamp: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The first half of a generation step: (s1 logits of all rows, context)."""
        refuse_mask(padding_mask)
        context = self.context(s1_ids, s2_ids, stamp)
        return self.head.proj_s1(context), context

    def decode_s2(self, context: Tensor, s1_ids: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The second half: s2 logits given the chosen s1 [batch, 1]. Of several rows, the last is the one to use.

        One query has no positions (see CrossAttention) and sees the whole window.
        """
        refuse_mask(padding_mask)
        knowing = self.dep_layer(context, self.embedding.emb_s1(s1_ids), causal=False)
        return self.head.proj_s2(knowing)
