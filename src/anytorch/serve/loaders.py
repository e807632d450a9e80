"""One loaded model of each job: its engine, its queue, and what /v1/models says about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from anytorch.devices.choose import fallbacks_to
from anytorch.errors import ModelError
from anytorch.forecast.queue import ForecastQueue
from anytorch.serve.options import ServeOptions
from anytorch.serve.schemas import ModelInfo
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.queue import BatchReport, EngineQueue

T = TypeVar("T")
CPU_THREAD_TOKENS = 1024  # of a batch, for each thread


@dataclass(frozen=True)
class Wanted:
    """A model to load: from the command line or a model folder, never a path from a client."""

    id: str
    job: str
    source: Path | str | None  # a folder, a name of a published model, or None for the embedded one
    device: str = "auto"
    quantization: str | None = None

    @property
    def asked(self) -> str | None:
        """The device as `resolve` takes it: "auto" is the configured one (KRONOS_DEVICE, …), if one is."""
        return None if self.device == "auto" else self.device


class Model(Protocol):
    """The interface of every job's loaded model."""

    info: ModelInfo

    def alive(self) -> str:
        """Why the model stopped answering; "" while it works."""

    def close(self) -> None: ...


def told(make: Callable[[], T]) -> tuple[T, str]:
    """The result of `make`, and the last device fallback on the way there, for the service's clients."""
    said: list[str] = []
    with fallbacks_to(said.append):
        made = make()
    return made, said[-1] if said else ""


def batch_tokens(engine: ArrowEngine) -> int | None:
    """Tokens per batch; None: the engine's own choice, the fastest for many texts.

    Our CPU encoder takes as long per token for 16 short texts as for 500, and whoever comes while a batch is computed
    waits for its end: so a batch is a quarter of a second of work rather than half of one.
    """
    if not engine.on_cpu:
        return None
    return CPU_THREAD_TOKENS * int(engine.describe()["encoder"].get("threads") or 1)


def count_parameters(folder: Path) -> int:
    """The number of a model's parameters, from the names and shapes in its files' headers."""
    with Checkpoint(folder) as checkpoint:
        return sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())


class EmbeddingModel:
    """An ArrowEngine behind its queue."""

    def __init__(self, wanted: Wanted, options: ServeOptions, observe: Callable[[BatchReport], None] | None) -> None:
        self.engine, warning = told(
            lambda: ArrowEngine(wanted.source, wanted.device, quantization=wanted.quantization, threads=options.threads)
        )
        self.queue = EngineQueue(
            self.engine,
            max_waiting_tokens=options.max_waiting_tokens,
            max_waiting_s=options.max_waiting_s,
            when_full="raise",
            observe=observe,
            batch_tokens=batch_tokens(self.engine),
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
            parameters=count_parameters(self.engine.recipe.encoder),
            dim=self.engine.dim,
            max_length=self.engine.max_length,
            loaded=True,
        )

    def alive(self) -> str:
        return self.queue.stuck()

    def close(self) -> None:
        self.queue.close()
        self.engine.close()


class ForecastModel:
    """A KronosPredictor behind a queue. torch is imported here, in the loading thread, and not before."""

    def __init__(self, wanted: Wanted, options: ServeOptions) -> None:
        from anytorch.forecast.checkpoints import load_predictor, read_trained_with

        source, tokenizer = wanted.source, None
        if isinstance(source, Path) and read_trained_with(source) is None:
            tokenizer = tokenizer_of(source)
        self.predictor, _ = told(
            lambda: load_predictor(
                "tiny" if source is None else source, tokenizer, device=wanted.asked, quantization=wanted.quantization
            )
        )
        # What waits longer than a request may take would be computed for nobody.
        self.queue = ForecastQueue(self.predictor, most_waiting_s=options.timeout_s)
        self.info = ModelInfo(
            id=wanted.id,
            job="forecast",
            device=self.predictor.resolution.chosen.id,
            device_warning=self.predictor.device_warning or None,
            dtype=str(next(self.predictor.model.parameters()).dtype).removeprefix("torch."),
            quantization=self.predictor.quantization,
            path=str(source) if isinstance(source, Path) else None,
            parameters=sum(int(p.numel()) for p in self.predictor.model.parameters()),
            max_length=self.predictor.max_context,
            loaded=True,
        )

    def alive(self) -> str:
        return self.queue.alive()

    def close(self) -> None:
        self.queue.close()


def tokenizer_of(folder: Path) -> Path:
    """The tokenizer that goes with a forecasting model's folder that does not name it: inside it, or beside it."""
    for place in (folder / "tokenizer", folder.parent / "tokenizer"):
        if (place / "config.json").is_file():
            return place
    raise ModelError(
        f"{folder}: this forecasting model has no tokenizer",
        hint=f"put the folder of the tokenizer it was trained with at {folder / 'tokenizer'}",
    )


class TextModel:
    """A TextGenerator, which has a queue of its own."""

    def __init__(self, wanted: Wanted) -> None:
        from anytorch.text.generate.generator import TextGenerator

        source = wanted.source
        if source is None:
            raise ModelError("there is no built-in text model", hint="name a folder with --text-model")
        self.generator, _ = told(lambda: TextGenerator(source, device=wanted.asked, quantization=wanted.quantization))
        self.generator.warmup()
        self.info = ModelInfo(
            id=wanted.id,
            job="text",
            device=self.generator.device,
            device_warning=self.generator.device_warning,
            dtype=self.generator.dtype,
            quantization=self.generator.quantization,
            path=str(self.generator.folder),
            parameters=self.generator.parameters,
            max_length=self.generator.max_length,
            loaded=True,
        )

    def alive(self) -> str:
        return ""

    def close(self) -> None:
        self.generator.close()
