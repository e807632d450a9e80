"""The bodies of /v1/completions and /v1/chat/completions: OpenAI's fields, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from anytorch import limits
from anytorch.serve.schemas import MOST_WORDS, Answer, Body

MOST_MESSAGES = 4096


def _only(*values: Any) -> AfterValidator:
    """A field of OpenAI's that has no effect here: only a value that asks for nothing is taken. Whatever it asks for is
    refused rather than left out without a word."""

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            raise ValueError("is not supported: leave it out")
        return value

    return AfterValidator(check)


class StreamOptions(Body):
    include_usage: bool | None = Field(
        None, description="the usage in a chunk of its own, which has no choices; left out: with the last choice"
    )
    continuous_usage_stats: bool | None = Field(None, description="the usage with every chunk (vLLM's name)")
    include_obfuscation: Annotated[Any, _only(False)] = None


class Sampling(Body):
    """OpenAI's clients send null for what is left open."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=limits.NEW_TOKENS.most)
    temperature: float | None = Field(1.0, ge=0, le=10)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(
        None,
        ge=-1,
        le=limits.TOP_K.most,
        description="0 or -1 for all tokens; left out: what the model's own settings say",
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="1 for none; left out: what the model's own settings say"
    )
    stop: str | Annotated[list[str], Field(max_length=MOST_WORDS)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool | None = False
    n: Annotated[Any, _only(1)] = 1
    logprobs: Annotated[Any, _only(False)] = None  # 0 is as false
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[Any, _only(0)] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    logit_bias: Annotated[Any, _only({})] = None
    # About the caller, not about the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    store: Annotated[Any, _only(False)] = None


class CompletionRequest(Sampling):
    prompt: str | Annotated[list[str], Field(max_length=MOST_WORDS)]
    echo: Annotated[Any, _only(False)] = False
    best_of: Annotated[Any, _only(1)] = None
    suffix: Annotated[Any, _only("")] = None


class ChatPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ChatPart], Field(max_length=MOST_MESSAGES)] | None = None
    name: str | None = Field(None, description="name of the speaker; the models' templates ignore it")
    # As the answers of a chat are sent back.
    refusal: Annotated[Any, _only()] = None
    annotations: Annotated[Any, _only([])] = None
    tool_calls: Annotated[Any, _only([])] = None


class ChatRequest(Sampling):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=limits.NEW_TOKENS.most)
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None
    top_logprobs: Annotated[Any, _only(0)] = None
    reasoning_effort: Annotated[Any, _only("none")] = None


class TextUsage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    tokens_per_second: float | None = None
    bandwidth_share: float | None = None


class CompletionChoice(Answer):
    index: int = 0
    text: str
    finish_reason: Literal["stop", "length"] | None = None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage | None = None


class ChatAnswerMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Answer):
    index: int = 0
    message: ChatAnswerMessage
    finish_reason: Literal["stop", "length"] | None = None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage | None = None
