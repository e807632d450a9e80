"""Fine-tuning Kronos: first its tokenizer, then the model on the tokens.

    from anytorch.forecast.training import finetune_predictor, finetune_tokenizer

    done = finetune_tokenizer(["prices.csv"], output="runs/tokenizer", tokenizer="kronos-tokenizer-base")
    done = finetune_predictor(["prices.csv"], output="runs/model", tokenizer=done.folder, model="kronos-small")
    predictor = anytorch.load_predictor(done.folder)

One process on any device, or `torchrun --nproc_per_node=N` with averaged gradients.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch import limits, logs
from anytorch.devices.seeds import own_random_numbers
from anytorch.errors import InputError, UsageError, did_you_mean
from anytorch.forecast.candles.tables import FIELDS
from anytorch.forecast.checkpoints import FILE, choose_checkpoint, write_trained_with
from anytorch.forecast.inputs import DROWNED, drowning, whole_number
from anytorch.forecast.model import Kronos, KronosTokenizer
from anytorch.forecast.model.pretrained import TINY, Pretrained, arguments_of, check_config
from anytorch.forecast.training.loop import Objective, Outcome, Progress, Run
from anytorch.forecast.training.plan import TrainingPlan
from anytorch.forecast.training.store import RunFolder
from anytorch.forecast.training.windows import Windows, as_series, split_windows
from anytorch.quant.lora import add_lora, merge_lora
from anytorch.train import World, world

P = TypeVar("P", bound=Pretrained)
log = logs.logger(__name__)
TOKENIZER_PLAN = TrainingPlan(learning_rate=2e-4, betas=(0.9, 0.999), clip_norm=2.0)
PREDICTOR_PLAN = TrainingPlan(learning_rate=4e-5, betas=(0.9, 0.95), clip_norm=3.0)
ADAPTED = ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3")  # what gets an adapter: blocks, not heads
OBJECTIVES = ("generation", "published")
SAMPLED_WINDOWS = 256  # are looked at to tell how large the data is
NAMED = (str, Path)  # what is found by its name; anything else is used as it is


class TokenizerObjective(Objective):
    """Reconstruction from s1 alone and from both, and the loss that keeps all codes in use; as published."""

    def __init__(self, tokenizer: KronosTokenizer, world: World) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.world = world

    def forward(self, values: Tensor, stamps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        vectors = self.tokenizer.encode_vectors(values)
        code, unit = self.tokenizer.tokenizer.bsq.quantise(vectors)
        coarse = self.tokenizer.decode_vectors(self.tokenizer.post_quant_embed_pre(code[..., : self.tokenizer.s1_bits]))
        whole = self.tokenizer.decode_vectors(self.tokenizer.post_quant_embed(code))
        first, both = F.mse_loss(coarse.float(), values), F.mse_loss(whole.float(), values)
        codes = self.code_loss(code.float(), unit.float())
        return (first + both + codes) / 2, {"s1_mse": first, "mse": both, "codes": codes}

    def code_loss(self, code: Tensor, unit: Tensor) -> Tensor:
        """The quantiser's own loss. The bits' entropy is that of the whole batch, wherever its parts are computed.

        Entropy is no mean of the processes' entropies: each one is given the others' share as a constant, so that the
        averaged gradient is that of the whole batch.
        """
        bsq = self.tokenizer.tokenizer.bsq
        if self.world.size == 1:
            return bsq.loss(code, unit)
        return bsq.loss(code, unit, lambda own: own + (self.world.mean(own) - own.detach()))

    def validate(self, values: Tensor, stamps: Tensor) -> Tensor:
        """Mean squared error of what comes back, in normalised units."""
        (_, whole), _, _, _ = self.tokenizer(values)
        return F.mse_loss(whole.float(), values)

    def save(self, folder: Path) -> None:
        merged(self.tokenizer).save_pretrained(folder)


class PredictorObjective(Objective):
    """Cross entropy of the next s1, and of the next s2 given s1.

    "generation" trains what a forecast computes: s2 is told the true s1 and sees the past without positions. "published"
    is the original's training step: s2 is told an s1 that was drawn from the model, and sees positions that it does
    not have in a forecast. Either way validation is the exact log-likelihood of a forecast, and causal (the original's
    lets s2 see the future).

    `trained_with`: max_context, lookback and horizon, for the file that says so beside the weights.
    """

    def __init__(
        self,
        model: Kronos,
        tokenizer: KronosTokenizer,
        objective: str = "generation",
        trained_with: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        if objective not in OBJECTIVES:
            raise UsageError(f"objective={objective!r}: use one of {', '.join(OBJECTIVES)}")
        if (model.s1_bits, model.s2_bits) != (tokenizer.s1_bits, tokenizer.s2_bits):
            bits = f"{model.s1_bits}+{model.s2_bits} bits and the tokenizer {tokenizer.s1_bits}+{tokenizer.s2_bits}"
            raise UsageError(f"the model has {bits}: they do not match")
        self.model = model
        self.tokenizer = tokenizer.requires_grad_(False)
        self.objective = objective
        self.trained_with = trained_with
        self.described = False

    def train(self, mode: bool = True) -> PredictorObjective:
        super().train(mode)
        self.tokenizer.eval()  # it only translates here
        return self

    def tokens(self, values: Tensor) -> tuple[Tensor, Tensor]:
        # In full precision whatever the rest runs in: a forecast's tokens are, and a bit is the sign of a number that
        # rounding can turn over.
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            s1, s2 = self.tokenizer.encode(values, half=True)
        return s1, s2

    def forward(self, values: Tensor, stamps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.losses(values, stamps, self.objective)

    def validate(self, values: Tensor, stamps: Tensor) -> Tensor:
        return self.losses(values, stamps, "generation")[0]

    def losses(self, values: Tensor, stamps: Tensor, objective: str) -> tuple[Tensor, dict[str, Tensor]]:
        s1, s2 = self.tokens(values)
        if objective == "published":
            s1_logits, s2_logits = self.model(s1[:, :-1], s2[:, :-1], stamps[:, :-1])
        else:
            s1_logits, s2_logits = as_generated(self.model, s1, s2, stamps)
        loss, first, second = self.model.head.compute_loss(s1_logits.float(), s2_logits.float(), s1[:, 1:], s2[:, 1:])
        return loss, {"s1": first, "s2": second}

    def save(self, folder: Path) -> None:
        if not self.described:
            (folder / FILE).unlink(missing_ok=True)  # of another run, which had another tokenizer
        merged(self.model).save_pretrained(folder)
        self.describe(folder)

    def describe(self, folder: Path) -> None:
        if self.trained_with is not None and not self.described:
            write_trained_with(folder, self.tokenizer, *self.trained_with)
            self.described = True


def as_generated(model: Kronos, s1: Tensor, s2: Tensor, stamps: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of s1 and s2 at every row but the last, as generation would compute them step by step, in one pass.

    In generation the s2 path has one query: no positions, and every row so far to look at. For all rows at once that is
    causal attention without rotary positions.
    """
    context = model.context(s1[:, :-1], s2[:, :-1], stamps[:, :-1])  # [batch, rows, width]
    attention = model.dep_layer.cross_attn
    q = attention.split(attention.q_proj(model.embedding.emb_s1(s1[:, 1:])))
    k, v = attention.split(attention.k_proj(context)), attention.split(attention.v_proj(context))
    knowing = model.dep_layer.norm(context + attention.attend(q, k, v, causal=True))
    return model.head.proj_s1(context), model.head.proj_s2(knowing)


def finetune_tokenizer(
    data: Any,
    *,
    output: str | Path,
    tokenizer: str | Path | KronosTokenizer | Mapping[str, Any],
    plan: TrainingPlan | None = None,
    device: str | torch.device | None = "auto",
    resume: bool | Literal["same"] = True,
    repair: bool = False,
    progress: Progress | None = None,
    **changes: Any,
) -> Outcome:
    """Train a tokenizer on candles; the best one by validation error is in `outcome.folder`.

    `data`: paths, tables, or a dictionary of tables by name. `tokenizer`: a folder, a hub name, a module, or a
    dictionary of constructor arguments for a new one. A module is copied: yours stays as it is. `changes` are fields of
    `TrainingPlan`. With `resume`, a run that was killed in the same `output` resumes where it was, and one with another plan
    there is an error; "same" discards that one and starts over.
    """
    plan = replace(TOKENIZER_PLAN if plan is None else plan, **checked(changes))
    with world(device) as processes, own_random_numbers():
        module = start_from(KronosTokenizer, tokenizer, plan.seed)
        what = {"kind": "tokenizer", "config": module.config, "start": summed(module)}
        with_lora(module, plan)
        objective = TokenizerObjective(module.to(processes.device), processes)
        return _train(data, objective, plan, processes, output, what, resume, repair, progress)


def finetune_predictor(
    data: Any,
    *,
    output: str | Path,
    model: str | Path | Kronos | Mapping[str, Any],
    tokenizer: str | Path | KronosTokenizer | Mapping[str, Any] | None = None,
    max_context: int | None = None,
    plan: TrainingPlan | None = None,
    objective: str = "generation",
    device: str | torch.device | None = "auto",
    resume: bool | Literal["same"] = True,
    repair: bool = False,
    progress: Progress | None = None,
    **changes: Any,
) -> Outcome:
    """Train the model on the tokens of a (frozen) tokenizer; see `finetune_tokenizer` and `PredictorObjective`.

    `tokenizer` may be left out where the model is known to go with one. It is copied into `outcome.folder`, which also
    says how many rows a window may have: `max_context`, or what the model was made for, or lookback + horizon if that is
    more or nothing else is known (a module, a new model). So `load_predictor(outcome.folder)` needs no more.
    """
    plan = replace(PREDICTOR_PLAN if plan is None else plan, **checked(changes))
    if max_context is not None:
        max_context = whole_number("max_context", max_context, limits.WINDOW, "a window has at least 2 rows")
    model, tokenizer, max_context = chosen(model, tokenizer, max_context, plan)
    with world(device) as processes, own_random_numbers():
        module = start_from(Kronos, model, plan.seed)
        translator = start_from(KronosTokenizer, tokenizer, plan.seed)
        what = {"kind": "model", "config": module.config, "start": summed(module), "objective": objective}
        what["tokenizer"] = summed(translator)
        with_lora(module, plan)
        goal = PredictorObjective(
            module.to(processes.device),
            translator.to(processes.device),
            objective,
            (max_context, plan.lookback, plan.horizon),
        )
        return _train(data, goal, plan, processes, output, what, resume, repair, progress)


def chosen(model: Any, tokenizer: Any, max_context: int | None, plan: TrainingPlan) -> tuple[Any, Any, int]:
    """The two to start from, and the rows that a window of the trained model may have."""
    if tokenizer is None and not isinstance(model, NAMED):
        raise UsageError(
            "name the tokenizer: a module or a new model does not tell which one it uses",
            hint="tokenizer=… takes a folder, a name, or a module",
        )
    # "tiny" stands in for what has no name: that half of the answer is not used.
    found = choose_checkpoint(
        model if isinstance(model, NAMED) else TINY,
        tokenizer if tokenizer is None or isinstance(tokenizer, NAMED) else TINY,
        max_context,
    )
    if tokenizer is None or isinstance(tokenizer, NAMED):
        tokenizer = found.tokenizer
    seen = plan.lookback + plan.horizon
    if not isinstance(model, NAMED):
        return model, tokenizer, seen if max_context is None else max_context
    return found.model, tokenizer, max(seen, found.max_context) if max_context is None else max_context


def _train(
    data: Any,
    objective: Objective,
    plan: TrainingPlan,
    processes: World,
    output: str | Path,
    what: dict[str, Any],
    resume: bool | Literal["same"],
    repair: bool,
    progress: Progress | None,
) -> Outcome:
    if resume not in (True, False, "same"):
        raise UsageError(f'resume={resume!r}: use True, False or "same"')
    asked = {name: getattr(plan, name) for name in ("lookback", "horizon", "validation", "test", "stride", "clip")}
    splits = split_windows(as_series(data, repair=repair), **asked)
    if processes.first:
        warn_of_small_columns(splits["train"])
    run = Run(objective, splits, plan, processes, RunFolder(output), what)
    if resume == "same":
        try:  # is the folder empty, or does it hold this very run?
            run.folder.load(run.fingerprint, "cpu", mmap=True)
            resume = True
        except InputError as exc:
            log.warning("%s: the earlier run is discarded, and training starts over", exc.message)
            resume = False
        processes.wait()  # all have looked: now the first may forget it
    return run.train(resume=resume, progress=progress)


def warn_of_small_columns(windows: Windows) -> None:
    """Prices around 1e-6 are a flat line to the model, in training as in a forecast."""
    some = windows.thinned(SAMPLED_WINDOWS)
    past = some.values[some.starts[:, None] + np.arange(some.lookback)].astype(
        np.float64
    )  # [windows, lookback, columns]
    moving = np.ptp(past, axis=1) > 0
    deviation = np.array(
        [np.median(one[found]) if found.any() else 1.0 for one, found in zip(past.std(1).T, moving.T, strict=True)]
    )
    if (drowned := deviation < DROWNED).any():
        log.warning(
            "%s: give them in a smaller unit, in training and in forecasts", drowning(deviation, drowned, FIELDS)
        )


def start_from(cls: type[P], source: Any, seed: int) -> P:
    """The module to train: a copy of the one that was handed in, a new one from its arguments, or one that is loaded."""
    if isinstance(source, cls):
        return copy.deepcopy(source)  # training moves and changes it: its owner may have other plans
    if isinstance(source, Mapping):
        check_config(cls, source, f"the dictionary for a new {cls.kind}")
        if unknown := [name for name in source if name not in arguments_of(cls)]:
            raise UsageError(f"{cls.__name__} has no argument {unknown[0]!r}")
        torch.manual_seed(seed)  # the same first weights in every process
        return cls(**source)
    return cls.from_pretrained(source)


def with_lora(module: nn.Module, plan: TrainingPlan) -> None:
    if plan.lora_rank:
        torch.manual_seed(plan.seed)  # the same first weights in every process, and after a kill
        add_lora(module, plan.lora_rank, only=ADAPTED)


def merged(module: P) -> P:
    """A copy with every adapter folded into its layer: the published layout again. The module itself is left alone."""
    plain = copy.deepcopy(module)
    merge_lora(plain)
    return plain


def summed(module: nn.Module) -> str:
    """A short mark of a module's weights, for the fingerprint of a run that stands on them."""
    total = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def checked(changes: dict[str, Any]) -> dict[str, Any]:
    known = list(TrainingPlan.__dataclass_fields__)
    for name in changes:
        if name not in known:
            raise UsageError(
                f"unknown training option {name!r}; options: {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
    return changes
