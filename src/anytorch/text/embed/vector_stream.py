"""Turn any iterable of texts into finished vectors, in order, a window at a time, tokenizing ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from anytorch.errors import InputError
from anytorch.text.embed.bar import Progress
from anytorch.text.embed.head import Head, as_precision, out_shape
from anytorch.text.embed.runner import Job, Runner
from anytorch.text.embed.tokens import Tokens
from anytorch.text.embed.windows import full_chunks, windows

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy.typing as npt

WINDOW_BATCHES = 4  # batches in one window: more sorts better, less starts sooner


class VectorStream:
    """Texts through one runner and head, for any number of callers."""

    def __init__(self, runner: Runner, head: Head, *, on_cpu: bool) -> None:
        self._runner, self._head, self._on_cpu = runner, head, on_cpu
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self,
        texts: Iterable[str],
        tokenize: Callable[[list[str], int], Tokens],
        counted: Callable[[Tokens, float], None],
        *,
        parallel: bool,
        dim: int | None,
        precision: str,
        report: Progress | None,
        known: int | None,
        into: npt.NDArray[Any] | None = None,
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Windows of finished vectors, in order, and the number of each one's first text; written to `into` if given.

        `tokenize(some, first)` makes tokens of some texts, `parallel` if it uses several threads by itself. `counted` is
        told of each window's tokens and the seconds it took; `known` is how many texts there are.
        """
        import numpy as np

        head = self._head
        columns, dtype = out_shape(head.check_dim(dim), precision)
        # Rows that need nothing more done to them may be written by the encoder itself.
        final = head.does_nothing and precision == "float32" and columns == head.out_width
        first_of: dict[int, tuple[int, npt.NDArray[Any]]] = {}  # by the identity of a job that is under way
        done = 0

        def jobs() -> Iterator[Job]:
            chunk = 0 if self._on_cpu else getattr(self._runner.encoder, "chunk_tokens", 0)
            found = windows(
                texts,
                tokenize,
                target_tokens=lambda: (1 if chunk else WINDOW_BATCHES) * self._runner.budget.tokens,
                workers=1 if self._on_cpu or parallel else 2,
                known=known,
                early=self._threads(parallel) if chunk else None,
            )
            for window in full_chunks(found, chunk) if chunk else found:
                if into is None:
                    rows = np.empty((window.count, columns), dtype)
                else:
                    rows = into[window.first : window.first + window.count]
                    if len(rows) < window.count:
                        raise InputError(f"the length of the texts is {known}, but more were read")

                def store(places: Any, pooled: Any, rows: Any = rows) -> None:
                    nonlocal done
                    if pooled is not None:
                        rows[places] = as_precision(head(pooled, dim), precision)
                    done += len(places)
                    if report is not None:
                        report(done, known)

                job = Job(window.tokens, store, rows if final else None)
                first_of[id(job)] = window.first, rows
                yield job

        began = time.perf_counter()
        for job in self._runner.stream(jobs()):
            now = time.perf_counter()
            counted(job.tokens, now - began)
            yield first_of.pop(id(job))
            began = time.perf_counter()

    def _threads(self, parallel: bool) -> ThreadPoolExecutor:
        """The threads that tokenize for a device. They stay: starting one takes as long as tokenizing a hundred texts."""
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1 if parallel else 2, thread_name_prefix="anytorch-tokenize")
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
