"""Recording a run of commands once and submitting it again and again, as CUDA graphs do.

A replayed launch costs three C calls and nothing of torch: some 3 µs of CPU instead of 13. The buffers a tape touches are
kept from the pool for as long as it lives, so that what it wrote is where it will write again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from anytorch.errors import UsageError
from anytorch.gpu.buffers import Buffer
from anytorch.gpu.native import NULL, ffi, lib
from anytorch.gpu.runtime import Runtime, _dispatch, _set_bind_group, _set_immediates, _set_pipeline

LAUNCH, COPY = 7, 5  # a command's length tells its kind; the third is a clear


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
        with runtime.lock:
            runtime.pool.pin(self._buffers.values())
        runtime.submit()

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
            encoder: Any = None
            pipeline: Any = None
            for command in self._commands:
                if len(command) == LAUNCH:
                    program, group, immediates, size, x, y, z = command
                    if encoder is None:
                        encoder, pipeline = runtime.compute_pass(), None
                    if pipeline is not program:
                        _set_pipeline(encoder, program.handle)
                        pipeline = program
                    _set_bind_group(encoder, 0, group, 0, NULL)
                    _set_immediates(encoder, 0, immediates, size)
                    _dispatch(encoder, x, y, z)
                elif len(command) == COPY:
                    runtime.encode_copy(*command)
                    encoder = None
                else:
                    runtime.encode_clear(*command)
                    encoder = None
            runtime.forget_pipeline()
            runtime.submit()

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

    def __del__(self) -> None:
        self.close()
