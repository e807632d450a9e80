"""One WebGPU device: commands are recorded into one open compute pass and submitted in batches.

A submission costs about 40 µs of CPU, a recorded dispatch 3; so dispatches are batched, but not while the GPU idles.
Every C call drops the GIL, and backward runs on autograd's own thread: one lock covers recording, submitting and waiting.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from anytorch import interrupts, settings
from anytorch.errors import DeviceError, DeviceLost, DeviceUnavailable, UsageError
from anytorch.gpu import launcher, layer
from anytorch.gpu.adapters import FEATURES, Adapter, choose_adapter, list_adapters
from anytorch.gpu.buffers import Buffer, Pool
from anytorch.gpu.faults import Faults
from anytorch.gpu.meter import TIMESTAMPS, Meter
from anytorch.gpu.native import NULL, STORAGE, error_handler, ffi, lib, raising, translated, wgpu
from anytorch.gpu.plans import plans
from anytorch.gpu.programs import Program, Programs
from anytorch.gpu.transfer import Readbacks, Uploads
from anytorch.gpu.wgsl.faults import NBYTES as FAULT_NBYTES

if TYPE_CHECKING:
    from anytorch.gpu.profile import Profile
    from anytorch.gpu.tape import Tape

MOST_PENDING = 256  # dispatches per submission
LOOK_AFTER = 32  # dispatches until a first look whether the GPU has run dry

_set_pipeline = lib.wgpuComputePassEncoderSetPipeline
_set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
# Declared with a pointer to char, for which cffi takes a Python bytes object as it is.
_set_immediates = ffi.cast(
    "void(*)(WGPUComputePassEncoder, uint32_t, char const *, size_t)", lib.wgpuComputePassEncoderSetImmediates
)
_dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups


@dataclass
class RuntimeStatistics:
    commands: int = 0  # dispatches, copies and clears that were submitted
    submissions: int = 0


class Runtime:
    """A device, its memory, its programs and the commands recorded for it."""

    def __init__(self, adapter: Adapter, memory_limit: int | None = None) -> None:
        self.adapter = adapter
        handle = adapter.handle
        missing = {"immediates"} - set(handle.features)
        if missing:
            raise DeviceUnavailable(f"{adapter.name} ({adapter.api}) lacks the WebGPU feature {', '.join(missing)}")
        self.features = frozenset(name for name in FEATURES if name in handle.features)
        with layer.armed():
            self.device = handle.request_device_sync(
                required_features=sorted(self.features), required_limits=dict(handle.limits)
            )
        self.matrix_cores = layer.found(adapter.api)
        self.limits = dict(handle.limits)
        self.binding_limit = int(self.limits["max-storage-buffer-binding-size"])
        self._device = self.device._internal
        self._queue = self.device.queue._internal
        self.lock = threading.RLock()
        self.statistics = RuntimeStatistics()
        self.programs = Programs(self.device, self.binding_limit)
        self.pool = Pool(
            lambda nbytes: self.create_buffer(nbytes, STORAGE),
            lambda buffer: buffer.owner.destroy(),
            int(self.limits["max-buffer-size"]) & ~255,
            memory_limit,
        )
        self.buffers = self.pool.buffers
        self.give = self.pool.returned.append  # without the lock: finalisers call it
        self._uploads = Uploads(self)
        self._readbacks = Readbacks(self)
        self.faults = Faults(self)
        self._encoder: Any = None
        self._commands = ffi.new("WGPUCommandBuffer[1]")  # what is being submitted
        self._pass: Any = None
        self._program: Program | None = None
        self._pending = 0
        # A submission costs the host as much as several dispatches, and commands kept back too long leave the GPU idle: the
        # first after a wait comes soon, each later one, while the GPU is the faster, after twice as many.
        self._patience = self._look_at = LOOK_AFTER
        self.lost: DeviceError | None = None
        self.meter: Meter | None = None  # is told of every compute pass
        self._recorder: Tape | None = None
        self._profiler: Profile | None = None
        self.launcher: launcher.Launcher | None = None

    def use(self, made: launcher.Launcher | None) -> None:
        """Let C++ record launches: for the open runtime, and before anything is launched."""
        self.launcher = self.pool.launcher = self.programs.launcher = made
        if made is not None:
            made.attach(
                *(self.lock.acquire, self.lock.release, self.dispatch, self._bind_address, self._look, self._introduce)
            )

    def _bind_address(self, program: Program, buffers: tuple[Buffer, ...]) -> int:
        return launcher.address(program.groups.get(buffers) or self.programs.bind(program, buffers, None))

    def _introduce(self, key: int) -> None:
        """Tell the launcher of a buffer that it asks for. Raises what `Buffers` raises for an unknown one."""
        buffer = self.buffers[key]
        assert self.launcher is not None
        self.launcher.add(buffer, key, launcher.address(buffer.handle), buffer.nbytes)
        self.launcher.pin(key, buffer.pins)

    @property
    def recorder(self) -> Tape | None:
        """The tape that is told of every command, if one records."""
        return self._recorder

    @recorder.setter
    def recorder(self, tape: Tape | None) -> None:
        self._recorder = tape
        self._watch()

    @property
    def profiler(self) -> Profile | None:
        """The profile that is told of every launch, if one is under way."""
        return self._profiler

    @profiler.setter
    def profiler(self, profile: Profile | None) -> None:
        self._profiler = profile
        self._watch()

    def _watch(self) -> None:
        if self.launcher is not None:
            self.launcher.watch(self._recorder is not None or self._profiler is not None)

    # --- memory ------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Buffer:
        """A buffer from the pool. Raises OutOfMemory, after which the device is as usable as before."""
        with self.lock:
            return self.pool.take(nbytes, self._relieve)

    def empty_cache(self) -> int:
        """Give unused buffers back to the device; returns the bytes."""
        with self.lock:
            self._relieve()
            return self.pool.release_free()

    def _relieve(self) -> None:
        self.wait()
        self.programs.forget_bind_groups()

    def create_buffer(self, nbytes: int, usage: int, *, mapped: bool = False) -> Any:
        if self.lost is not None:
            raise self.lost
        doing = f"allocating {nbytes:,} bytes"
        try:
            with raising(doing):
                return self.device.create_buffer(size=nbytes, usage=usage, mapped_at_creation=mapped)
        except wgpu.GPUError as exc:  # wgpu-py raises some errors itself
            self._fail(translated(doing, type(exc).__name__, str(exc)))

    # --- recording ---------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        program: Program,
        buffers: Sequence[Buffer],
        immediates: bytes,
        x: int,
        y: int = 1,
        z: int = 1,
        windows: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """Record one launch. `immediates` are the kernel's parameters, packed as its struct expects."""
        with self.lock:
            if self._pass is None:
                self._open_pass()
            key: Any = buffers if type(buffers) is tuple else tuple(buffers)
            group = program.groups.get(key if windows is None else (key, windows))
            if group is None:
                group = self.programs.bind(program, buffers, windows)
            encoder = self._pass
            if self.launcher is not None:
                self.launcher.use_pass(launcher.address(encoder))  # it does not know which pipeline is set here, nor
                self._program = None  # we which one it has set
            if self._program is not program:
                self._program = None  # Ctrl-C may come before it is known which pipeline is set
                _set_pipeline(encoder, program.handle)
                self._program = program
            _set_bind_group(encoder, 0, group, 0, NULL)
            _set_immediates(encoder, 0, immediates, len(immediates))
            if self._profiler is None:
                _dispatch(encoder, x, y, z)
            else:
                self._timed_dispatch(program, x, y, z)
            if self._recorder is not None:
                self._recorder.note_launch(program, buffers, group, immediates, x, y, z)
            pending = self._pending = self._pending + 1
            if pending >= self._look_at:
                self._look()

    def _look(self) -> None:
        """Submit if the GPU has nothing to do, or if much has been kept back."""
        self._count()
        if self._pending >= MOST_PENDING or self.poll(wait=False):
            self._patience = min(2 * self._patience, MOST_PENDING)
            self.submit()
        else:
            self._look_at = self._pending + LOOK_AFTER
            self._count()

    def _count(self) -> None:
        """Add what C++ has recorded to what is pending, and tell it how much it may record until the next look."""
        if self.launcher is not None:
            self._pending += self.launcher.refill(1)
            self.launcher.refill(max(self._look_at - self._pending, 1))

    def _timed_dispatch(self, program: Program, x: int, y: int, z: int) -> None:
        assert self._profiler is not None
        timed = self._profiler.before_launch(self._pass, program)
        _dispatch(self._pass, x, y, z)
        if timed:
            self._profiler.after_launch(self._pass)

    def resolve_queries(self, queries: Any, count: int, target: Any) -> None:
        """Write timestamps to a buffer, after everything recorded so far."""
        # H: void f(WGPUCommandEncoder, WGPUQuerySet, uint32_t firstQuery, uint32_t queryCount, WGPUBuffer, uint64_t offset)
        lib.wgpuCommandEncoderResolveQuerySet(self._between_passes(), queries, 0, count, target, 0)

    def copy(self, source: Buffer, source_offset: int, target: Buffer, offset: int, nbytes: int) -> None:
        """Device to device, between different buffers; offsets and size are multiples of 4."""
        with self.lock:
            self.encode_copy(source.handle, source_offset, target.handle, offset, nbytes)
            if self.recorder is not None:
                self.recorder.note_copy(source, source_offset, target, offset, nbytes)

    def clear(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        """Zero a range; offset and size are multiples of 4."""
        with self.lock:
            self.encode_clear(buffer.handle, offset, nbytes)
            if self.recorder is not None:
                self.recorder.note_clear(buffer, offset, nbytes)

    def encode_copy(self, source: Any, source_offset: int, target: Any, offset: int, nbytes: int) -> None:
        lib.wgpuCommandEncoderCopyBufferToBuffer(self._between_passes(), source, source_offset, target, offset, nbytes)

    def encode_clear(self, buffer: Any, offset: int, nbytes: int) -> None:
        lib.wgpuCommandEncoderClearBuffer(self._between_passes(), buffer, offset, nbytes)

    def _between_passes(self) -> Any:
        """The encoder, for a command that belongs into no pass."""
        self._open_encoder()
        if self._pass is not None:
            with interrupts.held_back():
                self._end_pass()
        self._pending += 1
        return self._encoder

    def compute_pass(self) -> Any:
        """The open compute pass, for callers that encode launches themselves (tapes)."""
        if self._pass is None:
            self._open_pass()
        return self._pass

    def forget_pipeline(self) -> None:
        """Forget the current pipeline: other code has set one on the open pass."""
        self._program = None
        if self.launcher is not None:
            self.launcher.use_pass(launcher.address(self._pass) if self._pass is not None else 0)

    def _open_encoder(self) -> None:
        if self._encoder is None:
            if self.lost is not None:
                raise self.lost
            self._encoder = lib.wgpuDeviceCreateCommandEncoder(self._device, NULL)

    def _open_pass(self) -> None:
        about = NULL if self.meter is None else self.meter.of_next_pass()
        self._open_encoder()
        with interrupts.held_back():  # an encoder whose open pass nobody knows can never be finished
            self._pass = lib.wgpuCommandEncoderBeginComputePass(self._encoder, about)
            self._program = None
            if self.launcher is not None:
                self.launcher.use_pass(launcher.address(self._pass))

    def _end_pass(self) -> None:
        if self._pass is not None:
            if self.launcher is not None:
                self.launcher.use_pass(0)
            lib.wgpuComputePassEncoderEnd(self._pass)
            lib.wgpuComputePassEncoderRelease(self._pass)
            self._pass = None

    # --- submitting and waiting --------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Hand everything recorded to the GPU."""
        with self.lock:
            if self._encoder is None:
                return
            with interrupts.held_back():  # an encoder that is finished and still in its place would be finished again
                error = self._submit()
            if error is not None:
                self._fail(translated("submitting commands", *error))

    def _submit(self) -> tuple[str, str] | None:
        """Finish the encoder and hand it over; returns the error that WebGPU reports, if any."""
        self._uploads.before_submit()
        # An invalid command buffer at wgpuQueueSubmit aborts the process (a Rust panic across the C boundary), so
        # errors are looked for after Finish, and a bad one is dropped.
        error_handler.capture("submit")
        error: tuple[str, str] | None
        try:
            self._end_pass()
            commands = lib.wgpuCommandEncoderFinish(self._encoder, NULL)
            lib.wgpuCommandEncoderRelease(self._encoder)
            self._encoder = None
        finally:
            error = error_handler.release("submit")
        self._count()
        self.statistics.commands += self._pending
        self._pending = 0
        self._look_at = self._patience
        self._count()
        if error is None:
            error_handler.capture("submit")
            self._commands[0] = commands
            lib.wgpuQueueSubmit(self._queue, 1, self._commands)
            error = error_handler.release("submit")
        lib.wgpuCommandBufferRelease(commands)
        self.statistics.submissions += 1
        self._uploads.after_submit()
        return error

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, DeviceLost):
            self.lost = error
        raise error

    def poll(self, *, wait: bool) -> bool:
        """Let the device report; returns whether it has nothing left to do."""
        if wait:
            self._patience = self._look_at = LOOK_AFTER
            self._count()
        return bool(lib.wgpuDevicePoll(self._device, wait, NULL))

    def wait(self) -> None:
        """Wait as `synchronize` does, and leave reports of indices out of range to whoever synchronises."""
        with self.lock:
            self.submit()
            self.poll(wait=True)

    def synchronize(self) -> None:
        """Wait until the GPU has done everything recorded so far. Raises IndexError if an index was out of range."""
        with self.lock:
            if not self.faults.pending:
                self.wait()
                return
            said = ffi.new("char[]", FAULT_NBYTES)
            self._readbacks.read(self.faults.buffer, 0, int(ffi.cast("uintptr_t", said)), FAULT_NBYTES)
            self.faults.check(bytes(ffi.buffer(said)))

    # --- transfers ---------------------------------------------------------------------------------------------------

    def write(self, buffer: Buffer, offset: int, source: int, nbytes: int) -> None:
        """Copy host memory to the device. `offset` is a multiple of 4; a ragged end is padded with zeros."""
        with self.lock:
            self._not_while_recording("an upload")
            whole = nbytes & ~3
            if whole:
                self._uploads.write(buffer, offset, source, whole)
            if nbytes & 3:
                tail = ffi.new("char[4]")
                ffi.memmove(tail, ffi.cast("char *", source + whole), nbytes & 3)
                self._uploads.write(buffer, offset + whole, int(ffi.cast("uintptr_t", tail)), 4)

    def read(self, buffer: Buffer, offset: int, destination: int, nbytes: int) -> None:
        """Copy device memory to the host, after everything recorded so far. Raises IndexError as `synchronize` does."""
        with self.lock:
            self._not_while_recording("reading back")
            beside = self.faults.buffer if self.faults.pending and nbytes else None
            said = self._readbacks.read(buffer, offset, destination, nbytes, beside)
            if beside is not None:
                self.faults.check(said)

    def read_few(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """A few bytes of device memory, as `read` copies them."""
        with self.lock:
            self._not_while_recording("reading back")
            beside = self.faults.buffer if self.faults.pending else None
            data, said = self._readbacks.read_few(buffer, offset, nbytes, beside)
            if beside is not None:
                self.faults.check(said)
            return data

    def _not_while_recording(self, what: str) -> None:
        if self.recorder is not None:
            raise UsageError(
                f"{what} cannot be recorded on a tape: it would happen once, not at every replay",
                hint="keep .item(), .cpu(), new tensors from the host and ops that run on the CPU out of the recorded part",
            )


_lock = threading.Lock()
current: Runtime | None = None  # the open one; for code that every small op runs, which cannot afford `open_runtime`
_forked_from: int | None = None
_metered = False


def open_runtime() -> Runtime:
    """The runtime of this process, opened on first use on the adapter that ANYTORCH_WEBGPU_ADAPTER names, or the best."""
    global current
    if current is not None:
        return current
    if _forked_from is not None:
        raise DeviceUnavailable(
            f"this process was forked from process {_forked_from}, which had opened the GPU; a GPU does not survive fork()",
            hint="use DataLoader(multiprocessing_context='spawn'), or keep GPU tensors out of the workers",
        )
    with _lock:
        if current is None:
            adapter = choose_adapter(list_adapters(), settings.get("webgpu_adapter"))
            made = Runtime(adapter, settings.get("webgpu_memory"))
            made.use(launcher.load())
            if _metered:
                _begin_metering(made)
            current = made
    return current


def meter_from_now_on() -> None:
    """Add up the time that the GPU works (`device_seconds`), in the runtime that is open or the one opened later."""
    global _metered
    with _lock:
        _metered = True
        if current is not None and current.meter is None:
            _begin_metering(current)


def _begin_metering(runtime: Runtime) -> None:
    if TIMESTAMPS in runtime.features:
        runtime.meter = Meter(runtime)


def device_seconds() -> float | None:
    """How long the GPU worked since `meter_from_now_on`; None if it was not requested, or the adapter has no timestamps."""
    if current is None:
        return None if not _metered or forked() else 0.0
    return None if current.meter is None else current.meter.seconds()


def close_runtime() -> None:
    """Forget the device; the next use opens a new one. Its buffers and programs are gone, and all plans made with them."""
    global current
    with _lock:
        _detach()
        current = None
    plans.clear()


def _detach() -> None:
    if current is not None and current.launcher is not None:
        current.launcher.attach()
        current.use(None)


def opened() -> bool:
    return current is not None


def forked() -> bool:
    return _forked_from is not None


def _after_fork() -> None:
    global current, _forked_from, _lock
    if current is not None:
        _forked_from = os.getppid()
        _detach()
        current = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
