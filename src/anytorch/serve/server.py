"""Serving: the port, then one process (`running`) or several that share it (`--workers N`); one that dies is replaced.

The parent holds the listening socket, so that no connection is refused while a worker is away. Workers follow each other's
model swaps through a file in a folder of their own (`state`), and count into shared files that /metrics adds up.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
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
from anytorch.serve.app import create_app
from anytorch.serve.keys import read_keys
from anytorch.serve.loaders import first_models
from anytorch.serve.options import ServeOptions, from_json, to_json
from anytorch.serve.running import BACKLOG, LEAVE_S, Told, first_answer, run_app, signals_to

log = logs.logger(__name__)


def serve(options: ServeOptions, told: Told) -> int:
    """Serve until a signal arrives; return the exit status. `told` is called once, after the first answer.

    SIGTERM and Ctrl-C drain: no new connections, requests under way finish within `drain_s`. A second Ctrl-C ends at once.
    """
    options.require_safe()
    if options.workers > 1:
        check(options)
        listening = bind(options)
        return supervise(replace(options, port=listening.getsockname()[1]), listening, told)
    app = create_app(options)  # before the port is taken: what cannot work is told first
    listening = bind(options)
    return run_app(app, replace(options, port=listening.getsockname()[1]), listening, told)


def bind(options: ServeOptions) -> socket.socket:
    """Open the listening socket. Raises UsageError if the port is in use or the address is not ours."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would let two services share the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host.strip("[]"), options.port))
        made.listen(BACKLOG)
    except OSError as exc:
        made.close()
        raise UsageError(
            f"cannot listen on {options.host}:{options.port}: {exc.strerror or exc}",
            hint="name another --port (0: any free one), or stop what uses it",
        ) from exc
    made.setblocking(False)
    return made


# --- the parent of several processes ----------------------------------------------------------------------------------

LOOK_S = 0.1
SILENT_S = 30.0  # without a heartbeat, a worker that has once beaten is taken for dead
SHORT_LIFE_S = 5.0  # a worker that dies sooner is started again later and later
LONGEST_PAUSE_S = 10.0
# After the time to drain: a worker ends by itself LEAVE_S later (a second more where --drain is 0), the service within 5 s.
KILL_S = LEAVE_S + 1.5
forget_process: Any = mark_process_dead  # has no annotations


@dataclass
class WorkerProcess:
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
        self._workers: list[WorkerProcess] = []
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

    def _start(self, number: int, deaths: int) -> WorkerProcess:
        beats, theirs = os.pipe()
        os.set_blocking(beats, False)
        descriptor = self._listening.fileno()
        process = subprocess.Popen(
            python_command("anytorch.serve.server:main", to_json(self._options), str(descriptor), str(theirs)),
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if sys.stderr is not None else None,
            pass_fds=(descriptor, theirs, self._lock),  # of the folder: nobody sweeps it while a worker lives
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._folder / "metrics")},
            start_new_session=True,  # Ctrl-C goes to the parent alone, which drains them
        )
        os.close(theirs)
        return WorkerProcess(number, process, beats, deaths=deaths)

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

    def _forget(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        os.close(worker.beats)
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        forget_process(worker.process.pid, str(self._folder / "metrics"))

    def _drain(self) -> None:
        """Have every worker drain; those that have not ended `KILL_S` after the time to drain are killed, all at once."""
        last = time.monotonic() + self._options.drain_delay_s + self._options.drain_s + KILL_S
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
        self._listening.close()
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("worker %d (process %d) did not end: killed", worker.number, worker.process.pid)
                worker.process.kill()
        for worker in self._workers:
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

    failed: list[ModelError] = []

    def tell() -> None:
        started = first_answer(options, key=keys.one if keys else None, stopped=lambda: supervisor.stopping)
        if not isinstance(started, ModelError):
            told(started)
        elif not supervisor.stopping:
            failed.append(started)
            supervisor.stopping = True

    try:
        with signals_to(stop):
            threading.Thread(target=tell, name="anytorch-first-answer", daemon=True).start()
            supervisor.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    if failed:
        raise failed[0]
    return 0


def main(arguments: list[str]) -> int:
    """`[options, socket, beats]`: the listening socket and a pipe for heartbeats are inherited. Standard input is a pipe
    that ends when the parent does, and then so does the worker: none is left behind on the port."""
    options = from_json(arguments[0])
    logs.configure()
    listening = socket.socket(fileno=int(arguments[1]))
    listening.setblocking(False)
    beats = int(arguments[2])
    os.set_blocking(beats, False)
    alone = threading.Event()
    threading.Thread(target=_end_with_parent, args=(alone,), name="anytorch-parent", daemon=True).start()
    app = create_app(options)

    def beat() -> None:
        app.state.service.on_beat()
        try:
            os.write(beats, b".")
        except BlockingIOError:  # the parent has enough of them
            pass

    try:
        return run_app(app, options, listening, None, beat)
    finally:
        if alone.is_set() and options.run_folder is not None:  # the process that would have removed it was killed
            shutil.rmtree(options.run_folder, ignore_errors=True)


def _end_with_parent(alone: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)


# --- the folder that the workers of one service share, and the removal of folders of killed services ------------------

# A service holds a lock on its folder. Its workers inherit the lock, so the system lets go of it when the last of them has
# ended, however they ended; no process that has got one of their numbers since can be mistaken for them. A folder that
# nobody holds is removed when the next service starts.

PREFIX = "anytorch-serve-"
YOUNG_S = 60.0  # a folder younger than that may be one whose owner is about to lock it


def make_run_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor of its lock: whoever keeps that open keeps the folder. POSIX alone."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(folder, os.O_RDONLY)
    _lock(descriptor)
    return folder, descriptor


def sweep_run_folders() -> list[Path]:
    """Remove our own folders that no service or worker holds any more; return their paths."""
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if time.time() - found.st_mtime < YOUNG_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as exc:  # somebody else has just removed it
            log.debug("%s is skipped: %s", folder, exc)
            continue
        try:
            if _lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
        finally:
            os.close(descriptor)
    return swept


def _lock(descriptor: int) -> bool:
    """Lock a folder; False if another process has it locked or the file system has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        log.debug("a run folder is not locked: %s", exc)
        return False
    return True
