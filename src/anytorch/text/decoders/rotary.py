"""The angles by which positions turn queries and keys, in every variant of scaling that `Rotary` names."""

from __future__ import annotations

import math

import torch

from anytorch.text.decoders.spec import DecoderSpec, Rotary


def frequencies(spec: DecoderSpec) -> torch.Tensor:
    """Radians per position of each pair of a head, float32 [head_width / 2]."""
    rotary, width = spec.rotary, spec.head_width
    plain = 1.0 / rotary.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        return _llama3(plain, rotary)
    if rotary.kind == "yarn":
        return _yarn(plain, rotary, width)
    return plain


def tables(spec: DecoderSpec, positions: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions from 0 on, float32 [positions, head_width / 2] each."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(spec))
    return (angles.cos() * spec.rotary.scale).to(device), (angles.sin() * spec.rotary.scale).to(device)


def _llama3(plain: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = rotary.original_positions * plain / (2 * math.pi)  # in the length the model was trained with first
    span = rotary.high_freq_factor - rotary.low_freq_factor
    kept = ((turns - rotary.low_freq_factor) / span).clamp(0, 1) if span else (turns > rotary.low_freq_factor).float()
    return (1 - kept) * plain / rotary.factor + kept * plain


def _yarn(plain: torch.Tensor, rotary: Rotary, width: int) -> torch.Tensor:
    """As Llama 3's, with the blend linear in the number of the pair."""

    def pair(turns: float) -> float:
        """The pair that makes so many turns in the length the model was trained with first."""
        return width * math.log(rotary.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = pair(rotary.beta_fast), pair(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rotary.factor * stretched + plain * (1 - stretched)
