"""Recording a run of commands once and submitting it again and again, as CUDA graphs do.

A replayed launch costs three C calls and nothing of torch: some 3 µs of CPU instead of 13, and less where long tapes are
encoded by C++ (`code/tape.cpp`; without a compiler, by Python). The buffers a tape touches are kept from the pool for as
long as it lives, so that what it wrote is where it will write again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from anytorch import logs, native
from anytorch.errors import NativeUnavailable, UsageError
from anytorch.gpu.buffers import Buffer
from anytorch.gpu.native import NULL, ffi, lib
from anytorch.gpu.runtime import Runtime, _dispatch, _set_bind_group, _set_immediates, _set_pipeline

log = logs.logger(__name__)

LAUNCH, COPY = 7, 5  # a command's length tells its kind; the third is a clear
LONG = 64  # launches in a row that are worth a C++ call, and a second of compiling it once


class _Launch(ctypes.Structure):
    """As in code/tape.cpp."""

    _fields_ = [
        ("pipeline", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        ("immediates", ctypes.c_void_p),
        *[(name, ctypes.c_uint32) for name in ("size", "x", "y", "z")],
    ]


@lru_cache(maxsize=1)
def _encoder() -> Callable[[Any, Any, int], None] | None:
    """(pass, launches, how many) → encoded by C++; None where there is no compiler."""
    try:
        library = native.load("tape", [Path(__file__).parent / "code" / "tape.cpp"])
    except NativeUnavailable as exc:
        log.info("tapes are replayed from Python: %s", exc)
        return None
    called = [_address(one) for one in (_set_pipeline, _set_bind_group, _set_immediates, _dispatch)]
    function = library.encode_launches
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 4]
    function.restype = None
    return lambda encoder, launches, count: function(_address(encoder), launches, count, *called)


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Tape:
    """`with tape: …` runs and records; `tape.replay()` runs the same commands on the same buffers.

    Between the two, only the contents of buffers may change. Nothing may be read back or uploaded while recording: it would
    happen once, not at every replay.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._commands: list[tuple[Any, ...]] = []
        self._buffers: dict[int, Buffer] = {}
        self._finished = False
        self._reports = False  # of indices out of range
        self._runs: list[Any] | None = None  # the commands, with long runs of launches as arrays for C++

    def __len__(self) -> int:
        return len(self._commands)

    def __enter__(self) -> Tape:
        runtime = self._runtime
        if runtime.recorder is not None:
            raise UsageError("another recording is under way; one at a time")
        if self._finished:
            raise UsageError("this tape has been recorded; make a new one")
        runtime.submit()
        runtime.recorder = self
        runtime.pool.frozen = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        runtime = self._runtime
        runtime.recorder = None
        runtime.pool.frozen = False
        if kind is not None:
            self._drop_commands()
            self._buffers.clear()
            return
        self._finished = True
        self._reports = any(map(runtime.faults.reported_by, self._buffers))
        with runtime.lock:
            runtime.pool.pin(self._buffers.values())
        runtime.submit()

    @contextmanager
    def alone(self) -> Iterator[Tape]:
        """As `with tape:`, while other threads' launches wait: they would be recorded with the rest."""
        with self._runtime.lock, self:
            yield self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run what is inside without recording it."""
        runtime = self._runtime
        with runtime.lock:
            runtime.recorder = None
            try:
                yield
            finally:
                runtime.recorder = self

    def note_launch(self, program: Any, buffers: Any, group: Any, immediates: bytes, x: int, y: int, z: int) -> None:
        """Called by the runtime for every launch while recording."""
        held = ffi.new("char[]", immediates)
        lib.wgpuBindGroupAddRef(group)  # the runtime may forget its own reference (empty_cache) while this tape lives
        self._commands.append((program, group, held, len(immediates), x, y, z))
        self._buffers.update((buffer.key, buffer) for buffer in buffers)

    def note_copy(self, source: Buffer, source_offset: int, target: Buffer, offset: int, nbytes: int) -> None:
        self._commands.append((source.handle, source_offset, target.handle, offset, nbytes))
        self._buffers.update(((source.key, source), (target.key, target)))

    def note_clear(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        self._commands.append((buffer.handle, offset, nbytes))
        self._buffers[buffer.key] = buffer

    def replay(self) -> None:
        """Record all commands again, and submit them."""
        if not self._finished:
            raise UsageError("nothing has been recorded: put the work into a `with graph:` block first")
        runtime = self._runtime
        with runtime.lock:
            if self._runs is None:
                self._runs = self._in_runs()
            runtime.forget_pipeline()
            for run in self._runs:
                if isinstance(run, ctypes.Array):
                    encode = _encoder()
                    assert encode is not None
                    encode(runtime.compute_pass(), run, len(run))
                elif len(run) == LAUNCH:
                    self._encode(runtime.compute_pass(), *run)
                elif len(run) == COPY:
                    runtime.encode_copy(*run)
                else:
                    runtime.encode_clear(*run)
            if self._reports:
                runtime.faults.pending = True
            runtime.submit()

    @staticmethod
    def _encode(encoder: Any, program: Any, group: Any, immediates: Any, size: int, x: int, y: int, z: int) -> None:
        _set_pipeline(encoder, program.handle)
        _set_bind_group(encoder, 0, group, 0, NULL)
        _set_immediates(encoder, 0, immediates, size)
        _dispatch(encoder, x, y, z)

    def _in_runs(self) -> list[Any]:
        """The commands in their order; launches that follow one another for long are one array."""
        made: list[Any] = []
        launches: list[tuple[Any, ...]] = []

        def flush() -> None:
            if len(launches) < LONG or _encoder() is None:
                made.extend(launches)
            else:
                run = (_Launch * len(launches))()
                before: Any = None
                for one, (program, group, immediates, size, x, y, z) in zip(run, launches, strict=True):
                    one.pipeline = None if program is before else _address(program.handle)
                    one.group, one.immediates = _address(group), _address(immediates)
                    one.size, one.x, one.y, one.z = size, x, y, z
                    before = program
                made.append(run)
            launches.clear()

        for command in self._commands:
            if len(command) == LAUNCH:
                launches.append(command)
            else:
                flush()
                made.append(command)
        flush()
        return made

    def close(self) -> None:
        """Let the buffers go back to the pool."""
        if self._finished and self._buffers:
            with self._runtime.lock:
                self._runtime.pool.unpin(self._buffers.values())
        self._drop_commands()
        self._buffers.clear()
        self._finished = False

    def _drop_commands(self) -> None:
        for command in self._commands:
            if len(command) == LAUNCH:
                lib.wgpuBindGroupRelease(command[1])
        self._commands.clear()
        self._runs = None

    def __del__(self) -> None:
        self.close()
