"""The stream of a generated text: an iterator of pieces, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields

from anytorch.text.generate.requests import End, Event, FinishReason, TextRequest
from anytorch.text.generate.text import Decode, Detokenizer, StopStrings


@dataclass(frozen=True)
class Completion:
    """A finished text. `finish_reason`: "stop" (the model's end or a stop string), "length" (max_tokens), "cancelled".

    `tokens_per_second` is the rate after the first token, None for fewer than two. `bandwidth_share`: the part of the
    device's memory bandwidth that reading the weights for these tokens took, None where the bandwidth is not known.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    first_token_s: float | None
    tokens_per_second: float | None
    bandwidth_share: float | None


class Stream(AbstractContextManager["Stream"]):
    """Pieces of text as they are made: `for piece in stream` or `async for piece in stream`.

    `close()` (or leaving a `with` block, or forgetting the stream) stops the computation at the next token. The facts
    of `Completion` are there as attributes at any time; `finish_reason` is None while text may still come.
    """

    def __init__(
        self,
        request: TextRequest,
        decode: Decode,
        stop: Sequence[str],
        share_per_token_rate: float | None,
    ) -> None:
        self._request = request
        self._detokenizer = Detokenizer(decode, request.tokens[: request.prompt_length])
        self._stops = StopStrings(stop)
        self._share = share_per_token_rate
        self._first: float | None = None
        self._last: float | None = None
        self._ended: float | None = None
        self.prompt_tokens = request.prompt_length
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since the request was made, waiting included; until its end."""
        return (self._ended or time.perf_counter()) - self._request.arrived

    @property
    def first_token_s(self) -> float | None:
        return None if self._first is None else self._first - self._request.arrived

    @property
    def tokens_per_second(self) -> float | None:
        if self._first is None or self._last is None or self._last <= self._first:
            return None
        return (self.completion_tokens - 1) / (self._last - self._first)

    @property
    def bandwidth_share(self) -> float | None:
        rate = self.tokens_per_second
        return None if rate is None or self._share is None else rate * self._share

    def completion(self) -> Completion:
        """All that is left as one text, with the facts; waits for the end. Pieces that were read before are not in it."""
        text = "".join(self)
        return Completion(text, **{fact.name: getattr(self, fact.name) for fact in fields(Completion)[1:]})

    # --- reading ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while self.finish_reason is None:
            if piece := self._piece(self._request.mailbox.get()):
                return piece
        raise StopIteration

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> str:
        while self.finish_reason is None:
            event = self._request.mailbox.get_now()
            if event is None:
                await self._something_came()
            elif piece := self._piece(event):
                return piece
        raise StopAsyncIteration

    async def _something_came(self) -> None:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(came.set)

        self._request.mailbox.call(wake)
        try:
            await came.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._request.mailbox.call(None)

    def _piece(self, event: Event) -> str:
        """The text that an event brings, which may be none yet."""
        if isinstance(event, End):
            return self._end(event)
        self._first, self._last = self._first or event.first, event.last
        if not self._stops.any:
            self.completion_tokens += len(event.ids)
            return self._detokenizer.add(*event.ids)
        shown = ""
        for token in event.ids:  # one by one: those after a stop string are not counted
            self.completion_tokens += 1
            shown += self._stops.add(self._detokenizer.add(token))
            if self._stops.found is not None:
                self._request.cancelled = True
                self._finish("stop")
                break
        return shown

    def _end(self, event: End) -> str:
        self._finish(event.reason)
        if event.error is not None:
            raise event.error
        piece = self._stops.add(self._detokenizer.rest())
        if self._stops.found is not None:
            self.finish_reason = "stop"
            return piece
        return piece + self._stops.rest()

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._ended = time.perf_counter()

    # --- the rest of its life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the stream; unread text is lost. May be called twice."""
        self._request.cancelled = True
        if self.finish_reason is None:
            self._finish("cancelled")

    async def aclose(self) -> None:
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._request.cancelled = True  # nobody can read it any more
