"""What the service counts, in Prometheus' text format. Labels are bounded: our routes, statuses, models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_METRICS

from anytorch.engines.embed.queue import BatchReport, QueueStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
__all__ = ["CONTENT_TYPE", "OPEN_METRICS", "Metrics"]


class Metrics:
    """The counters of one process. Reading a queue's depth happens when somebody asks, not on every request."""

    def __init__(self) -> None:
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

    def watch(self, look: Callable[[], dict[str, Any]]) -> None:
        """Read queues and memory whenever the metrics are: `look` gives {"queues": {model: QueueStats}, "memory": …}."""
        self.registry.register(_Depth(look))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Depth:
    """A collector: gauges that are read, not kept."""

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._look = look

    def describe(self) -> list[Any]:
        return []  # asking `collect` for the names would read everything at start

    def collect(self) -> list[GaugeMetricFamily]:
        seen = self._look()
        waiting = GaugeMetricFamily("anytorch_queue_requests", "Requests that wait for a batch", labels=["model"])
        tokens = GaugeMetricFamily("anytorch_queue_tokens", "Tokens that wait for a batch", labels=["model"])
        lost = GaugeMetricFamily(
            "anytorch_queue_ended", "Requests that ended without an answer, by cause", labels=["model", "cause"]
        )
        for model, stats in seen["queues"].items():
            assert isinstance(stats, QueueStats)
            waiting.add_metric([model], stats.waiting_requests)
            tokens.add_metric([model], stats.waiting_tokens)
            for cause in ("cancelled", "rejected", "timed_out", "failed"):
                lost.add_metric([model, cause], getattr(stats, cause))
        memory = GaugeMetricFamily("anytorch_memory_bytes", "Memory in use, by device", labels=["device"])
        for device, nbytes in seen["memory"].items():
            memory.add_metric([device], nbytes)
        loaded = GaugeMetricFamily(
            "anytorch_model_loaded", "1 for each loaded model", labels=["job", "model", "device"]
        )
        for job, model, device in seen["models"]:
            loaded.add_metric([job, model, device], 1)
        under_way = GaugeMetricFamily("anytorch_requests_under_way", "Requests being answered", value=seen["under_way"])
        return [waiting, tokens, lost, memory, loaded, under_way]
