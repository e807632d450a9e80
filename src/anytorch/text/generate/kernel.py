"""Requests in the rows of a kernel: Llama, Mistral, Qwen2 and Qwen3 by the fastest way to decode that the device has.

A request takes a row when its keys and values have room, reads its prompt in portions between the others' tokens, and gives
the row back. Rows in use are always the first ones: whoever leaves is replaced by the last, so that none is computed for
nothing. The kernel is made anew, larger, when requests need it, and what is under way moves there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anytorch import logs
from anytorch.counts import counted
from anytorch.errors import ModelError, NativeUnavailable, OutOfMemory
from anytorch.memory.sizes import round_up, words
from anytorch.text.checkpoints.locate import first_line
from anytorch.text.decoders.loading import load_decoder
from anytorch.text.decoders.model import Decoder
from anytorch.text.decoders.rows import Rows
from anytorch.text.decoders.spec import FAMILIES
from anytorch.text.decoders.steps import RecordedSteps
from anytorch.text.generate.requests import Computed, TextRequest
from anytorch.text.packed.encoder import available_cores
from anytorch.text.persistent import cuda
from anytorch.text.persistent.ahead import Ahead
from anytorch.text.persistent.cuda_weights import PackedDecoder
from anytorch.text.persistent.fused import FusedSteps
from anytorch.text.persistent.host import HostKernel, load_packed_decoder
from anytorch.text.persistent.host_code import Draw, load_library
from anytorch.text.persistent.launched import LaunchedSteps, rows_for

log = logs.logger(__name__)

CHOICES = ("auto", "off")
MOST_ROWS = 1024
STEP_OF_POSITIONS = 512  # a kernel that is made anew for every longer request would cost more than this memory
ENDLESS = 1 << 40  # positions: more than anybody asks for

Make = Callable[[int, int], Rows]  # (rows, positions) → an empty kernel


@dataclass(frozen=True)
class Needs:
    """What a row of a model needs, and how far it goes."""

    vocabulary: int
    most_positions: int | None  # None: nothing limits them
    position_nbytes: int  # that are kept of a token
    windows: tuple[tuple[int, int], ...] = ()  # (tokens, bytes of each): kept of the last so many alone
    row_nbytes: int = 0  # that are kept of a text, however long

    def nbytes(self, positions: int) -> int:
        """Of a row."""
        last = sum(min(window, positions) * each for window, each in self.windows)
        return positions * self.position_nbytes + last + self.row_nbytes

    def most(self, positions: int) -> int:
        """So many positions, or as many as the model has. All there are where a token needs no memory of its own."""
        most = ENDLESS if self.most_positions is None else self.most_positions
        return min(positions, most) if self.position_nbytes or self.windows else most

    def fitting(self, room: int) -> int:
        """How many positions a row of so many bytes has."""
        return bisect_right(range(1, self.most(ENDLESS) + 1), room, key=self.nbytes)


def needs_of(decoder: Decoder) -> Needs:
    spec, weight = decoder.spec, decoder.model.embed_tokens.weight
    position_nbytes = 2 * spec.layers * spec.kv_width * weight.element_size()
    return Needs(spec.vocabulary, spec.max_positions, position_nbytes)


@dataclass(frozen=True)
class Opened:
    """A model at its place, and how its tokens are computed there."""

    model: Any  # a Decoder, or one of transformers
    make: Make
    kind: str  # "HostKernel", "RecordedSteps"
    says: str
    weight_nbytes: int | None = None  # that a token reads; None: the model's own
    of_model: Needs | None = None  # None: a Decoder's

    @property
    def needs(self) -> Needs:
        return self.of_model or needs_of(self.model)


def host_refusal(device: torch.device, family: str) -> str:
    """Why the CPU's kernel cannot be used for a model; "" if it can."""
    if device.type != "cpu" or family not in FAMILIES:
        return "it is for Llama, Mistral, Qwen2 and Qwen3 on the CPU"
    try:
        load_library()
    except NativeUnavailable as exc:
        return exc.message
    return ""


def open_packed(folder: Path, dtype: str, weights: str) -> Opened:
    """The decoder in a folder with packed linear layers, by the CPU's kernel. Raises ModelError, NativeUnavailable."""
    decoder, packed = load_packed_decoder(folder, dtype, weights)
    threads = worker_count()
    says = f"our C++ computes tokens of all requests in one call, with {counted(threads, 'worker')} and weights in {weights}"
    make = partial(HostKernel, decoder, threads=threads, weights=packed)
    return Opened(decoder, make, HostKernel.__name__, says, packed.nbytes)


def worker_count() -> int:
    return max(1, min(available_cores(), torch.get_num_threads()))  # as many as whoever set torch's allows


def open_kernel(folder: Path, device: torch.device, dtype: str, weights: str | None = None) -> Opened:
    """The decoder in a folder and the way its tokens are computed on the device: on the CPU our C++ where there is a
    compiler, else recorded steps. `weights`: packed ones ("int8", "int4") for texts that are alone, on a GPU that launches.
    Raises ModelError for a model that our decoders do not know, or a device they do not run on."""
    decoder = load_decoder(folder, device, dtype)
    why = ""
    if weights is not None:
        return _open_packed_launch(decoder, weights)
    if device.type == "cpu":
        threads = worker_count()
        try:
            HostKernel(decoder, 1, 1, threads)
        except NativeUnavailable as exc:
            why = f" ({exc.message})"
        else:
            says = f"our C++ computes tokens of all requests in one call, with {counted(threads, 'worker')}"
            return Opened(decoder, partial(HostKernel, decoder, threads=threads), HostKernel.__name__, says)
    try:
        steps, whose = _tried_out(decoder)
    except Exception as exc:
        raise ModelError(f"our decoder does not run on {device}: {first_line(exc)}") from exc
    whose_kernels = "our own" if isinstance(steps, FusedSteps) else "torch's"
    says = f"one recorded step of {whose_kernels} kernels computes a token of all requests"
    if steps.recorded:
        says = f"a step over fixed tensors computes a token of all requests; it is not recorded: {steps.recorded}"
    if isinstance(steps, LaunchedSteps):
        says += "; one launch computes all tokens of a single request that takes the most likely ones"
    return Opened(
        decoder,
        lambda rows, positions: type(steps)(decoder, rows, positions),
        type(steps).__name__,
        says + why + (f" ({whose})" if whose else ""),
    )


def _open_packed_launch(decoder: Decoder, weights: str) -> Opened:
    """Packed weights for a launch, and what they stand for in the decoder's dtype for all else. Raises ModelError."""
    weight = decoder.lm_head.weight
    if why := cuda.refusal(decoder.spec, weight.dtype, weight.device):
        raise ModelError(f"no kernel reads weights in {weights} on {weight.device}: {why}")
    packed = PackedDecoder(decoder, weights)
    packed.lend(decoder)
    try:
        steps, why = _tried_out(decoder, packed)
    except Exception as exc:
        raise ModelError(f"our decoder does not run on {weight.device}: {first_line(exc)}") from exc
    if not isinstance(steps, LaunchedSteps):
        raise ModelError(f"no kernel reads weights in {weights} on {weight.device}: {why}")
    says = (
        f"one launch with weights in {weights} computes all tokens of a single request that takes the most likely "
        "ones; for several, and for prompts, recorded steps of our own kernels read the same rounded numbers in 16 bits"
    )
    return Opened(
        decoder,
        lambda rows, positions: LaunchedSteps(decoder, rows, positions, packed),
        LaunchedSteps.__name__,
        says,
    )


def _tried_out(decoder: Decoder, packed: PackedDecoder | None = None) -> tuple[RecordedSteps, str]:
    """Steps that have computed a prompt and two tokens: the second one of a shape is recorded where the device can. And
    why they are not the fastest ones, if they are not."""
    steps, why = rows_for(decoder, 1, 4, packed)
    steps.read(0, [0])
    for _ in range(2):
        steps.follow(0, 0)
        logits = steps.step()
    logits.argmax(-1).tolist()  # waits for the device
    return steps, why


class KernelRows:
    """The `Way` of an opened kernel. `room`: bytes that all keys and values may take together.

    Used by the scheduler's worker alone.
    """

    def __init__(self, opened: Opened, room: int) -> None:
        self._make: Make | None = opened.make
        self._room, self._needs = room, opened.needs
        self._kernel: Rows | None = None
        self._taken: list[TextRequest] = []  # by row
        self._first_in_line: TextRequest | None = None  # waits for memory, and with it all that came later

    # --- the scheduler's questions -----------------------------------------------------------------------------------

    def read(self, request: TextRequest, portion: int) -> Computed:
        if request.cache is None and not self._admitted(request):
            return 0, None
        left = len(request.tokens) - request.length
        count = left if self._open.whole_prompts else min(left, portion)
        ids = request.tokens[request.length : request.length + count]
        logits = self._open.read(request.row, ids, onward=request.length > 0)
        return count, logits[None] if count == left else None

    def together(self, requests: Sequence[TextRequest]) -> list[TextRequest]:
        return list(requests)

    def step(self, requests: Sequence[TextRequest]) -> Computed:
        kernel = self._open
        for request in requests:
            kernel.follow(request.row, request.tokens[-1])
        logits, rows = kernel.step(), [request.row for request in requests]
        first = rows == list(range(len(rows)))
        return 1, logits[: len(rows)] if first else logits[rows]

    def several(self, requests: Sequence[TextRequest], most: int) -> list[list[int]] | None:
        kernel = self._open
        if not isinstance(kernel, HostKernel) or len({request.ends for request in requests}) > 1:
            return None
        steps = min(most, *(request.max_tokens - request.made for request in requests))
        chosen = {request.row: Chosen(request, steps, self._needs.vocabulary) for request in requests}
        for request in requests:
            kernel.follow(request.row, request.tokens[-1])
        draws = {row: one.draw for row, one in chosen.items() if one.draw is not None}
        return kernel.ahead([request.row for request in requests], steps, requests[0].ends, draws)

    def tokens(self, requests: Sequence[TextRequest]) -> Generator[list[int], None, None] | None:
        kernel = self._open
        if not isinstance(kernel, Ahead):
            return None
        for request in requests:
            kernel.follow(request.row, request.tokens[-1])
        return kernel.tokens([request.row for request in requests], [request.choice for request in requests])

    def undo(self, requests: Sequence[TextRequest]) -> None:
        for request in requests:
            self._open.cut(request.row, request.length)

    def leave(self, request: TextRequest) -> None:
        if self._first_in_line is request:
            self._first_in_line = None
        if request.cache is None:
            return
        request.cache, kernel = None, self._open
        last = self._taken.pop()
        if last is not request:
            kernel.take(request.row, kernel, last.row)
            self._taken[request.row], last.row = last, request.row
        kernel.cut(len(self._taken))

    def close(self) -> None:
        self._kernel = self._make = None

    # --- rows and their memory ---------------------------------------------------------------------------------------

    @property
    def _open(self) -> Rows:
        assert self._kernel is not None  # whoever has a row has it in a kernel
        return self._kernel

    def _admitted(self, request: TextRequest) -> bool:
        """Give a request a row; False if it has to wait until others leave. Raises OutOfMemory if that would not help."""
        positions = self._needs.most(request.prompt_length + request.max_tokens)
        if self._nbytes(1, positions) > self._room:
            raise self._too_long(request, positions)
        if self._first_in_line not in (None, request):
            return False
        if not self._made_room(len(self._taken) + 1, positions):
            self._first_in_line = request
            return False
        self._first_in_line = None
        request.cache, request.row = True, len(self._taken)  # its keys and values are in the kernel
        self._taken.append(request)
        return True

    def _made_room(self, rows: int, positions: int) -> bool:
        """Whether there is a kernel of so many rows and positions, or one was made."""
        had = self._kernel
        if had is not None and had.rows >= rows and had.positions >= positions:
            return True
        if not self._taken:
            had = self._kernel = None  # its memory first
        if had is not None:
            rows, positions = max(rows, had.rows), max(positions, had.positions)
        used = 0 if had is None else self._nbytes(had.rows, had.positions)
        more = min(rounded(rows), MOST_ROWS), self._needs.most(round_up(positions, STEP_OF_POSITIONS))
        for size in (more, (rows, positions)):
            if size[0] <= MOST_ROWS and used + self._nbytes(*size) <= self._room:
                self._kernel = self._moved(*size)
                return True
        return False

    def _moved(self, rows: int, positions: int) -> Rows:
        """A new kernel with what is under way. A failure leaves everything as it is."""
        assert self._make is not None  # not closed
        kernel = self._make(rows, positions)
        for row in range(len(self._taken)):
            kernel.take(row, self._open, row)
        log.debug("a kernel of %d rows of %d positions: %s", rows, positions, words(self._nbytes(rows, positions)))
        return kernel

    def _nbytes(self, rows: int, positions: int) -> int:
        return rows * self._needs.nbytes(positions)

    def _too_long(self, request: TextRequest, positions: int) -> OutOfMemory:
        fits = self._needs.fitting(self._room)
        left = fits - request.prompt_length
        return OutOfMemory(
            f"the keys and values of {request.prompt_length} + {request.max_tokens} tokens need "
            f"{words(self._nbytes(1, positions))}; there is room for {words(self._room)}, which is {fits} tokens",
            hint=f"use max_tokens={left} or less" if left > 0 else "shorten the prompt, or use another device",
        )


class Chosen:
    """How a request's next tokens are chosen within a call, with the memory that needs; `draw`: None for the likeliest."""

    def __init__(self, request: TextRequest, steps: int, vocabulary: int) -> None:
        sampling, self.draw = request.sampling, None
        if sampling.greedy and sampling.repetition_penalty == 1.0:
            return
        self._points = torch.tensor([] if sampling.greedy else request.points.ahead(steps), dtype=torch.float64)
        self._seen = torch.zeros(vocabulary, dtype=torch.uint8)
        if sampling.repetition_penalty != 1.0:
            self._seen[request.tokens] = 1
        self.draw = Draw(
            sampling.temperature,
            sampling.top_p,
            sampling.repetition_penalty,
            sampling.top_k,
            self._points.data_ptr(),
            self._seen.data_ptr() if sampling.repetition_penalty != 1.0 else None,
        )


def rounded(count: int) -> int:
    """The power of two that is as large or larger."""
    return 1 << (count - 1).bit_length()
