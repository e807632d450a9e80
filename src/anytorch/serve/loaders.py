"""One loaded model of each job (its engine, its queue, what /v1/models says about it), and which may be loaded.

Those of the command line, and those of the configured folders by their id: a client's text never becomes a path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from anytorch import logs
from anytorch.devices.choose import fallbacks_to
from anytorch.errors import ModelError, UsageError, did_you_mean
from anytorch.forecast.queue import ForecastQueue
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.serve.schemas import ModelInfo
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.locate import DEFAULT_MODEL, find_model
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.queue import BatchReport, EngineQueue

log = logs.logger(__name__)

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
    tokenizer: str | None = None  # of a forecasting model, where the command line names it
    at_once: bool = True  # False: loaded when somebody asks for it first

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


def info_of(wanted: Wanted, **facts: Any) -> ModelInfo:
    return ModelInfo(id=wanted.id, job=wanted.job, loaded=True, **facts)  # type: ignore[arg-type]  # one of JobName


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
        self.info = info_of(
            wanted,
            device=self.engine.device,
            device_warning=warning or None,
            dtype=str(self.engine.describe()["encoder"].get("dtype", "float32")),
            quantization=self.engine.quantization,
            path=str(self.engine.recipe.folder),
            parameters=count_parameters(self.engine.recipe.encoder),
            dim=self.engine.dim,
            max_length=self.engine.max_length,
        )

    def alive(self) -> str:
        return self.queue.stuck()

    def close(self) -> None:
        self.queue.close()
        self.engine.close()


class ForecastModel:
    """A KronosPredictor behind a queue. torch is imported here, in the loading thread, and not before."""

    def __init__(self, wanted: Wanted, options: ServeOptions) -> None:
        from anytorch.forecast.checkpoints import load_predictor, published_pair, read_trained_with

        source, tokenizer = wanted.source, wanted.tokenizer
        if tokenizer is None and isinstance(source, Path) and read_trained_with(source) is None:
            tokenizer = None if published_pair(source) is not None else str(tokenizer_of(source))
        self.predictor, _ = told(
            lambda: load_predictor(
                "tiny" if source is None else source, tokenizer, device=wanted.asked, quantization=wanted.quantization
            )
        )
        # What waits longer than a request may take would be computed for nobody.
        self.queue = ForecastQueue(self.predictor, most_waiting_s=options.timeout_s)
        self.info = info_of(
            wanted,
            device=self.predictor.resolution.chosen.id,
            device_warning=self.predictor.device_warning or None,
            dtype=str(next(self.predictor.model.parameters()).dtype).removeprefix("torch."),
            quantization=self.predictor.quantization,
            path=str(source) if isinstance(source, Path) else None,
            parameters=sum(int(p.numel()) for p in self.predictor.model.parameters()),
            max_length=self.predictor.max_context,
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
        self.generator, _ = told(lambda: TextGenerator(source, device=wanted.asked, quantization=wanted.quantization))
        self.generator.warmup()
        self.info = info_of(
            wanted,
            device=self.generator.device,
            device_warning=self.generator.device_warning,
            dtype=self.generator.dtype,
            quantization=self.generator.quantization,
            path=str(self.generator.folder),
            parameters=self.generator.parameters,
            max_length=self.generator.max_length,
            chat=self.generator.has_chat_template,
        )

    def alive(self) -> str:
        return ""

    def close(self) -> None:
        self.generator.close()


# --- names as models to load: those of the command line, and the one a client's id means ------------------------------

EMBEDDED = {"embeddings": DEFAULT_MODEL.partition("/")[2], "forecast": "tiny", "text": "tiny-writer"}


def first_models(options: ServeOptions) -> list[Wanted]:
    """The models to load at start: those named, else the built-in ones. Raises ModelError for an invalid one."""
    wanted: list[Wanted] = []
    for name in options.models:
        wanted.append(_named(name, options))
    if options.text_model is not None:
        wanted.append(Wanted(Path(options.text_model).name, "text", _folder(options.text_model), options.device))
    jobs = {one.job for one in wanted}
    if "embeddings" not in jobs and not (jobs - {"text"}):
        wanted.append(Wanted(EMBEDDED["embeddings"], "embeddings", None, options.device, options.quantization))
    if "forecast" not in jobs and options.forecast:
        wanted.append(Wanted(EMBEDDED["forecast"], "forecast", None, options.device))
    if "text" not in jobs and options.text:
        wanted.append(Wanted(EMBEDDED["text"], "text", None, options.device, at_once=False))
    return wanted


def _named(name: str, options: ServeOptions) -> Wanted:
    if name in (EMBEDDED["embeddings"], DEFAULT_MODEL):
        return Wanted(EMBEDDED["embeddings"], "embeddings", None, options.device, options.quantization)
    if name == EMBEDDED["forecast"] or name.lower().startswith("kronos-"):
        source = None if name == EMBEDDED["forecast"] else name
        return Wanted(name.lower(), "forecast", source, options.device, tokenizer=options.tokenizer if source else None)
    path, title = Path(name).expanduser(), name.rpartition("/")[2]
    if name == EMBEDDED["text"] and not path.is_dir():
        return Wanted(name, "text", None, options.device)
    if path.is_dir():
        title = path.resolve().name
    else:
        path = find_model(name)  # of the Hugging Face Hub; says what to do where there is none
    job = job_of(path)
    if job is None:
        raise ModelError(f"{path}: its config.json does not say what it is", hint="name a model's folder")
    quantization = options.quantization if job == "embeddings" else None
    tokenizer = options.tokenizer if job == "forecast" else None
    return Wanted(title, job, path, options.device, quantization, tokenizer)


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UsageError(f"--text-model {name}: there is no such folder")
    return path


def wanted_by(name: str, job: str | None, first: Sequence[Wanted], known: Mapping[str, Found]) -> Wanted:
    """The model a client's id means: an embedded one, one of the command line (`first`), or one of the model folders.

    Raises a 404 Problem where there is none, ModelError for one that may not be loaded.
    """
    for kind, embedded in EMBEDDED.items():
        if name == embedded and job in (None, kind):
            return Wanted(embedded, kind, None)
    for wanted in first:
        if name == wanted.id and job in (None, wanted.job):
            return wanted
    found = known.get(name)
    if found is None:
        raise Problem(
            404, "model-not-found", "Unknown model",
            f"{name[:200]!r} is not in the model folders",
            hint=did_you_mean(
                name, known, "GET /api/models lists what can be loaded; folders are named with --model-folder"
            ),
            param="model",
        )  # fmt: skip
    if job not in (None, found.job):
        raise Problem(
            404, "wrong-job", "The model is for another job",
            f"{name[:200]!r} is a model for {found.job}, not for {job}",
            hint="leave `job` out: the model's files say what it is for", param="job",
        )  # fmt: skip
    return Wanted(found.id, found.job, require(found))


# --- the models of the configured folders, by their id ----------------------------------------------------------------

DEEPEST = 3  # folders below a model folder that are looked into
MOST = 1000  # models listed
CONFIG_NBYTES = 2**20
# Formats whose files are programs: reading one runs what is in it.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Found:
    """A model folder on this disk."""

    id: str
    job: str
    path: Path
    refused: str = ""  # why it may not be loaded; "" when it may


def list_models(folders: Sequence[Path]) -> dict[str, Found]:
    """Every model folder below the configured ones, by id (its path below the folder)."""
    found: dict[str, Found] = {}
    for folder in folders:
        root = folder.resolve()
        for path in _folders(root, DEEPEST):
            job = job_of(path)
            if job is not None and len(found) < MOST:
                name = path.relative_to(root).as_posix() if path != root else root.name
                found.setdefault(name, Found(name, job, path, refusal(path, root)))
    return found


def _folders(path: Path, depth: int) -> Iterator[Path]:
    try:
        if (path / "config.json").is_file():
            yield path
            return  # what lies inside a model is part of it
        inside = sorted(child for child in path.iterdir() if child.is_dir()) if depth else []
    except OSError as exc:
        log.info("%s is skipped: %s", path, exc)
        return
    for child in inside:
        yield from _folders(child, depth - 1)


def job_of(path: Path) -> str | None:
    """The job of a model folder by its config.json; None if unknown."""
    config = read_config(path)
    if config is None:
        return None
    if "s1_bits" in config:
        return "forecast" if "n_layers" in config else None  # the tokenizer of a forecasting model is not one itself
    names = config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names) and not (path / "modules.json").is_file():
        return "text"
    return "embeddings" if "model_type" in config else None


def read_config(path: Path) -> dict[str, Any] | None:
    file = path / "config.json"
    try:
        if file.stat().st_size > CONFIG_NBYTES:
            return None
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def refusal(path: Path, root: Path) -> str:
    """The reason a folder may not be loaded, or "": a link out of the configured folder, or pickled weights."""
    if not path.resolve().is_relative_to(root):
        return "it is a link that leads out of the model folder"
    weights, pickles = False, []
    for file in path.rglob("*"):
        if not file.resolve().is_relative_to(root):
            return f"{file.name} is a link that leads out of the model folder"
        weights = weights or file.suffix == ".safetensors"
        if file.suffix in PICKLES:
            pickles.append(file.name)
    if weights:
        return ""
    if pickles:
        return f"its weights are a pickle ({pickles[0]}), which can run any code; only safetensors are loaded"
    return "it has no .safetensors file"


def require(found: Found) -> Path:
    if found.refused:
        raise ModelError(
            f"{found.id} is not loaded: {found.refused}", hint="put a safetensors copy into the model folder"
        )
    return found.path
