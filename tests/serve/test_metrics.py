"""What /metrics tells when models come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from anytorch.serve.metrics import Look, Metrics
from anytorch.text.embed.queue_line import QueueStats

# prometheus_client decides when it is imported whether processes count together.
SCRIPT = """
import sys
from pathlib import Path
from anytorch.text.embed.queue_line import QueueStats
from anytorch.serve.metrics import Look, Metrics

metrics = Metrics(Path(sys.argv[1]))
for model in ("old", "new"):
    look = Look({model: QueueStats(waiting_requests=3)}, {}, [("embeddings", model, "cpu")], 1)
    metrics._look = lambda: look
    text = metrics.text().decode()
print(text)
"""


def test_a_model_that_was_swapped_out_is_told_no_longer_among_workers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    for model, loaded, waiting in (("old", 0, 0), ("new", 1, 3)):
        assert f'anytorch_model_loaded{{device="cpu",job="embeddings",model="{model}"}} {loaded:.1f}' in lines, (
            done.stdout
        )
        assert f'anytorch_queue_requests{{model="{model}"}} {waiting:.1f}' in lines


def test_what_queues_have_ended_is_counted_over_swaps() -> None:
    metrics, stats = Metrics(), QueueStats(timed_out=2)
    metrics.watch(lambda: Look({"mini": stats}))

    def ended() -> float | None:
        text = metrics.text().decode()
        assert "# TYPE anytorch_queue_ended_total counter" in text
        labels = {"model": "mini", "cause": "timed_out"}
        return metrics.registry.get_sample_value("anytorch_queue_ended_total", labels)

    assert ended() == 2 and ended() == 2
    stats = QueueStats(timed_out=5)
    assert ended() == 5
    stats = QueueStats(timed_out=1)  # the same model, loaded anew
    assert ended() == 6
