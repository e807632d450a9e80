"""One loaded model of each job: its engine, its queue, and what /v1/models says about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anytorch.engines.embed.engine import ArrowEngine
from anytorch.engines.embed.queue import BatchReport, EngineQueue
from anytorch.errors import DeviceFallbackWarning
from anytorch.serve.options import ServeOptions
from anytorch.serve.schemas import ModelInfo


@dataclass(frozen=True)
class Wanted:
    """What to load: found by the command line or in a model folder, never a client's own text."""

    id: str
    job: str
    source: Path | str | None  # a folder, a name of a published model, or None for the embedded one
    device: str = "auto"
    quantization: str | None = None


class Model(Protocol):
    """What every job's model has; the rest is the job's own affair."""

    info: ModelInfo

    def alive(self) -> str:
        """Why it no longer answers; "" while it does."""

    def close(self) -> None: ...


def caught(make: Callable[[], Any]) -> tuple[Any, str]:
    """What `make` gives, and the DeviceFallbackWarning it issued: a service tells it to its clients."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = make()
    told = ""
    for one in said:
        if issubclass(one.category, DeviceFallbackWarning):
            told = str(one.message)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return made, told


class EmbeddingModel:
    """An ArrowEngine behind its queue."""

    def __init__(self, wanted: Wanted, options: ServeOptions, observe: Callable[[BatchReport], None] | None) -> None:
        self.engine, warning = caught(
            lambda: ArrowEngine(wanted.source, wanted.device, quantization=wanted.quantization, threads=options.threads)
        )
        self.queue = EngineQueue(
            self.engine, max_waiting_tokens=options.max_waiting_tokens, when_full="raise", observe=observe
        )
        self.engine.encode(["warm"])  # the first real request finds everything ready
        spec = self.engine.recipe.spec
        self.vocabulary = spec.vocabulary
        self.info = ModelInfo(
            id=wanted.id,
            job="embeddings",
            device=self.engine.device,
            device_warning=warning or None,
            dtype=str(self.engine.describe()["encoder"].get("dtype", "float32")),
            quantization=self.engine.quantization,
            path=str(self.engine.recipe.folder),
            parameters=None,
            dim=self.engine.dim,
            max_length=self.engine.max_length,
            loaded=True,
        )

    def alive(self) -> str:
        return self.queue.stuck()

    def close(self) -> None:
        self.queue.close()
        self.engine.close()
