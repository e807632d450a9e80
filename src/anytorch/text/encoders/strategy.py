"""Choose the fastest layout, with or without graphs, for a model on a device: measured once, then stored.

Candidates are asked what the device states it can do, tried, compared with the plainest way (a wrong answer is never
used), and timed on texts of mixed lengths. The answer goes to the cache under the machine, the device and the model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from anytorch import logs
from anytorch.cache import Store
from anytorch.devices.memory import synchronize
from anytorch.devices.oom import is_out_of_memory
from anytorch.devices.tune.machine import machine_key
from anytorch.devices.types import Caps
from anytorch.errors import CacheError, WrongAnswer
from anytorch.text.checkpoints.spec import EncoderSpec

if TYPE_CHECKING:
    from anytorch.text.encoders.encoder import TorchEncoder

log = logs.logger(__name__)

LAYOUTS = ("packed", "rows", "one-by-one")
HALF_COSINE = 0.9995  # what a half-precision vector must have to its float32 one, at worst
SAME_COSINE = 0.9998  # two ways in one dtype: they differ by rounding alone
LARGEST_CHECKED_NBYTES = 8 * 2**30
HOPELESS = 8  # times slower than another way: graphs alone do not make up for it
FEW_TOKENS = 256
QUICK_S = 0.05
STORE = "encoders"
FORMAT = 5  # part of the key: raise it when a layout's code changes what is worth choosing


@dataclass(frozen=True)
class Plan:
    dtype: str
    layout: str  # one of LAYOUTS
    graphs: bool
    fused: bool = False  # the activation inside the product before it
    kernels: bool = False  # our own, in Triton
    blocks: int = 0  # warps that attend block by block in texts beyond a tile; 0: torch's flash kernel does
    why: str = ""

    @property
    def short(self) -> str:
        return (
            self.layout
            + (" with graphs" if self.graphs else "")
            + (" and fused" if self.fused else "")
            + (" and our kernels" if self.kernels else "")
            + (f" in blocks by {self.blocks} warps" if self.blocks else "")
        )

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


def linear_weights(spec: EncoderSpec) -> int:
    """Weights of all matrix products: twice as many operations per token."""
    attention = spec.width * spec.head_width * 2 * (spec.heads + spec.kv_heads)
    return spec.layers * (attention + spec.width * spec.inner * (3 if spec.gated else 2))


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
) -> list[Plan]:
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
        Plan(dtype, name, record, fused)
        for name in layouts
        for record in recorded
        for fused in fusing
        if not (record and name == "one-by-one") and not (fused and record != recorded[-1])
    ] + [
        Plan(dtype, "packed", recorded[-1], fusing[-1], kernels=True, blocks=blocks)
        for name in layouts
        if name == "packed" and may_use_kernels(caps, spec, dtype, host)
        for blocks in (0, 2, 4)
    ]


def may_use_kernels(caps: Caps, spec: EncoderSpec, dtype: str, host: bool) -> bool:
    """True if our Triton kernels apply: they support heads of these widths, and LayerNorm after a sum."""
    if host or not caps.triton or dtype == "float32":
        return False
    return spec.head_width in (16, 32, 64, 128) or not (spec.pre_norm or spec.rms_norm)


def choose(encoder: TorchEncoder, layout: str, graphs: bool | None) -> Plan:
    """Measure the candidates on the loaded model; the fastest that agrees with the first."""
    host = encoder.device.type == "cpu"
    can_fuse = encoder.module.can_fuse()
    plans = candidates(encoder.caps, encoder.spec, encoder.dtype_name, host, layout, graphs, can_fuse=can_fuse)
    if len(plans) == 1:
        return replace(plans[0], why="the only possible layout, or requested")
    # On the CPU some 5 GFLOP, a few tenths of a second on one core; on a GPU a full chunk, or launches are all one sees.
    tokens = min(512, max(64, int(2.5e9 / linear_weights(encoder.spec)))) if host else affordable(encoder, plans[0])
    # Short texts alone, too, on a device, and long ones: there are ways that only they take.
    texts = [sample(encoder.spec, tokens)]
    if not host:
        texts += [sample(encoder.spec, tokens, longest=48), sample(encoder.spec, tokens, shortest=200)]
    timed: list[tuple[float, Plan]] = []
    reference: npt.NDArray[np.float32] | None = None
    # Plain ways first: one that is hopeless without graphs is not recorded shape by shape to find that out.
    for plan in sorted(plans, key=lambda plan: plan.graphs):
        fastest = min((seconds for seconds, _ in timed), default=float("inf"))
        plainly = next((s for s, other in timed if other.layout == plan.layout), 0.0)
        if plan.graphs and plainly > HOPELESS * fastest:
            continue
        try:
            found = _try(encoder, plan, texts)
            if reference is None:
                reference = found
            elif (worst := worst_cosine(reference, found)) < SAME_COSINE:
                raise WrongAnswer(f"its vectors have a cosine of {worst:.6f} to those of {plans[0].layout}")
            timed.append((_time(encoder, texts, host, fastest), plan))
        except Exception as exc:
            # A library, a compiler or a driver may raise anything. The plainest way has nothing to fall back to.
            if is_out_of_memory(exc) or reference is None:
                raise
            log.info("%s: %s cannot be used: %s: %s", encoder.device, plan.words, type(exc).__name__, exc)
    best = min(timed, key=lambda pair: pair[0])[1]
    others = ", ".join(f"{plan.short} {seconds * 1e3:.2f} ms" for seconds, plan in timed)
    tokens = sum(len(ids) for ids, _ in texts)
    return replace(best, why=f"the fastest for {tokens} tokens of mixed lengths: {others}")


def affordable(encoder: TorchEncoder, plan: Plan) -> int:
    """A full chunk, or as many tokens as a slow device computes in half a second: it must not be measured for minutes.

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
            return max(FEW_TOKENS, min(encoder.chunk_tokens, int(0.5 * len(texts[0]) / max(took, 1e-9))))
        tokens = min(encoder.chunk_tokens, 8 * tokens)


Texts = tuple["npt.NDArray[np.int32]", "npt.NDArray[np.int32]"]  # ids and starts


def _try(encoder: TorchEncoder, plan: Plan, texts: Sequence[Texts]) -> npt.NDArray[np.float32]:
    """Twice, and once more: a shape is recorded when it comes again, and it is the replay that must be right."""
    encoder.use(plan)
    for _ in range(3 if plan.graphs else 1):
        found = [encoder.run(*some) for some in texts]
    if encoder.recorder is not None and encoder.recorder.failed:
        raise NotImplementedError(f"it records no graphs: {encoder.recorder.failed}")
    return np.concatenate(found)


def _time(encoder: TorchEncoder, texts: Sequence[Texts], host: bool, fastest: float) -> float:
    """Seconds for all texts, the next batch always waiting: the median of three; one is enough for what is far behind."""
    clock = time.process_time if host else time.perf_counter
    found: list[float] = []
    for count in (1,) * 3 if host else (1, 4, 4):
        synchronize(encoder.device)
        begin = clock()
        under_way = [encoder.submit(*some) for _ in range(count) for some in texts]
        for pending in under_way:
            pending.result()
        found.append((clock() - begin) / count)
        if found[0] > 3 * fastest:
            break
    return sorted(found)[len(found) // 2]


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


def worst_cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """The least cosine of a row with its counterpart; -1 when one is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return -1.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(((x * y).sum(1) / np.maximum(sizes, 1e-30)).min())


# --- remembering ---------------------------------------------------------------------------------------------------


def key(
    device: torch.device,
    spec: EncoderSpec,
    poolings: Sequence[str],
    quantization: str | None,
    dtype: str,
    layout: str,
    graphs: bool | None,
) -> str:
    facts = (FORMAT, machine_key(), str(device), torch.__version__, repr(spec), tuple(poolings), quantization, dtype)
    asked = (layout, graphs, torch.get_num_threads() if device.type == "cpu" else 0)
    return hashlib.sha256(repr((facts, asked)).encode()).hexdigest()[:24]


def recall(name: str) -> Plan | None:
    try:
        stored = Store(STORE).get(name)
        return Plan(**stored) if isinstance(stored, dict) else None
    except (CacheError, TypeError) as exc:
        log.warning("the stored choice for an encoder cannot be read and is measured again: %s", exc)
        return None


def remember(name: str, plan: Plan) -> None:
    try:
        Store(STORE).put(name, asdict(plan), keep=200)
    except CacheError as exc:
        log.warning("%s", exc.message)
