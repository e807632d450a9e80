"""`python -m tests.serve.hanging STATE …`: `anytorch serve …` with an engine, a load or a stream that never ends.

With --workers N it is the workers' engines that hang.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from anytorch.child_process import python_command
from anytorch.cli.main import main
from anytorch.serve import server
from anytorch.serve.benchmarks import BenchmarkRunner
from anytorch.serve.state import State
from anytorch.text.embed.engine import ArrowEngine

STATES = ("idle", "loading", "computing", "hung thread", "streaming", "hung end")


def for_ever(*_: Any, **__: Any) -> Any:
    threading.Event().wait()


async def endless(*_: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    while True:
        yield "progress", {"fraction": 0.0}
        await asyncio.sleep(0.05)


def hang_in(state: str) -> None:
    real_build, real_tokenize, real_start = State.build, ArrowEngine.tokenize, ArrowEngine.start_tokens

    def build(self: State, wanted: Any) -> Any:
        return for_ever() if wanted.quantization else real_build(self, wanted)

    def tokenize(self: ArrowEngine, texts: Any, **options: Any) -> Any:
        return for_ever() if len(texts[0]) > 4000 else real_tokenize(self, texts, **options)

    def start_tokens(self: ArrowEngine, tokens: Any) -> Any:
        return for_ever() if int(tokens.starts[-1]) > 100 else real_start(self, tokens)

    patches: dict[str, tuple[Any, str, Any]] = {
        "loading": (State, "build", build),
        "computing": (ArrowEngine, "start_tokens", start_tokens),
        "hung thread": (ArrowEngine, "tokenize", tokenize),
        "streaming": (BenchmarkRunner, "run", endless),
        "hung end": (ArrowEngine, "close", for_ever),
    }
    if state in patches:
        owner, name, function = patches[state]
        setattr(owner, name, function)


def worker(arguments: list[str]) -> int:
    hang_in(arguments[0])
    return server.main(arguments[1:])


if __name__ == "__main__":
    hang_in(sys.argv[1])
    server.python_command = lambda _, *arguments: python_command("tests.serve.hanging:worker", sys.argv[1], *arguments)
    sys.exit(main(["serve", *sys.argv[2:]]))
