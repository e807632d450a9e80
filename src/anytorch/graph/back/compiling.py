"""Threads that compile several kernels at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anytorch.workers import Workers


@contextmanager
def patient_pool(threads: int) -> Iterator[Workers]:
    """A pool that is waited for. After Ctrl-C only what is being compiled is, not what stands in its queue."""
    pool = Workers(threads, "anytorch-compile")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
