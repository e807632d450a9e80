"""Recorded steps of our kernels, and one launch for a text that is alone and takes the most likely tokens.

Both read the same weights, keys and values, so a text changes between them at any token: it is launched while nobody else is
there, and goes on in steps when somebody comes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch

from anytorch import logs
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import NativeUnavailable, UsageError
from anytorch.text.decoders.choosing import Choice
from anytorch.text.decoders.model import Decoder
from anytorch.text.decoders.steps import RecordedSteps
from anytorch.text.persistent import cuda
from anytorch.text.persistent.cuda_weights import PackedDecoder
from anytorch.text.persistent.fused import SAME, FusedSteps, steps_for

log = logs.logger(__name__)

SAME_ROUNDED = 0.2  # of the logits' size: a launch with packed weights rounds what they are multiplied with, too

LAUNCH_S = 0.1  # that a launch may take; the pause until the next one is a thousandth of it
READ_RATE = 3e12  # bytes per second that a launch reads or more: H100, H200

_why_not: dict[tuple[Any, ...], str] = {}  # by model and device: why nothing is launched there; "" where it is


class LaunchedSteps(FusedSteps):
    """`FusedSteps` whose only text, if it takes the most likely tokens, gets all of them by one launch.

    `packed`: what a launch reads in place of the decoder's weights, which stand for the same numbers (`PackedDecoder.lend`).
    """

    def __init__(
        self, decoder: Decoder, rows: int = 1, positions: int | None = None, packed: PackedDecoder | None = None
    ) -> None:
        if packed is None:
            cuda.lay_out(decoder)
        super().__init__(decoder, rows, positions)
        self.launch = cuda.CudaKernel(decoder, kept=self.kept, weights=packed)
        numbers = decoder.spec.weight_numbers() * decoder.lm_head.weight.element_size()
        self.portion = portion_of(numbers if packed is None else packed.nbytes)

    @torch.no_grad()
    def tokens(self, rows: Sequence[int], choices: Sequence[Choice]) -> Generator[list[int], None, None]:
        if len(rows) != 1 or not choices[0].greedy:
            yield from super().tokens(rows, choices)
            return
        row, choice, (token, place) = rows[0], choices[0], self._next[:, rows[0]].tolist()
        left = self.positions if choice.most is None else choice.most
        length, given = self.lengths[row], 0
        try:
            while left > 0:
                count, before = min(left, self.portion), given
                with closing(self.launch.launched(row, token, place, count, choice.ends)) as made:
                    for token in made:
                        self.lengths[row] = length + given  # whoever goes on has followed with the one before
                        given += 1
                        yield [token]
                if given - before < count or token in choice.ends:
                    return
                place, left = place + count, left - count
        finally:
            self._wait(row)


def portion_of(nbytes: int) -> int:
    """Tokens of one launch, by the bytes that each reads. A launch has all multiprocessors, so whatever else the process
    computes on the GPU waits for its end: about a tenth of a second."""
    return max(8, round(LAUNCH_S * READ_RATE / max(1, nbytes)))


def rows_for(
    decoder: Decoder, rows: int, positions: int | None, packed: PackedDecoder | None = None
) -> tuple[RecordedSteps, str]:
    """The fastest steps that run on the decoder's device and give what torch gives; and why they are not launched, or not
    by our kernels ("" if they are). With `packed` weights a launch reads these."""
    steps, why = steps_for(decoder, rows, positions)
    if not isinstance(steps, FusedSteps):
        return steps, f"not by our own kernels: {why}"
    weight = decoder.lm_head.weight
    if why := cuda.refusal(decoder.spec, weight.dtype, weight.device):
        return steps, f"not in one launch: {why}"
    key = (decoder.spec, weight.dtype, weight.device, None if packed is None else packed.weights)
    if key not in _why_not:
        _why_not[key] = _trouble(decoder, packed)
        if _why_not[key]:
            log.warning("tokens on %s come step by step, not by one launch: %s", weight.device, _why_not[key])
    if _why_not[key]:
        return steps, f"not in one launch: {_why_not[key]}"
    return LaunchedSteps(decoder, rows, positions, packed), ""


def _trouble(decoder: Decoder, packed: PackedDecoder | None) -> str:
    """Compute one token by a launch and by a step: "" if the logits agree, else what is wrong."""
    try:
        steps = LaunchedSteps(decoder, 1, 4, packed)
        steps.read(0, [0])
        steps.follow(0, 1 % decoder.spec.vocabulary)
        wanted = steps.step()[0].float().clone()
        made = steps.tokens([0], [Choice(most=1)])
        next(made)
        made.close()
        by = float((steps.launch.logits - wanted).norm() / wanted.norm().clamp(min=1e-30))
    except (NativeUnavailable, UsageError) as exc:
        return exc.message
    except Exception as exc:
        if is_out_of_memory(exc):
            raise
        return f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
    return "" if by <= (SAME if packed is None else SAME_ROUNDED) else f"logits differ by {by:.2g} of their size"
