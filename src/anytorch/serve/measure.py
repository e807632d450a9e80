"""The benchmark in a process of its own: `python -m anytorch.serve.measure REQUEST`, one JSON document per line on
standard output. A driver that crashes during a measurement ends this process, not the service."""

from __future__ import annotations

import json
import sys
from typing import Any

from anytorch.devices.bench import Row, benchmark
from anytorch.devices.types import Candidate
from anytorch.errors import AnytorchError
from anytorch.probe.facts import as_json


def main(arguments: list[str]) -> int:
    asked = json.loads(arguments[0])
    stream, sys.stdout = sys.stdout, sys.stderr  # whatever else prints must not get between the lines

    def tell(name: str, **data: Any) -> None:
        stream.write(json.dumps({"event": name, "data": data}) + "\n")
        stream.flush()

    def progress(done: int, total: int, what: str) -> None:
        device, _, test = what.partition(": ")
        tell("progress", device=device, test=test, fraction=done / total if total else 1.0, message=what or "done")

    def found(device: Candidate, row: Row) -> None:
        if row.ok and row.rate is not None:
            tell(
                "result", device=device.id, test=f"{row.workload}, {row.case}", rate=row.rate, unit=row.unit,
                limit=row.limit, share=row.share,
            )  # fmt: skip
        elif row.status != "skipped":
            tell("problem", device=device.id, test=f"{row.workload}, {row.case}", message=row.reason or row.status)

    try:
        report = benchmark(
            asked["devices"], duration_s=asked["seconds"], workloads=asked["workloads"], progress=progress, found=found
        )
    except AnytorchError as exc:
        tell("failed", kind=type(exc).__name__, message=exc.message, hint=exc.hint)
        return 1
    tell("report", report=as_json(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
