"""Choose the fastest layout, with or without graphs, for a model on a device: measured once, then stored.

Candidates follow from what the device states it can do. Each is compared with the plainest way and timed on texts of mixed
lengths (`anytorch.measured`), under the machine, the device and the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from anytorch import logs
from anytorch.counts import counted
from anytorch.devices.memory import synchronize
from anytorch.devices.oom import is_out_of_memory
from anytorch.devices.stopwatch import budget_of
from anytorch.devices.types import Caps
from anytorch.errors import WrongAnswer
from anytorch.measured.engine import Candidate, Ready, measure
from anytorch.measured.stopwatch import Stopwatch, by_wall
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import NO_TIME, Question, Trial, Verdict, duration, fastest
from anytorch.recorded.graphs import Recorder
from anytorch.text.checkpoints.checkpoint import Floats, Ints
from anytorch.text.checkpoints.spec import EncoderSpec

if TYPE_CHECKING:
    from anytorch.text.encoders.encoder import TorchEncoder

log = logs.logger(__name__)

LAYOUTS = ("packed", "rows", "one-by-one")
HALF_COSINE = 0.9995  # what a half-precision vector must have to its float32 one, at worst
SAME_COSINE = 0.9998  # two ways in one dtype: they differ by rounding alone
LARGEST_CHECKED_NBYTES = 8 * 2**30
FEW_TOKENS = 64
QUICK_S = 0.05
PASS_S = 0.1  # what running through all the texts once should take: there are several ways, each run several times
LEAST_PASSES = 4  # of two ways, each checked and timed once
ROUNDS = 3
FORMAT = 6  # part of the key: raise it when a layout's code changes what is worth choosing


@dataclass(frozen=True)
class EncoderPlan:
    dtype: str
    layout: str  # one of LAYOUTS
    graphs: bool
    fused: bool = False  # the activation inside the product before it
    kernels: bool = False  # our own, in Triton
    blocks: int = 0  # warps that attend block by block in texts beyond a tile; 0: torch's flash kernel does
    why: str = ""

    @property
    def short(self) -> str:
        more = {" with graphs": self.graphs, " and fused": self.fused, " and our kernels": self.kernels}
        more[f" in blocks by {self.blocks} warps"] = self.blocks > 0
        return self.layout + "".join(words for words, true in more.items() if true)

    @property
    def words(self) -> str:
        names = {
            "packed": "packed texts, variable-length flash attention",
            "rows": "texts padded to rows of similar length",
            "one-by-one": "packed texts, attention text by text",
        }
        more = (", recorded graphs" if self.graphs else "") + (", fused activation" if self.fused else "")
        ours = ", our Triton kernels" + (" in blocks" if self.blocks else "") if self.kernels else ""
        return names[self.layout] + more + ours


def half_dtypes(caps: Caps, host: bool, stored_bfloat16: bool) -> list[str]:
    """Half-precision dtypes worth trying, the best first. float16 has three more bits; bfloat16 never overflows."""
    order = ("bfloat16", "float16") if stored_bfloat16 else ("float16", "bfloat16")
    return [] if host else [name for name in order if name in caps.fast_dtypes]


def may_pack(caps: Caps, spec: EncoderSpec, dtype: str, host: bool) -> bool:
    """True if the model allows a variable-length flash kernel; whether the device has one is tried."""
    fits = spec.head_width % 8 == 0 and spec.head_width <= 256 and not spec.relative_buckets
    return caps.flash_attention and not host and dtype in ("float16", "bfloat16") and fits


def candidates(
    caps: Caps, spec: EncoderSpec, dtype: str, host: bool, layout: str, graphs: bool | None, *, can_fuse: bool = False
) -> list[EncoderPlan]:
    """Plans to compare, the plainest first: it is the reference. Pure."""
    layouts = ["rows"] if layout == "auto" else [layout]
    if layout == "auto":
        layouts += ["packed"] if may_pack(caps, spec, dtype, host) else []
        layouts += ["one-by-one"] if host else []  # a call per text and layer is too many for a device far away
    recorded = [False] if host or not caps.graphs else [False, True]
    if graphs is not None:
        recorded = [graphs]
    fusing = [False, True] if can_fuse and not host and dtype != "float32" else [False]
    return [
        EncoderPlan(dtype, name, record, fused)
        for name in layouts
        for record in recorded
        for fused in fusing
        if not (record and name == "one-by-one") and not (fused and record != recorded[-1])
    ] + [
        EncoderPlan(dtype, "packed", recorded[-1], fusing[-1], kernels=True, blocks=blocks)
        for name in layouts
        if name == "packed" and may_use_kernels(caps, spec, dtype, host)
        for blocks in (0, 2, 4)
    ]


def may_use_kernels(caps: Caps, spec: EncoderSpec, dtype: str, host: bool) -> bool:
    """True if our Triton kernels apply: they support heads of these widths, and LayerNorm after a sum."""
    if host or not caps.triton or dtype == "float32":
        return False
    return spec.head_width in (16, 32, 64, 128) or not (spec.pre_norm or spec.rms_norm)


def choose(encoder: TorchEncoder, layout: str, graphs: bool | None, asked: Question) -> EncoderPlan:
    """Measure the candidates on the loaded model; the fastest that agrees with the first, which is remembered."""
    host = encoder.device.type == "cpu"
    can_fuse = encoder.module.can_fuse()
    plans = candidates(encoder.caps, encoder.spec, encoder.dtype_name, host, layout, graphs, can_fuse=can_fuse)
    if len(plans) == 1:
        only = Trial(plans[0].short, facts=asdict(plans[0]))
        verdict = Verdict(asked, (only,), only.name, "the only possible layout, or requested")
    else:
        verdict = _measure(encoder, plans, asked)
    return plan_of(remember(verdict))


def _measure(encoder: TorchEncoder, plans: Sequence[EncoderPlan], asked: Question) -> Verdict:
    host = encoder.device.type == "cpu"
    budget = budget_of(encoder.device)
    # On the CPU some 5 GFLOP, a few tenths of a second on one core; on a GPU a full chunk, or launches are all one sees.
    tokens = min(512, max(64, int(2.5e9 / encoder.spec.linear_weights)))
    if not host:
        tokens, seconds = affordable(encoder, plans[0])
        if 3 * seconds * LEAST_PASSES > budget:
            first, *rest = (Trial(plan.short, facts=asdict(plan)) for plan in plans)
            others = (replace(one, refused=NO_TIME) for one in rest)
            why = f"the simplest layout: {counted(tokens, 'token')} take {duration(seconds)}, too long to compare more"
            return Verdict(asked, (first, *others), first.name, why, budget)
    # Short texts alone, too, on a device, and long ones: there are ways that only they take.
    texts = [sample(encoder.spec, tokens)]
    if not host:
        texts += [sample(encoder.spec, tokens, longest=48), sample(encoder.spec, tokens, shortest=200)]
    ways = [_Way(encoder, plan, texts) for plan in sorted(plans, key=lambda plan: plan.graphs)]
    plainest = ways[0]

    def check(found: Floats) -> float:
        if plainest.answer is None:
            raise WrongAnswer("there is nothing to compare it with")
        return 1.0 - worst_cosine(plainest.answer, found)

    def decide(trials: Sequence[Trial]) -> tuple[str, str]:
        took = ", ".join(f"{one.name} {duration(one.seconds)}" for one in trials if one.seconds is not None)
        count = sum(len(ids) for ids, _ in texts)
        return fastest(trials)[0], f"the fastest for {count} tokens of mixed lengths: {took}"

    verdict = measure(
        asked,
        [Candidate(way.plan.short, way.prepare, way.scope) for way in ways],
        check,
        most_error=1.0 - SAME_COSINE,
        error_unit="below a cosine of 1",
        stopwatch=Stopwatch(by_wall(partial(synchronize, encoder.device)), is_out_of_memory),
        budget_s=budget,
        rounds=ROUNDS,
        decide=decide,
    )
    if plainest.failure is not None:  # there is nothing to fall back to
        raise plainest.failure
    return verdict


class _Way:
    """A plan as a candidate. Its recordings are kept for the turns it is timed in."""

    def __init__(self, encoder: TorchEncoder, plan: EncoderPlan, texts: Sequence[Texts]) -> None:
        self.encoder, self.plan, self.texts = encoder, plan, texts
        self.recorder: Recorder | None = None
        self.answer: Floats | None = None
        self.failure: Exception | None = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.encoder.use(self.plan, self.recorder)
        self.recorder = self.encoder.recorder
        yield

    def prepare(self) -> Ready:
        return Ready(self.run, lambda: self.passes, asdict(self.plan), self.close)

    def run(self) -> Floats:
        """Twice, and once more: a shape is recorded when it comes again, and it is the replay that must be right."""
        try:
            for _ in range(3 if self.plan.graphs else 1):
                self.answer = self.passes()
        except Exception as exc:
            self.failure = exc
            raise
        if self.recorder is not None and self.recorder.failed:
            raise NotImplementedError(f"it records no graphs: {self.recorder.failed}")
        assert self.answer is not None
        return self.answer

    def passes(self) -> Floats:
        """All the texts, the next batch always waiting."""
        under_way = [self.encoder.submit(*some) for some in self.texts]
        return np.concatenate([pending.result() for pending in under_way])

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.clear()


def affordable(encoder: TorchEncoder, plan: EncoderPlan) -> tuple[int, float]:
    """A full chunk, or as many tokens as a slow device computes in a moment, and the seconds they take.

    Asked with a few tokens, then with eight times as many while that takes no time to speak of: the few would tell a fast
    device's launches, not its rate.
    """
    encoder.use(plan)
    tokens = FEW_TOKENS
    while True:
        texts = sample(encoder.spec, tokens)
        encoder.run(*texts)  # the first run of anything is slower
        synchronize(encoder.device)
        begin = time.perf_counter()
        encoder.run(*texts)
        took = time.perf_counter() - begin
        if took > QUICK_S or tokens >= encoder.chunk_tokens:
            each = max(took, 1e-9) / len(texts[0])
            tokens = max(FEW_TOKENS, min(encoder.chunk_tokens, int(PASS_S / 3 / each)))
            return tokens, tokens * each
        tokens = min(encoder.chunk_tokens, 8 * tokens)


Texts = tuple[Ints, Ints]  # ids and starts


def sample(spec: EncoderSpec, tokens: int, longest: int = 256, shortest: int = 4) -> Texts:
    """About `tokens` ids in texts of mixed lengths, most of them near the shortest, the same every time."""
    generator = np.random.default_rng(0)
    longest = min(spec.max_positions, longest, max(8, tokens // 4))
    shortest = min(shortest, longest)
    lengths: list[int] = []
    left = tokens
    while left > 0:
        drawn = int(np.clip(shortest - 4 + generator.lognormal(3.2, 0.8), shortest, longest))
        lengths.append(max(1, min(drawn, left)))
        left -= lengths[-1]
    ids = generator.integers(0, spec.vocabulary, sum(lengths)).astype(np.int32)
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def worst_cosine(a: Floats, b: Floats) -> float:
    """The least cosine of a row with its counterpart; -1 when one is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return -1.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(((x * y).sum(1) / np.maximum(sizes, 1e-30)).min())


# --- remembering ---------------------------------------------------------------------------------------------------


def question(encoder: TorchEncoder, dtype: str, layout: str, graphs: bool | None) -> Question:
    """What the choice depends on."""
    device, spec, quantization = encoder.device, encoder.spec, encoder.quantization
    weights = f", weights in {quantization}" if quantization else ""
    return Question.of(
        "layout of tokens",
        f"{spec.family} encoder of {spec.layers} layers of {spec.width}, {dtype}{weights}",
        str(device),
        format=FORMAT,
        torch=torch.__version__,
        spec=repr(spec),
        poolings=list(encoder.poolings),
        quantization=quantization,
        dtype=dtype,
        layout=layout,
        graphs=graphs,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )


def recalled(asked: Question, device: torch.device) -> EncoderPlan | None:
    """The plan that was chosen before; None if none was."""
    verdict = recall(asked, budget_s=budget_of(device))
    return None if verdict is None else plan_of(verdict)


def plan_of(verdict: Verdict) -> EncoderPlan:
    chosen = verdict.trial(verdict.chosen)
    assert chosen is not None
    return replace(EncoderPlan(**chosen.facts), why=verdict.why)
