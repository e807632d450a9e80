"""Turn a text, token ids, or the messages of a chat into token ids. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anytorch.errors import InputError, UsageError

MOST_STOPS = 64


def prompt_ids(tokenizer: Any, prompt: Any, vocabulary: int) -> list[int]:
    """Token ids of a text (with the model's beginning token, if it has one), or the ids that were given, checked."""
    if isinstance(prompt, str):
        ids = [int(token) for token in tokenizer(check_text(prompt, "the prompt"), verbose=False)["input_ids"]]
        if not ids and tokenizer.bos_token_id is not None:
            ids = [int(tokenizer.bos_token_id)]
        if not ids:
            raise InputError("the prompt is empty", hint="this model needs at least one token")
        return ids
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InputError(
            f"the prompt is of type {type(prompt).__name__}", hint="give a text, a list of messages, or token ids"
        )
    ids = list(prompt)
    if not ids:
        raise InputError("the prompt is empty", hint="give a text, a list of messages, or token ids")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise InputError(f"the prompt's token {place} is {token!r}: ids go from 0 to {vocabulary - 1}")
    return ids


def is_chat(prompt: Any) -> bool:
    """True if the prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], name: str) -> list[int]:
    """The messages in the model's own form, with the beginning of its answer. Never none."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the model {name} has no chat template: it can continue a text, but not answer messages",
            hint="give the prompt as one text, or use a model that was trained for chats",
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as exc:
        # A template is a program of the model's makers; it says itself what it does not take ("roles must alternate").
        raise InputError(f"the chat template of {name} does not take these messages: {exc}") from exc
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    if not ids:
        raise InputError(
            f"the chat template of {name} makes an empty text of these messages",
            hint="the model needs at least one token: pass a message with words, or the prompt as a text",
        )
    return ids


def check_messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Messages with a role and a text each. A content in parts (OpenAI's form) is joined; only text is taken."""
    found = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"message {place} is of type {type(message).__name__}, not an object with role and content"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InputError(f"message {place} has no role", hint='roles are "system", "user" and "assistant"')
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = "".join(part_text(part, place) for part in content)
        if not isinstance(content, str):
            raise InputError(f"message {place} has no content that is a text")
        found.append({"role": role, "content": check_text(content, f"message {place}")})
    return found


def part_text(part: Any, place: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InputError(f"message {place} has a part of type {kind!r}; only text is supported")


def check_text(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InputError(
            f"{what} has a lone surrogate at {exc.start} ({text[exc.start]!r})",
            hint="it was cut, or read with the wrong encoding",
        ) from exc
    return text


def check_stop(stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else list(stop or [])
    if len(strings) > MOST_STOPS:
        raise UsageError(f"stop has {len(strings)} strings; the limit is {MOST_STOPS}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(f"stop={string!r}: use non-empty texts")
    return strings
