"""Texts on several devices: a process per device with the whole model, all served from one queue of prompts.

with anytorch.TextPool("./Qwen3-0.6B", devices=["cuda:0", "cuda:1"]) as pool:
    answers = pool.complete(["Once upon a time", "Why is the sky blue?"], max_tokens=100)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from anytorch import limits
from anytorch.device_pool import DevicePool, PoolJob
from anytorch.errors import InputError
from anytorch.text.generate.generator import TextGenerator
from anytorch.text.generate.stream import Completion

FACTORY = "anytorch.text.generate.pool:build"


class Worker:
    """A generator whose calls may be several prompts, which it computes together."""

    def __init__(self, **arguments: Any) -> None:
        self.generator = TextGenerator(**arguments)

    def complete(self, prompts: Sequence[Any], options: dict[str, Any]) -> list[Completion]:
        with ExitStack() as open_streams:  # a prompt that is refused ends those that were taken before it
            streams = [open_streams.enter_context(self.generator.stream(prompt, **options)) for prompt in prompts]
            return [stream.completion() for stream in streams]


def build(**arguments: Any) -> Worker:
    return Worker(**arguments)


class TextPool:
    """Several generators of one model. Thread-safe. `options` are those of `TextGenerator`.

    If a device's process dies, others take its prompts: nothing is lost while one runs.
    """

    def __init__(
        self, path: str | Path | None = None, *, devices: Sequence[str], at_once: int = 4, **options: Any
    ) -> None:
        told = {
            "path": None if path is None else str(path),
            "at_once": limits.BATCH.check("at_once", at_once),
            **options,
        }
        self._pool = DevicePool([PoolJob(device, FACTORY, {**told, "device": device}) for device in devices])
        self._at_once = at_once

    def complete(self, prompts: Sequence[Any], **options: Any) -> list[Completion]:
        """The continuation of every prompt, in their order; `at_once` of them are computed together on a device."""
        if isinstance(prompts, str):
            raise InputError("prompts is invalid: one text, where a list of them is expected", hint="pass [prompt]")
        size = min(self._at_once, max(1, -(-len(prompts) // max(1, len(self._pool.describe())))))
        parts = [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
        futures = [self._pool.submit("complete", list(part), options) for part in parts]
        return [one for future in futures for one in future.result()]

    def describe(self) -> list[dict[str, Any]]:
        return self._pool.describe()

    @property
    def process_ids(self) -> list[int | None]:
        return self._pool.process_ids

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> TextPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
