"""The service's metrics in Prometheus' text format. Labels are bounded: our routes, statuses, models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from anytorch.text.embed.queue import BatchReport
from anytorch.text.embed.queue_line import QueueStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)


class Metrics:
    """The counters of one process. Queue depths are read when metrics are requested, not on every request."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where several workers count together (prometheus_client's multiprocess mode)."""
        self._folder = folder
        self._look: Callable[[], Look] | None = None
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for when each series began: twice the text for nobody
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("anytorch_requests_total", "Requests by route and status", ("route", "status"), **make)
        self._latency = Histogram(
            "anytorch_request_seconds", "From the request's headers to the end of its answer", ("route",),
            buckets=SECONDS, **make,
        )  # fmt: skip
        self._rejected = Counter("anytorch_rejected_total", "Requests refused, by reason", ("reason",), **make)
        self._tokens = Counter("anytorch_tokens_total", "Tokens computed, by job", ("job",), **make)
        self._tokenize = Histogram("anytorch_tokenize_seconds", "Time to tokenize a request", buckets=SECONDS, **make)
        self._queued = Histogram(
            "anytorch_queue_seconds", "Time a request waited for its batch", buckets=SECONDS, **make
        )
        self._compute = Histogram("anytorch_compute_seconds", "Time to compute a batch", buckets=SECONDS, **make)
        self._batch_texts = Histogram("anytorch_batch_texts", "Texts in a batch", buckets=COUNTS, **make)
        self._batch_tokens = Histogram("anytorch_batch_tokens", "Tokens in a batch", buckets=TOKENS, **make)
        self._batch_failed = Counter("anytorch_batches_failed_total", "Batches that failed", **make)
        self._ended = Counter(
            "anytorch_queue_ended_total", "Requests that ended without an answer, by cause", ("model", "cause"), **make
        )
        self._gauges = {
            name: Gauge(name, words, names, multiprocess_mode="livesum", **make)
            for name, (words, names) in GAUGES.items()
        }
        self._seen: dict[tuple[str, str], int] = {}  # by model and cause: the queue's own count when last looked at
        self._set: set[tuple[str, tuple[str, ...]]] = set()  # gauges that were told when last looked at
        self._refreshing = Lock()
        self._children: dict[tuple[str, int], Any] = {}
        self._routes: dict[str, Any] = {}
        self.embedding_tokens = self._tokens.labels("embeddings")

    def request(self, route: str, status: int, seconds: float) -> None:
        child = self._children.get((route, status))
        if child is None:
            child = self._children[route, status] = self._requests.labels(route, str(status))
        child.inc()
        latency = self._routes.get(route)
        if latency is None:
            latency = self._routes[route] = self._latency.labels(route)
        latency.observe(seconds)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def tokens(self, job: str, count: int) -> None:
        self._tokens.labels(job).inc(count)

    def tokenized(self, seconds: float) -> None:
        self._tokenize.observe(seconds)

    def batch(self, report: BatchReport) -> None:
        self._compute.observe(report.seconds)
        self._batch_texts.observe(report.texts)
        self._batch_tokens.observe(report.tokens)
        for seconds in report.waited_s:
            self._queued.observe(seconds)
        if report.failed:
            self._batch_failed.inc()

    def watch(self, look: Callable[[], Look]) -> None:
        """Read queues and memory with `look` whenever the metrics are asked for."""
        self._look = look

    def refresh(self) -> None:
        """Count finished requests of the queues and read the gauges; with several workers, for the others to add up.

        Called about every second in a worker, and when somebody asks.
        """
        if self._look is None:
            return
        with self._refreshing:
            look = self._look()
            self._count_ended(look)
            now = {(name, labels): value for name, labels, value in look.gauges()}
            # A model that was swapped out is no longer among them; what it had last would be told for ever.
            for name, labels in self._set - now.keys():
                if self._folder is None:
                    self._gauges[name].remove(*labels)
                else:  # what other workers add up cannot be removed
                    self._gauges[name].labels(*labels).set(0)
            for (name, labels), value in now.items():
                gauge = self._gauges[name]
                (gauge.labels(*labels) if labels else gauge).set(value)
            self._set = set(now)

    def _count_ended(self, look: Look) -> None:
        for model, stats in look.queues.items():
            for cause in ("cancelled", "rejected", "timed_out", "failed"):
                count, before = getattr(stats, cause), self._seen.get((model, cause), 0)
                self._seen[model, cause] = count
                # A queue that counts less than before is another one, of a model that was loaded anew.
                self._ended.labels(model, cause).inc(count - before if count >= before else count)

    def text(self) -> bytes:
        self.refresh()
        if self._folder is None:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        collect: Any = MultiProcessCollector  # has no annotations
        collect(together, path=str(self._folder))
        return generate_latest(together)


@dataclass(frozen=True)
class Look:
    """Values read when metrics are requested: of the loaded models, and of this process."""

    queues: Mapping[str, QueueStats] = field(default_factory=dict)  # by model
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes, by device
    models: Sequence[tuple[str, str, str]] = ()  # job, model, device
    under_way: int = 0

    def gauges(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for model, stats in self.queues.items():
            yield "anytorch_queue_requests", (model,), stats.waiting_requests
            yield "anytorch_queue_tokens", (model,), stats.waiting_tokens
        for device, nbytes in self.memory.items():
            yield "anytorch_memory_bytes", (device,), nbytes
        for loaded in self.models:
            yield "anytorch_model_loaded", loaded, 1
        yield "anytorch_requests_under_way", (), self.under_way


GAUGES = {
    "anytorch_queue_requests": ("Requests waiting for a batch", ("model",)),
    "anytorch_queue_tokens": ("Tokens waiting for a batch", ("model",)),
    "anytorch_memory_bytes": ("Memory in use, by device", ("device",)),
    "anytorch_model_loaded": ("Number of processes that have loaded this model", ("job", "model", "device")),
    "anytorch_requests_under_way": ("Requests being answered", ()),
}
