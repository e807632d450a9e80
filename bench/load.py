"""What serve.py and serve_load.py share: servers as processes, prepared requests, and the load generator in C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
RECORD = np.dtype([("due", "<f8"), ("latency", "<f4"), ("status", "<u2"), ("flags", "<u2")])
START_TIMEOUT_S = 120
TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def client_program(folder: Path) -> Path:
    """The load generator, compiled."""
    program = folder / "load_client"
    subprocess.run(["cc", "-O2", "-o", program, HERE / "load_client.c"], check=True)
    return program


def request_bytes(path: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def write_requests(path: Path, requests: Sequence[bytes]) -> None:
    with path.open("wb") as file:
        for one in requests:
            file.write(struct.pack("<I", len(one)) + one)


@dataclass
class Run:
    """What came of one run of the load generator."""

    records: npt.NDArray[Any]
    seconds: float
    client_cpu_s: float

    @property
    def answered(self) -> npt.NDArray[Any]:
        return self.records[self.records["status"] == 200]

    def summary(self) -> dict[str, Any]:
        good = self.answered["latency"] * 1e3
        statuses, counts = np.unique(self.records["status"], return_counts=True)
        return {
            "requests": len(self.records),
            "statuses": {str(status): int(count) for status, count in zip(statuses, counts, strict=True)},
            "per_second": len(good) / self.seconds,
            "p50_ms": float(np.percentile(good, 50)) if len(good) else None,
            "p99_ms": float(np.percentile(good, 99)) if len(good) else None,
            "max_ms": float(good.max()) if len(good) else None,
            "client_cpu_s": self.client_cpu_s,
        }


def run_client(
    program: Path,
    port: int,
    requests: Path,
    *,
    connections: int,
    seconds: float,
    rate: float = 0.0,
    timeout_s: float = 60.0,
) -> Run:
    with tempfile.NamedTemporaryFile(prefix="load-", suffix=".bin") as output:
        numbers = [str(connections), str(seconds), str(rate), str(timeout_s)]
        done = subprocess.run(
            [program, str(port), requests, *numbers, output.name], capture_output=True, text=True, check=True
        )
        told = json.loads(done.stdout)
        records = np.fromfile(output.name, RECORD)
    return Run(records, told["seconds"], told["cpu_s"])


@dataclass
class Server:
    """A contender's process. `pause` stops it from running while others are measured."""

    name: str
    command: list[str]
    port: int
    path: str  # of the end point
    ready: str  # of the question whether it is ready
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0
    log: Path | None = None

    def start(self, folder: Path) -> None:
        self.log = folder / f"{self.name}.log"
        began = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **self.env}, start_new_session=True
            )
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended: {self.log.read_text()[-2000:]}")
            if self.is_ready():
                break
            if time.perf_counter() - began > START_TIMEOUT_S:
                raise SystemExit(f"{self.name} is not ready after {START_TIMEOUT_S} s: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.start_s = time.perf_counter() - began

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.ready}", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def pause(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.go_on()
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def pids(self) -> list[int]:
        """The process and those it has started."""
        assert self.process is not None
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

    def cpu_s(self) -> float:
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(parts[11]) + int(parts[12])) / TICKS
        return total

    def memory_nbytes(self, what: str = "VmHWM") -> int:
        """Resident memory of all its processes: the peak (VmHWM) or now (VmRSS)."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith(what + ":"):
                        total += int(line.split()[1]) * 1024
        return total

    def ask(self, body: dict[str, Any], timeout_s: float = 60.0) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{self.path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
