"""POST /v1/completions and /v1/chat/completions, compatible with OpenAI, streamed or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from anytorch.serve import text_schemas as schemas
from anytorch.serve.bodies import JsonRoute
from anytorch.serve.loaders import TextModel
from anytorch.serve.problems import (
    EVENT_STREAM,
    Problem,
    clean,
    event,
    event_stream,
    internal,
    json_answer,
    problem_of,
    problems,
)
from anytorch.serve.state import State, allowed_s

router = APIRouter(tags=["text"], route_class=JsonRoute)
DEFAULT_TOKENS = 256
DEFAULT_LENGTH = 131_072  # positions, of a model that does not say
LONGEST_TOKEN = 16  # characters per token, on average over a prompt
STATUSES = problems(400, 401, 404, 413, 422, 429, 503, 504)


def described(model: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "content": {EVENT_STREAM: {"schema": {"type": "string"}}}}, **STATUSES}


@router.post("/v1/completions", response_class=Response, responses=described(schemas.CompletionAnswer))
async def completions(asked: schemas.CompletionRequest, request: Request) -> Response:
    """Continue a text."""
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if len(prompts) != 1:
        raise Problem(422, "invalid-body", "The body is invalid", "`prompt` must be one text", param="prompt")
    return await Writing(request, asked, prompts[0], "text_completion").answer(asked.max_tokens)


@router.post("/v1/chat/completions", response_class=Response, responses=described(schemas.ChatAnswer))
async def chat(asked: schemas.ChatRequest, request: Request) -> Response:
    """Answer the messages of a chat, put together by the model's own template."""
    messages = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content or ()),
        }
        for message in asked.messages
    ]
    return await Writing(request, asked, messages, "chat.completion").answer(
        asked.max_completion_tokens or asked.max_tokens
    )


def given(value: float | None) -> float:
    """The value, or OpenAI's default where the client sent none."""
    return 1.0 if value is None else value


def close_if_made(making: asyncio.Future[Any]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()


class Writing:
    """One request for text, and the shapes of its answer: both end points differ in the shape of a choice alone."""

    def __init__(self, request: Request, asked: schemas.Sampling, prompt: Any, kind: str) -> None:
        self._service: State = request.app.state.service
        self._asked, self._prompt, self._kind = asked, prompt, kind
        self._slot = self._service.models.slot("text", asked.model)
        self._deadline_s = allowed_s(request, self._service.options)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid4().hex}"
        self._created = int(time.time())

    @property
    def _chat(self) -> bool:
        return self._kind == "chat.completion"

    async def answer(self, max_tokens: int | None) -> Response:
        asked, service = self._asked, self._service
        most = service.options.max_new_tokens
        if max_tokens is not None and max_tokens > most:
            raise Problem(
                422, "invalid-body", "The body is invalid", f"max_tokens is {max_tokens}; the limit is {most}",
                param="max_tokens",
            )  # fmt: skip
        self._slot.users += 1
        try:
            model = await service.models.ready(self._slot)
            assert isinstance(model, TextModel)
            self._model = model.info.id
            self._check_length(model)
            stream = await self._started(model, max_tokens or min(DEFAULT_TOKENS, most))
            if asked.stream:
                return Held(event_stream(self._events(stream)), lambda: self._let_go(stream))
        except BaseException:
            service.models.release(self._slot)
            raise
        try:
            with stream:
                text = "".join([piece async for piece in stream])
                return json_answer(self._document([self._choice(text, finish(stream))], self._usage(stream)))
        finally:
            self._let_go(stream)

    def _let_go(self, stream: Any) -> None:
        """Release the model and count the tokens made, when the answer has ended, whole or not."""
        stream.close()
        self._service.metrics.tokens("text", stream.completion_tokens)
        self._service.models.release(self._slot)

    def _check_length(self, model: TextModel) -> None:
        """Refuse a prompt that is clearly too long before tokenizing it."""
        parts = [self._prompt] if isinstance(self._prompt, str) else [message["content"] for message in self._prompt]
        length = sum(len(part) + 1 for part in parts)
        most = LONGEST_TOKEN * (model.info.max_length or DEFAULT_LENGTH)
        if length > most:
            raise Problem(
                413, "too-long", "The prompt is too long", f"it has {length} characters; this model's limit is {most}",
                hint="shorten the prompt", param="messages" if self._chat else "prompt",
            )  # fmt: skip

    async def _started(self, model: TextModel, max_tokens: int) -> Any:
        """The stream of the answer. Tokenizing a long prompt takes seconds: not on the event loop."""
        asked = self._asked
        start = partial(
            model.generator.stream, self._prompt, max_tokens, given(asked.temperature), given(asked.top_p),
            None if asked.top_k is None else max(0, asked.top_k), asked.stop, asked.seed,
            repetition_penalty=asked.repetition_penalty, timeout_s=self._deadline_s,
        )  # fmt: skip
        making = asyncio.ensure_future(self._service.pools.prompts.run(start))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:  # the client has gone: what comes out in the end is stopped at once
            making.add_done_callback(close_if_made)
            raise

    async def _events(self, stream: Any) -> AsyncIterator[bytes]:
        options = self._asked.stream_options
        live = options is not None and bool(options.continuous_usage_stats)
        apart = options is not None and bool(options.include_usage)  # in a chunk of its own, as OpenAI sends it
        with stream:
            try:
                if self._chat:
                    yield event(
                        self._chunk(
                            [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
                        )
                    )
                async for piece in stream:
                    yield event(self._chunk([self._piece(piece, None)], self._usage(stream) if live else None))
                yield event(
                    self._chunk([self._piece("", finish(stream))], None if apart and not live else self._usage(stream))
                )
                if apart:
                    yield event(self._chunk([], self._usage(stream)))
                yield event(b"[DONE]")
            except Exception as exc:  # noqa: BLE001  (the status was sent long ago: the stream itself must say it)
                problem = problem_of(exc) or internal(self._id)
                kind = "server_error" if problem.status >= 500 else "invalid_request_error"
                yield event({"error": {"message": clean(problem.detail), "type": kind, "code": problem.code}})

    def _document(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._id, "object": self._kind, "created": self._created, "model": self._model, "choices": choices,
            **({} if usage is None else {"usage": usage}),
        }  # fmt: skip

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        document = self._document(choices, usage)
        return {**document, "object": "chat.completion.chunk"} if self._chat else document

    def _choice(self, text: str, reason: str) -> dict[str, Any]:
        if self._chat:
            return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}

    def _piece(self, text: str, reason: str | None) -> dict[str, Any]:
        if self._chat:
            return {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}

    def _usage(self, stream: Any) -> dict[str, Any]:
        rate, share = stream.tokens_per_second, stream.bandwidth_share
        return {
            "prompt_tokens": stream.prompt_tokens,
            "completion_tokens": stream.completion_tokens,
            "total_tokens": stream.prompt_tokens + stream.completion_tokens,
            "tokens_per_second": None if rate is None else round(rate, 2),
            "bandwidth_share": None if share is None else round(share, 4),
        }


class Held(Response):
    """A streamed response that lets go of its model when it ends, however it ends."""

    def __init__(self, inner: Response, let_go: Callable[[], None]) -> None:
        self._inner, self._let_go = inner, let_go
        self.background = None
        self.status_code = 200
        self.raw_headers = inner.raw_headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._inner(scope, receive, send)
        finally:
            self._let_go()


def finish(stream: Any) -> str:
    return "stop" if stream.finish_reason == "stop" else "length"
