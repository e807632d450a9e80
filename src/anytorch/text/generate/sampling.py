"""Choosing the next token: what a request asks for, and small functions from logits to a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytorch.errors import UsageError

if TYPE_CHECKING:
    import torch

    from anytorch.text.decoders.choosing import Points

MOST_SEED = 2**63 - 1
LEAST_PENALTY = 2.0**-126  # float32's: a logit of 0 divided by 0 is not a number


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 takes the most likely one; `top_p` 1 and `top_k` 0 leave all in."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0, "0 for the most likely token, 0.7 for some variety")
        _check("top_p", self.top_p, 0.0, 1.0, "a share of the probability above 0 and up to 1", open_left=True)
        _check("top_k", self.top_k, 0, 2**31, "a number of tokens, 0 for all", whole=True)
        _check(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 for none, 1.1 for a little", open_left=True
        )
        if self.seed is not None:
            _check("seed", self.seed, 0, MOST_SEED, "a whole number", whole=True)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(
    name: str, value: Any, least: float, most: float, advice: str, *, whole: bool = False, open_left: bool = False
) -> None:
    kind = int if whole else (int, float)
    good = isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
    if not good or (open_left and value == least):
        raise UsageError(f"{name}={value!r}: use a number from {least:g} to {most:g}", hint=advice)


# Settings of a generation_config.json that change the text and have no effect here, with the values that ask for nothing.
# Those of `CHANCE` matter where tokens are drawn alone.
CHANCE: dict[str, tuple[Any, ...]] = {
    "min_p": (0,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (0, 1),
}  # fmt: skip
UNHEEDED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "penalty_alpha": (0,), "guidance_scale": (0, 1), "no_repeat_ngram_size": (0,), "min_length": (0,),
    "min_new_tokens": (0,), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ([], {}), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "watermarking_config": (), "dola_layers": (),
}  # fmt: skip


def defaults_of(generation_config: Any) -> Sampling:
    """The sampling settings of the model's generation_config.json; greedy if it does not enable sampling. Raises UsageError,
    which names the setting, for one that cannot be used."""
    names = ["repetition_penalty"]
    if getattr(generation_config, "do_sample", False):
        names += ["temperature", "top_p", "top_k"]
    told = {name: value for name in names if (value := getattr(generation_config, name, None)) is not None}
    if told.get("top_p") == 0:
        told["top_p"] = LEAST_PENALTY  # the most likely token alone, as transformers has it
    return Sampling(**{"temperature": float(len(names) > 1), **told})


def unheeded(generation_config: Any) -> list[str]:
    """What a generation_config.json asks for and does not get here: "no_repeat_ngram_size=3"."""
    names = {**UNHEEDED, **(CHANCE if getattr(generation_config, "do_sample", False) else {})}
    told = {name: getattr(generation_config, name, None) for name in names}
    asked = {name: str(value) for name, value in told.items() if value is not None and value not in names[name]}
    return [f"{name}={text if len(text) <= 40 else text[:37] + '…'}" for name, text in asked.items()]


def next_token(
    logits: torch.Tensor,  # [vocabulary]
    sampling: Sampling,
    seen: Sequence[int],
    points: Points,
) -> int:
    """One token. `seen`: the prompt and all tokens so far, for the penalty. Uses up a point, if chance decides."""
    if sampling.repetition_penalty != 1.0:
        logits = penalised(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return int(logits.argmax())
    import torch

    values, tokens = torch.sort(logits.float() / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        values, tokens = values[: sampling.top_k], tokens[: sampling.top_k]
    # In float64 where the device has it not: on the CPU, a vector of the vocabulary's size is nothing.
    values = values.cpu()
    if not torch.isfinite(values[0]):  # so little heat that the quotient has no float32: as good as none
        points.take()
        return int(logits.argmax())
    shares = torch.softmax(values.double(), dim=0)
    reached = shares.cumsum(0)
    if sampling.top_p < 1.0:
        # The smallest number of tokens whose probabilities reach top_p; at least one.
        count = int((reached < sampling.top_p).sum()) + 1
        reached = reached[:count]
    # By the inverse of the distribution: one random number a token, the same on every device.
    point = points.take() * reached[-1]
    place = min(int(torch.searchsorted(reached, point, right=True)), len(reached) - 1)
    return int(tokens[place])


def penalised(logits: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
    """Tokens that were there already are less likely: positive logits divided, negative ones multiplied (CTRL)."""
    import torch

    where = torch.tensor(sorted(set(seen)), dtype=torch.long, device=logits.device)
    found, penalty = logits[where], max(penalty, LEAST_PENALTY)
    return logits.index_copy(0, where, torch.where(found < 0, found * penalty, found / penalty))
