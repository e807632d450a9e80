"""Threads that compile several kernels at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def patient_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that is waited for. After Ctrl-C only what is being compiled is, not what stands in its queue."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
