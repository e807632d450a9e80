"""The loop: prompts in, generated pairs of ids out, with the published results also when the window rolls.

While a window grows, the cache answers. Once it is full, the published loop drops the oldest row and computes all
others anew, and every hidden state changes with it, so nothing of the cache may be used (`rolling="exact"`). What can be
used: at step i such a window is the last max_context - i rows of history, which all samples of a series share, and i
rows of their own. The shared rows are computed once per series, and only the own rows once per sample.

Around the loop: in which portions series and samples are computed (`split`), on how many CPU threads (`quiet_threads`), and
how their progress is shown (`progress`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from anytorch.devices.tune import trusted_setting
from anytorch.errors import UsageError
from anytorch.forecast.decoding.decoder import Cache, Decoder
from anytorch.forecast.decoding.sampling import Ahead, Draws, Sampler, exponential
from anytorch.forecast.generation.steps import FEWEST_STEPS, RolledSteps, Shape, StaticSteps, blocks, plan_rolled
from anytorch.forecast.model.fused import per_sample, through_blocks, through_window
from anytorch.probe import snapshot

# Rows whose temporary values exist at once. On a host 1024 rows already saturate the matrix products, and more would
# cost more memory than the published loop; an accelerator is busy only with many more.
HOST_ROWS, ACCELERATOR_ROWS = 1024, 32768
HOST_WINDOWS, ACCELERATOR_WINDOWS = 64, 4096  # series × samples


@dataclass(frozen=True)
class Chunk:
    """Some series (their places) with some of their samples (`first` … `last` - 1)."""

    series: tuple[int, ...]
    first: int
    last: int


def split(lengths: Sequence[int], samples: int, most_windows: int, nbytes: Sequence[int], budget: int) -> list[Chunk]:
    """Series sorted by length, longest first, in chunks of at most `most_windows` windows and `budget` bytes.

    `nbytes` says what one window of each series takes. A chunk always has at least one window.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    chunks: list[Chunk] = []
    waiting: list[int] = []
    used = 0
    for place in order:
        whole = nbytes[place] * samples
        if samples > most_windows or whole > budget:  # too much by itself: a few samples at a time
            at_once = max(1, min(most_windows, budget // max(1, nbytes[place])))
            chunks += [Chunk((place,), first, min(first + at_once, samples)) for first in range(0, samples, at_once)]
            continue
        if waiting and ((len(waiting) + 1) * samples > most_windows or used + whole > budget):
            chunks.append(Chunk(tuple(waiting), 0, samples))
            waiting, used = [], 0
        waiting.append(place)
        used += whole
    if waiting:
        chunks.append(Chunk(tuple(waiting), 0, samples))
    return chunks


def good_threads(stored: int | None, usable: int, load: float | None, current: int) -> int:
    """What `anytorch optimize` measured or a person set; else the cores that are idle, at least one. Pure."""
    if stored is not None:
        return stored
    if load is None:  # this system does not tell
        return min(current, usable)
    return max(1, min(current, usable, round(usable - load)))


# torch's OpenMP threads wait by spinning. A step of generation is dozens of small products with a barrier after each; where
# another job holds a core, the others spin for its time slice: two threads then burned eleven times the CPU time of one and
# took longer. So no more threads are used than there are cores with nothing to do.
@contextmanager
def quiet_threads(wanted: int | Literal["auto"] | None) -> Iterator[None]:
    """Set torch's threads for a forecast, and put them back."""
    if wanted not in (None, "auto") and not (isinstance(wanted, int) and wanted >= 1):
        raise UsageError(f"threads is {wanted!r}; use a number from 1, 'auto', or None")
    before = torch.get_num_threads()
    if wanted == "auto":
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        wanted = good_threads(trusted_setting("threads").value, snapshot().cpu.good_threads, load, before)
    if wanted is None or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Verbose = bool | Callable[[int, int], None]


Tick = Callable[[int], None]  # told how many steps are done


@contextmanager
def progress(wanted: Verbose, total: int) -> Iterator[Tick]:
    """What is told the number of steps done: a bar at a terminal, or the caller's own function; nothing anywhere else.

    A function is called with the steps done and all there are; what it raises ends the forecast.
    """
    if callable(wanted):
        yield lambda done: wanted(done, total)
    elif wanted is True and sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("forecasting", total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield lambda done: None


@dataclass(frozen=True)
class GenerationPlan:
    """What every chunk of a forecast has in common."""

    pred_len: int
    samples: int
    max_context: int
    rolling: str  # "exact" or "evict"; "trim" has shortened the prompts and needs neither
    sampler: Sampler
    limit_rows: int  # rows whose temporary values may exist at once
    static: Literal["", "plain", "recorded"] = ""  # steps of fixed shapes while all windows grow; recorded or not
    kernels: bool = False  # our own may compute these steps

    def cached_steps(self, shortest: int) -> int:
        """Generated rows that are ever added to the cache."""
        most = self.pred_len - 1
        return most if self.rolling == "evict" else max(0, min(most, self.max_context - shortest))


@dataclass(frozen=True)
class Prompts:
    """Series of one chunk, longest first. All tensors are on the decoder's device."""

    s1: Tensor  # [series, longest], padded at the end
    s2: Tensor
    lengths: Sequence[int]
    time: Tensor  # [series, longest, width]: the embedded stamps of the history
    future: Tensor  # [series, pred_len, width]


def generate(
    decoder: Decoder, prompts: Prompts, plan: GenerationPlan, draws: Draws | None, tick: Tick
) -> tuple[Tensor, Tensor]:
    """Ids of s1 and s2, each int64 [series × samples, pred_len]. `draws` is None for the greedy choice."""
    chunk = ChunkState(decoder, prompts, plan, draws)
    with closing(chunk.ahead) if chunk.ahead is not None else nullcontext():
        chunk.first()
        tick(1)
        done = 1 + chunk.replayed(tick)
        while done < plan.pred_len:
            done += chunk.prepared(done) or chunk.next(done)
            tick(done)
    return chunk.s1, chunk.s2


def begin(
    cache: Cache,
    sampler: Sampler,
    limit_rows: int,
    history: Tensor,
    first: Tensor | None = None,
    second: Tensor | None = None,
) -> Tensor:
    """Prompts into the cache, and the first pair of ids: int64 [2, series × samples]. The noise is None for greedy ones."""
    decoder = cache.decoder
    last = cache.prefill(history, limit_rows)
    s1 = sampler.draw(per_sample(decoder.s1_logits(last), cache.samples), first)
    s2 = sampler.draw(cache.s2_logits(per_sample(last, cache.samples), s1, None), second)
    return torch.stack((s1, s2))


def still_fits(decoder: Decoder, name: str, shape: object) -> bool:
    """Whether these steps are of an earlier forecast of the same shape. If not, they are gone: their memory is needed."""
    kept = getattr(decoder, name)
    if kept is not None and kept.shape != shape:
        kept.close()
        setattr(decoder, name, None)
    return getattr(decoder, name) is not None


class ChunkState:
    """The state of one chunk during the steps."""

    def __init__(self, decoder: Decoder, prompts: Prompts, plan: GenerationPlan, draws: Draws | None) -> None:
        self.decoder, self.prompts, self.plan, self.draws = decoder, prompts, plan, draws
        self.mark = object()  # which forecast this is, for what outlives it
        rows = len(prompts.lengths) * plan.samples
        self.s1 = torch.empty(rows, plan.pred_len, dtype=torch.long, device=decoder.device)
        self.s2 = torch.empty_like(self.s1)
        self.history = decoder.embed(prompts.s1, prompts.s2, prompts.time)  # the first block's inputs
        self.generated = self.history.new_empty(rows, plan.pred_len - 1, decoder.width)
        cache, self.steps = self.make_cache()
        self.cache: Cache | None = cache
        self.ahead: Ahead | None = None
        if draws is not None and self.steps is not None:
            replayed = self.steps.shape.steps
            counts = [1, *blocks(replayed), *[1] * (plan.pred_len - 1 - replayed)]
            self.ahead = Ahead(draws, counts, decoder.device, self.steps.pinned)

    def make_cache(self) -> tuple[Cache, StaticSteps | None]:
        """New, or that of an earlier forecast of the same shape with the recording that goes with it."""
        plan, lengths, decoder = self.plan, self.prompts.lengths, self.decoder
        capacity, evict = plan.cached_steps(min(lengths)), plan.rolling == "evict"
        growing = capacity if evict else max(0, min(plan.pred_len - 1, plan.max_context - max(lengths)))
        if not plan.static or growing < FEWEST_STEPS:
            return Cache(decoder, lengths, plan.samples, capacity, plan.max_context, evict), None
        lengths_of = (len(lengths), plan.samples, max(lengths), len(set(lengths)) > 1)
        shape = Shape(*lengths_of, growing, capacity, evict, plan.max_context, plan.sampler, plan.kernels)
        if not still_fits(decoder, "kept", shape):
            cache = Cache(decoder, lengths, plan.samples, capacity, plan.max_context, evict)
            decoder.kept = StaticSteps(cache, shape, plan.static == "recorded")
        steps: StaticSteps = decoder.kept
        steps.cache.start(lengths)
        return steps.cache, steps

    def replayed(self, tick: Tick) -> int:
        """The steps in which all windows grow, at once; → how many they were."""
        if self.steps is None:
            return 0
        count = self.steps.shape.steps
        future = self.prompts.future[:, :count]
        s1, s2 = self.steps.run(self.s1[:, 0], self.s2[:, 0], future, self.ahead, tick)
        self.s1[:, : count + 1], self.s2[:, : count + 1] = s1, s2
        kept = min(count + 1, self.generated.shape[1])
        time = per_sample(self.prompts.future[:, :kept], self.plan.samples)
        self.generated[:, :kept] = self.decoder.embed(s1[:, :kept], s2[:, :kept], time)
        return count

    def prepared(self, step: int) -> int:
        """The steps from this one on whose windows can be prepared together, if they can; → how many they were."""
        plan, prompts, decoder = self.plan, self.prompts, self.decoder
        series = len(prompts.lengths)
        if not plan.static or step >= plan.max_context or self.rolled(step) < series:
            return 0
        windows = (plan.samples, plan.max_context, plan.pred_len, step, plan.limit_rows)
        shape = plan_rolled(decoder, prompts.lengths, *windows, plan.sampler, plan.kernels)
        if shape is None:
            return 0
        self.cache = None
        if not still_fits(decoder, "kept_rolled", shape):
            decoder.kept_rolled = RolledSteps(decoder, shape, plan.static == "recorded")
        steps: RolledSteps = decoder.kept_rolled
        count = steps.count(step)
        steps.start(self.mark, self.generated, step, prompts.future)
        s1, s2 = steps.run(self.history, prompts.lengths, step, count, self.noise)
        end = min(step + count, plan.pred_len - 1)
        self.s1[:, step : step + count], self.s2[:, step : step + count] = s1, s2
        self.generated[:, step:end] = steps.own[:, step:end]
        return count

    def first(self) -> None:
        """The step after the prompts: all samples of a series have the same logits of s1."""
        assert self.cache is not None
        noise = [part for part in self.noise() if part is not None]
        work = partial(begin, self.cache, self.plan.sampler, self.plan.limit_rows)
        if self.steps is None:
            s1, s2 = work(self.history, *noise)
        else:
            s1, s2 = self.steps.replayed(("first", self.plan.limit_rows), work, self.history, *noise)
        self.keep(0, s1, s2)

    def next(self, step: int) -> int:
        """One step of windows that grow, roll, or do both; → 1."""
        rolled = self.rolled(step)
        if rolled == len(self.prompts.lengths):
            self.cache = None  # nothing grows any more: its memory is free for the windows
        noise_1, noise_2 = self.noise()
        lasts: list[Tensor] = []
        contexts: tuple[Tensor, Tensor | None] | None = None
        if rolled:
            last, shared, own = self.recomputed(step, rolled)
            lasts.append(last)
            contexts = (shared, own)
        if self.cache is not None:
            x = self.generated[rolled * self.plan.samples :, step - 1 : step]
            lasts.append(self.cache.advance(x, step - 1, rolled))
        last = torch.cat(lasts) if len(lasts) > 1 else lasts[0]
        s1 = self.plan.sampler.draw(self.decoder.s1_logits(last), noise_1)
        of_rolled = rolled * self.plan.samples
        logits = []
        if contexts is not None:
            logits.append(self.decoder.s2_logits(last[:of_rolled], s1[:of_rolled], *contexts))
        if self.cache is not None:
            logits.append(self.cache.s2_logits(last[of_rolled:], s1[of_rolled:], step - 1, rolled))
        s2_logits = torch.cat(logits) if len(logits) > 1 else logits[0]
        self.keep(step, s1, self.plan.sampler.draw(s2_logits, noise_2))
        return 1

    def rolled(self, step: int) -> int:
        """How many series, from the first (the longest), have outgrown the window at this step."""
        if self.plan.rolling == "evict":
            return 0
        return sum(length + step > self.plan.max_context for length in self.prompts.lengths)

    def recomputed(self, step: int, series: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The windows of the first `series` series: context of the last row, of the shared rows, of the own rows."""
        plan, rows = self.plan, series * self.plan.samples
        shared_rows = max(0, plan.max_context - step)
        own = self.generated[:rows, max(0, step - plan.max_context) : step]
        shared: Tensor | None = None
        if shared_rows:
            lengths = self.prompts.lengths[:series]
            if lengths[0] == lengths[-1]:
                shared = self.history[:series, lengths[0] - shared_rows : lengths[0]]
            else:
                shared = torch.stack([self.history[b, n - shared_rows : n] for b, n in enumerate(lengths)])
        if shared is None or plan.samples == 1:  # nothing is shared: one plain causal pass
            whole = own if shared is None else torch.cat((shared, own), dim=1)
            context = self.decoder.context(through_blocks(self.decoder.blocks, whole, plan.limit_rows))
            return context[:, -1], context, None
        shared, own_hidden = through_window(self.decoder.blocks, shared, own, plan.limit_rows)
        own_context = self.decoder.context(own_hidden)
        return own_context[:, -1], self.decoder.context(shared), own_context

    def noise(self) -> tuple[Tensor | None, Tensor | None]:
        if self.draws is None:
            return None, None
        if self.ahead is not None:
            first, second = self.ahead.take()
            return first[0], second[0]
        s1, s2 = (part.to(self.decoder.device, non_blocking=True) for part in next(self.draws))
        return exponential(s1), exponential(s2)

    def keep(self, step: int, s1: Tensor, s2: Tensor) -> None:
        self.s1[:, step], self.s2[:, step] = s1, s2
        if step < self.plan.pred_len - 1:
            time = per_sample(self.prompts.future[:, step : step + 1], self.plan.samples)
            self.generated[:, step : step + 1] = self.decoder.embed(s1[:, None], s2[:, None], time)
