"""`--workers N`: processes that share one port; one that dies or hangs is replaced.

The parent holds the listening socket, so that no connection is refused while a worker is away. Workers follow each other's
model swaps through a file in a folder of their own (`state`), and count into shared files that /metrics adds up.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from anytorch import logs
from anytorch.child_process import python_command
from anytorch.errors import ModelError, UsageError
from anytorch.serve.keys import read_keys
from anytorch.serve.model_names import first_models
from anytorch.serve.options import ServeOptions, to_json
from anytorch.serve.run_folder import make_run_folder, sweep_run_folders
from anytorch.serve.start import Told, first_answer

log = logs.logger(__name__)

LOOK_S = 0.1
SILENT_S = 30.0  # without a heartbeat, a worker that has once beaten is taken for dead
SHORT_LIFE_S = 5.0  # who dies sooner is started again later and later
LONGEST_PAUSE_S = 10.0
forget_process: Any = mark_process_dead  # has no annotations


@dataclass
class Worker:
    number: int
    process: subprocess.Popen[bytes]
    beats: int  # the pipe's end to read
    began: float = field(default_factory=time.monotonic)
    last_beat: float | None = None
    deaths: int = 0  # in a row, each after a short life


class Supervisor:
    def __init__(self, options: ServeOptions, listening: socket.socket, folder: Path, lock: int) -> None:
        threads = options.threads or max(1, (os.cpu_count() or 1) // options.workers)
        self._options = replace(options, threads=threads, run_folder=folder)
        self._listening = listening
        self._folder, self._lock = folder, lock
        self._workers: list[Worker] = []
        self._again_at: dict[int, tuple[float, int]] = {}  # by number: when to start one, and how often it died
        self.stopping = False
        self.ended = threading.Event()

    def run(self) -> None:
        for number in range(self._options.workers):
            self._workers.append(self._start(number, 0))
        while not self.stopping:
            self._look()
            time.sleep(LOOK_S)
        self._drain()
        self.ended.set()

    def _start(self, number: int, deaths: int) -> Worker:
        beats, theirs = os.pipe()
        os.set_blocking(beats, False)
        descriptor = self._listening.fileno()
        process = subprocess.Popen(
            python_command("anytorch.serve.worker:main", to_json(self._options), str(descriptor), str(theirs)),
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if sys.stderr is not None else None,
            pass_fds=(descriptor, theirs, self._lock),  # of the folder: nobody sweeps it while a worker lives
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._folder / "metrics")},
            start_new_session=True,  # Ctrl-C goes to the parent alone, which drains them
        )
        os.close(theirs)
        return Worker(number, process, beats, deaths=deaths)

    def _look(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            try:
                if os.read(worker.beats, 4096):
                    worker.last_beat = now
            except BlockingIOError:
                pass
            if worker.last_beat is not None and now - worker.last_beat > SILENT_S:
                log.error("worker %d (process %d) hangs: killed", worker.number, worker.process.pid)
                worker.process.kill()
            status = worker.process.poll()
            if status is None:
                continue
            lived = now - worker.began
            deaths = worker.deaths + 1 if lived < SHORT_LIFE_S else 0
            pause = min(LONGEST_PAUSE_S, 0.2 * 2**deaths) if deaths else 0.0
            log.error(
                "worker %d (process %d) ended with status %s; another is started",
                worker.number,
                worker.process.pid,
                status,
            )
            self._forget(worker)
            self._again_at[worker.number] = (now + pause, deaths)
        for number, (moment, deaths) in list(self._again_at.items()):
            if now >= moment:
                del self._again_at[number]
                self._workers.append(self._start(number, deaths))

    def _forget(self, worker: Worker) -> None:
        self._workers.remove(worker)
        os.close(worker.beats)
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        forget_process(worker.process.pid, str(self._folder / "metrics"))

    def _drain(self) -> None:
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
        self._listening.close()
        last = time.monotonic() + self._options.drain_s + self._options.drain_delay_s + 5
        for worker in self._workers:
            try:
                worker.process.wait(max(0.1, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            os.close(worker.beats)

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()


def check(options: ServeOptions) -> None:
    """Raise for invalid options once, before any worker starts."""
    if sys.platform == "win32":
        raise UsageError("--workers needs a system that can pass sockets to child processes", hint="use --workers 1")
    first_models(options)
    if options.api_key_file is not None:
        read_keys(options.api_key_file)


def supervise(options: ServeOptions, listening: socket.socket, told: Told) -> int:
    """Run the workers until a signal arrives; return the exit status."""
    keys = None if options.api_key_file is None else read_keys(options.api_key_file)
    for old in sweep_run_folders():
        log.info("removed %s, left behind by a killed service", old)
    folder, lock = make_run_folder()
    (folder / "metrics").mkdir()
    supervisor = Supervisor(options, listening, folder, lock)

    def stop(number: int, frame: FrameType | None) -> None:
        if supervisor.stopping and number == signal.SIGINT:
            supervisor.kill()
        supervisor.stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    failed: list[ModelError] = []

    def tell() -> None:
        started = first_answer(options, key=keys.one if keys else None, stopped=lambda: supervisor.stopping)
        if not isinstance(started, ModelError):
            told(started)
        elif not supervisor.stopping:
            failed.append(started)
            supervisor.stopping = True

    threading.Thread(target=tell, name="anytorch-first-answer", daemon=True).start()
    try:
        supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    if failed:
        raise failed[0]
    return 0
