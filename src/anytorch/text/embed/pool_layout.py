"""Measure how many processes are fastest on this CPU, one with all cores or several with a share each, and store it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from anytorch import settings
from anytorch.errors import WrongAnswer
from anytorch.measured.engine import Candidate, Ready, measure
from anytorch.measured.stopwatch import Stopwatch
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Verdict, fastest
from anytorch.probe import snapshot
from anytorch.text.embed.pool import Job, PoolEncoder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LENGTHS = (16, 24, 32, 64, 128, 250)  # tokens of the texts that are timed: short ones mostly, as they come
ROUNDS = 3
BATCH_S = 0.15  # how long one process should take for one batch: with it, measuring takes seconds for any model
GAIN = 0.05  # several processes hold the weights several times: they must be faster by more than this share
STARTING = 10  # times the setting `measure_s`: starting processes takes longer than measuring them
MOST_ERROR = 1e-3  # of the vectors' size


def candidates(cores: int) -> list[int]:
    """Numbers of processes worth trying on so many cores. Pure.

    >>> candidates(2), candidates(16), candidates(96)
    ([1, 2], [1, 2, 4], [1, 2, 4, 8, 16])
    """
    return [1] + [count for count in (2, 4, 8, 16) if count * 4 <= cores or (count == 2 and cores >= 2)]


def best_processes(jobs: Callable[[int], Sequence[Job]], *, spec: str) -> tuple[int, str]:
    """How many worker processes are fastest here, and why. `spec` is what the answer depends on beside the machine."""
    cpu = snapshot().cpu
    if cpu.usable < 2:
        return 1, "one core: one process"
    counts = candidates(cpu.usable)
    asked = Question.of("processes", f"one encoder on {cpu.usable} cores", "cpu", spec=spec, cpu=repr(cpu))
    budget_s = STARTING * float(settings.get("measure_s"))
    verdict = recall(asked, budget_s=budget_s, names=list(map(str, counts)))
    if verdict is None:
        verdict = remember(compared(jobs, counts, asked, budget_s))
    return int(verdict.chosen or 1), told(verdict)


def told(verdict: Verdict) -> str:
    one = verdict.seconds("1")
    speeds = [f"{trial.name}: {one / trial.seconds:.2f}" for trial in verdict.trials if one and trial.seconds]
    return f"measured on this CPU, processes and their speed: {', '.join(speeds) or 'one could be used'}"


def compared(jobs: Callable[[int], Sequence[Job]], counts: Sequence[int], asked: Question, budget_s: float) -> Verdict:
    """The same batches through pools of each number of processes, whose vectors must be those of one process."""
    alone: list[npt.NDArray[np.float32]] = []
    repeats: list[int] = []
    work = 2 * max(counts)

    def candidate(count: int) -> Candidate:
        def prepare() -> Ready:
            pool = PoolEncoder(jobs(count))
            return Ready(partial(_encode, pool, 2 * count, 1), partial(sized, pool), close=pool.close)

        def sized(pool: PoolEncoder) -> Callable[[], object]:
            if not repeats:
                once = Stopwatch().seconds(partial(_encode, pool, 1, 1), 1)
                repeats.append(max(1, min(8, round(BATCH_S / once))))
            return partial(_encode, pool, work, repeats[0])

        return Candidate(str(count), prepare)

    def check(vectors: npt.NDArray[np.float32]) -> float:
        if not alone:
            alone.append(vectors)
        if vectors.shape != alone[0].shape or vectors.dtype != alone[0].dtype:
            raise WrongAnswer(f"vectors of {vectors.dtype}{list(vectors.shape)}")
        size = math.sqrt((alone[0].astype(float) ** 2).sum())
        return math.sqrt(((vectors.astype(float) - alone[0]) ** 2).sum()) / (size or 1.0)

    return measure(
        asked,
        [candidate(count) for count in counts],
        check,
        most_error=MOST_ERROR,
        budget_s=budget_s,
        rounds=ROUNDS,
        decide=partial(fastest, noise=GAIN),
    )


def _encode(pool: PoolEncoder, batches: int, repeats: int) -> npt.NDArray[np.float32]:
    """As many batches through a pool, all at once; the vectors of the last."""
    ids, starts = _batch(repeats)
    for pending in [pool.submit(ids, starts) for _ in range(batches)]:
        vectors = pending.result()
    return vectors


def _batch(repeats: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    import numpy as np

    lengths: Any = np.tile(np.array(LENGTHS, np.int32), repeats)
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return (np.arange(int(starts[-1])) % 900 + 100).astype(np.int32), starts
