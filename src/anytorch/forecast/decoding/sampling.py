"""From logits to ids: the published filters, and draws that are the same on every device.

`torch.multinomial` of one draw is argmax(probabilities / e) with e exponential noise [rows, ids] from the generator. The
noise is made on the CPU in the published order (one array for s1, one for s2, per step) and the rest is arithmetic, so
the same seed gives the same paths everywhere, and on the CPU bit for bit those of the published loop.

Uniform numbers of torch's CPU generator come from our C++ where there is a compiler: the same ones, several times as fast.
The library is compiled once, in a thread; until it is there, and where it cannot be, torch draws.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytorch import limits, logs, native, settings
from anytorch.errors import AnytorchError, InputError
from anytorch.workers import Workers

log = logs.logger(__name__)


@dataclass(frozen=True)
class Sampler:
    """How an id is drawn. Raises InputError for invalid values.

    `top_k` above 0 keeps the k likeliest ids (and those as likely as the last of them), and then `top_p` is not used;
    else `top_p` below 1 keeps the likeliest ids until their sum passes it. `top_k=1` is greedy: ties go to the lowest id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not limits.TEMPERATURE_ABOVE_ZERO.holds(self.temperature):
            most = limits.TEMPERATURE_ABOVE_ZERO.most
            raise InputError(
                f"T is {self.temperature!r} and must be above 0 and at most {most}", hint="top_k=1 is the greedy choice"
            )
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k!r} and must not be negative; 0 keeps all ids")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r} and must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """[rows, ids] of logits → probabilities after temperature and filter."""
        scaled = logits.float() if self.temperature == 1.0 else logits.float() / self.temperature
        return torch.softmax(keep(scaled, self.top_k, self.top_p), dim=-1)

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Ids, int64 [rows]. `noise` is exponential, [rows, ids]; the greedy choice needs none."""
        if noise is None:
            return logits.argmax(dim=-1)
        return (self.probabilities(logits) / noise).argmax(dim=-1)


def keep(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf for what the filter removes."""
    if top_k > 0:
        least = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        return logits.masked_fill(logits < least, -math.inf)
    if top_p >= 1.0:
        return logits
    ordered, order = torch.sort(logits, dim=-1, descending=True)
    passed = torch.softmax(ordered, dim=-1).cumsum(dim=-1) > top_p
    # The first id that passes the limit is still kept: the removal starts one later.
    removed = torch.cat((torch.zeros_like(passed[:, :1]), passed[:, :-1]), dim=-1)
    return logits.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), -math.inf)


class Noise:
    """The random numbers of one forecast, for all rows and steps, in the published order.

    They come from a generator of its own: torch's may be used by others meanwhile, who must not get the same numbers.
    """

    def __init__(self, start: Tensor, rows: int, sizes: tuple[int, int], moves: torch.Generator | None = None) -> None:
        """`start` is a generator's state; `moves` is the generator that `finish` leaves where the numbers end."""
        self.generator = torch.Generator()
        self.start, self.rows, self.sizes, self.moves = start, rows, sizes, moves

    @classmethod
    def seeded(cls, seed: int | None, rows: int, sizes: tuple[int, int]) -> Noise:
        """From a seed, as after `torch.manual_seed(seed)`; from torch's own generator where there is none."""
        if seed is None:
            return cls(torch.default_generator.get_state(), rows, sizes, torch.default_generator)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise InputError(f"invalid seed {seed!r}: use a whole number from 0 to 2**63 - 1")
        return cls(torch.Generator().manual_seed(seed).get_state(), rows, sizes)

    def finish(self) -> None:
        """The published loop draws from torch's generator: leave it as that would."""
        if self.moves is not None:
            self.moves.set_state(self.generator.get_state())

    def steps(self, wanted: Tensor, uniform: bool = False) -> Draws:
        """Noise for s1 and s2 of the rows `wanted` (int64), step by step, always from the first step.

        `uniform` leaves the logarithm to the device: the arrays are float64, for `exponential`.
        """
        self.generator.set_state(self.start)
        return Draws(self, wanted, uniform and exponential_from_uniform())


class Draws:
    """The steps of one part of a forecast's rows, as an iterator or in blocks.

    Every array is drawn whole: a part of the rows sees the same numbers whichever rows are computed with it.
    """

    def __init__(self, noise: Noise, wanted: Tensor, uniform: bool) -> None:
        self.noise, self.uniform = noise, uniform
        everything = len(wanted) == noise.rows and bool((wanted == torch.arange(noise.rows)).all())
        self.wanted = None if everything else wanted
        self.rows = len(wanted)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        first, second = self.parts(self.block(1))
        return first[0], second[0]

    def block(self, steps: int, pinned: bool = False) -> Tensor:
        """The numbers of so many steps, [steps, rows × (ids of s1 + ids of s2)]; `parts` takes them apart.

        In one piece of memory in the order in which they are drawn: nothing is copied, and it goes to a device whole.
        """
        rows, sizes, generator = self.noise.rows, self.noise.sizes, self.noise.generator
        # Of a part of the rows only that part needs the logarithm, which is what costs.
        uniform = self.uniform or (self.wanted is not None and exponential_from_uniform())
        dtype = torch.float64 if uniform else torch.float32
        numbers = torch.empty(steps, rows * sum(sizes), dtype=dtype, pin_memory=pinned and self.wanted is None)
        if uniform:
            fill(numbers, generator)
        else:  # torch makes these from a seed of each array, so each must be drawn by itself
            for step in numbers:
                for part in step.split([rows * size for size in sizes]):
                    part.view(rows, -1).exponential_(generator=generator)
        if self.wanted is None:
            return numbers
        found = torch.cat([part[:, self.wanted].flatten(1) for part in taken_apart(numbers, rows, sizes)], dim=1)
        found = found if self.uniform else exponential(found)
        return found.pin_memory() if pinned else found

    def parts(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """[steps, rows, ids] of s1 and of s2, wherever the block is."""
        return taken_apart(block, self.rows, self.noise.sizes)


def taken_apart(block: Tensor, rows: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    first, second = block.split([rows * size for size in sizes], dim=1)
    return first.unflatten(1, (rows, -1)), second.unflatten(1, (rows, -1))


def exponential(noise: Tensor) -> Tensor:
    """Noise as the sampler takes it, from what `Noise.steps` gave."""
    return noise if noise.dtype == torch.float32 else (-torch.log1p(-noise)).float()


@lru_cache(maxsize=1)
def exponential_from_uniform() -> bool:
    """True if this torch makes an exponential number from one uniform double, so that the device can do that part."""
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    wanted = torch.empty(1000).exponential_(generator=first)
    found = exponential(torch.empty(1000, dtype=torch.float64).uniform_(generator=second))
    return torch.equal(found, wanted) and torch.equal(first.get_state(), second.get_state())


WAITING = 3  # blocks that are made ahead


class Ahead:
    """Blocks of draws, `counts` steps each: `take()` → two tensors [steps, rows, ids] on the device.

    One thread makes them, one after the other, so that the order of the draws is that of the iterator.
    """

    def __init__(self, draws: Draws, counts: Sequence[int], device: torch.device, pinned: bool) -> None:
        self.draws, self.device, self.pinned = draws, device, pinned
        self.counts = deque(counts)
        self.pool = Workers(1, "anytorch-draws")
        self.waiting: deque[Future[Tensor]] = deque()
        for _ in range(WAITING):
            self._order()

    def _order(self) -> None:
        if self.counts:
            # From pinned memory the copy does not wait for what the device is doing.
            self.waiting.append(self.pool.submit(self.draws.block, self.counts.popleft(), self.pinned))

    def take(self) -> tuple[Tensor, Tensor]:
        block = self.waiting.popleft().result()
        self._order()
        first, second = self.draws.parts(block.to(self.device, non_blocking=True))
        return exponential(first), exponential(second)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


# --- uniform numbers -------------------------------------------------------------------------------------------------

SOURCE = Path(__file__).with_name("uniform.cpp")
WORDS = 624
# torch's state of a generator as bytes: the seed; how many words are left, and whether there is a seed (32 bits each); the
# place of the next word; the words, in 64 bits each; and what normal numbers need.
SIZE, LEFT, NEXT, FIRST_WORD = 5056, 8, 16, 24


def fill(numbers: Tensor, generator: torch.Generator) -> None:
    """What `numbers.uniform_(generator=generator)` does to contiguous float64 on the host."""
    library = library_for(settings.cache_folder()).library
    if library is None:
        numbers.uniform_(generator=generator)
    else:
        fill_by(library, numbers, generator)


def fill_by(library: Any, numbers: Tensor, generator: torch.Generator) -> None:
    if not numbers.numel():
        return
    state = generator.get_state()
    left, place = state[LEFT : LEFT + 4].view(torch.int32), state[NEXT : NEXT + 8].view(torch.int64)
    words = state[FIRST_WORD : FIRST_WORD + 8 * WORDS].view(torch.int64)
    current = words.to(torch.uint32)
    # One word is "left" when the next draw makes new ones.
    at = ctypes.c_int32(WORDS if int(left) == 1 else int(place))
    library.uniform(current.data_ptr(), ctypes.byref(at), numbers.data_ptr(), numbers.numel())
    words.copy_(current.to(torch.int64))
    left.fill_(WORDS + 1 - at.value)
    place.fill_(at.value)
    generator.set_state(state)


class UniformLibrary:
    """The compiled library, used once it has drawn the same numbers as torch."""

    def __init__(self) -> None:
        self.library: Any = None
        self.builder = threading.Thread(target=self._build, name="anytorch-uniform", daemon=True)
        try:
            self.builder.start()
        except RuntimeError as exc:
            log.info("random numbers are drawn by torch: %s", exc)

    def _build(self) -> None:
        try:
            library = native.load("uniform", [SOURCE])
        except AnytorchError as exc:  # no compiler, or a setting that names none
            log.info("random numbers are drawn by torch: %s", exc)
            return
        library.uniform.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        library.uniform.restype = None
        if draws_the_same(library):
            self.library = library
        else:
            log.info("random numbers are drawn by torch: this torch version draws differently")


@lru_cache(maxsize=2)
def library_for(cache: Path) -> UniformLibrary:
    return UniformLibrary()


def draws_the_same(library: Any) -> bool:
    """Numbers and states after a few draws of all kinds of lengths."""
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    if len(ours.get_state()) != SIZE:
        return False
    for count in (1, 311, 312, 313, 1000):
        found, wanted = torch.empty(2, count, dtype=torch.float64)
        fill_by(library, found, ours)
        wanted.uniform_(generator=theirs)
        # A single 32-bit draw in between: pairs of words then lie across two states.
        same = torch.equal(torch.rand(1, generator=ours), torch.rand(1, generator=theirs))
        if not (same and torch.equal(found, wanted) and torch.equal(ours.get_state(), theirs.get_state())):
            return False
    return True
