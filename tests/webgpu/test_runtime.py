"""The GPU runtime below torch: pool, staging, stream order, ragged readback, errors."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from anytorch.errors import OutOfMemory
from anytorch.gpu.buffers import Pool, bucket


class Made:
    """What wgpu's create_buffer returns, as far as the pool looks at it."""

    _internal = object()


def pool(largest: int = 1 << 30, limit: int | None = None, device: int = 1 << 40) -> tuple[Pool, list[int]]:
    made: list[int] = []

    def create(nbytes: int) -> Made:
        if sum(made) + nbytes > device:
            raise OutOfMemory(f"webgpu: allocating {nbytes:,} bytes: Not enough memory left.")
        made.append(nbytes)
        return Made()

    return Pool(create, lambda buffer: made.remove(buffer.nbytes), largest, limit), made


def no_relief() -> None:
    raise AssertionError("there was room")


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 123_456_789])
def test_a_bucket_holds_the_size_and_wastes_an_eighth_at_most(nbytes: int) -> None:
    size = bucket(nbytes)
    assert size >= nbytes and size % 256 == 0
    assert size == 256 or size - nbytes <= max(256, nbytes / 8)
    assert bucket(size) == size, "a bucket's own size is in that bucket"


def test_the_pool_hands_a_buffer_out_again() -> None:
    memory, made = pool()
    first = memory.take(1000, no_relief)
    memory.returned.append(first)
    assert memory.take(1024, no_relief) is first
    assert made == [1024] and memory.statistics.reused == 1 and memory.statistics.created == 1


def test_two_buffers_in_use_are_different_and_found_by_their_address() -> None:
    memory, _ = pool()
    first, second = memory.take(64, no_relief), memory.take(64, no_relief)
    assert first.key != second.key
    assert memory.buffers[first.address >> 36] is first and memory.buffers[second.key] is second
    assert first.address >> 62 == 1, "the tag tells it from a pointer of the CPU"


def test_statistics_follow_what_is_in_use() -> None:
    memory, _ = pool()
    held = [memory.take(4096, no_relief) for _ in range(3)]
    memory.returned.append(held.pop())
    assert memory.statistics.allocated == 2 * 4096 and memory.statistics.reserved == 3 * 4096
    assert memory.statistics.peak_allocated == 3 * 4096
    assert memory.release_free() == 4096 and memory.statistics.reserved == 2 * 4096


def test_a_full_device_is_relieved_once_and_asked_again() -> None:
    memory, made = pool(device=8192)
    memory.returned.append(memory.take(8192, no_relief))
    relieved: list[bool] = []
    assert memory.take(4096, lambda: relieved.append(True)).nbytes == 4096
    assert relieved == [True] and made == [4096], "the free buffer was given up for the new one"
    with pytest.raises(OutOfMemory):
        memory.take(8192, lambda: None)
    assert memory.take(4096, lambda: None).nbytes == 4096, "the pool is as usable as before"


def test_a_limit_is_kept_and_named() -> None:
    memory, _ = pool(limit=10_000)
    held = memory.take(8192, no_relief)
    with pytest.raises(OutOfMemory, match="ANYTORCH_WEBGPU_MEMORY"):
        memory.take(4096, lambda: None)
    memory.returned.append(held)
    assert memory.take(4096, lambda: None).nbytes == 4096


def test_one_tensor_beyond_the_largest_buffer_says_so() -> None:
    memory, made = pool(largest=1 << 20)
    with pytest.raises(OutOfMemory, match="largest buffer, 1,048,576 bytes"):
        memory.take((1 << 20) + 1, no_relief)
    assert memory.take((1 << 20) - 4, no_relief).nbytes == 1 << 20 and made == [1 << 20]


# --- on a device ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime(webgpu: Any) -> Any:
    from anytorch.gpu.runtime import open_runtime

    return open_runtime()


def host(data: bytes) -> Any:
    return ctypes.create_string_buffer(data, len(data))


def upload(runtime: Any, buffer: Any, data: bytes, offset: int = 0) -> None:
    source = host(data)
    runtime.write(buffer, offset, ctypes.addressof(source), len(data))


def download(runtime: Any, buffer: Any, nbytes: int, offset: int = 0) -> bytes:
    target = ctypes.create_string_buffer(nbytes)
    runtime.read(buffer, offset, ctypes.addressof(target), nbytes)
    return target.raw


def pattern(nbytes: int, seed: int = 1) -> bytes:
    return bytes((i * 7 + seed * 13 + (i >> 8)) & 255 for i in range(nbytes))


@pytest.fixture
def buffer(runtime: Any) -> Any:
    made = runtime.take(1 << 16)
    yield made
    runtime.give(made)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 5, 255, 256, 257, 65_535, 65_536])
def test_what_goes_up_comes_down(runtime: Any, buffer: Any, nbytes: int) -> None:
    upload(runtime, buffer, pattern(nbytes))
    assert download(runtime, buffer, nbytes) == pattern(nbytes)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (1, 1), (3, 2), (5, 7), (7, 257), (254, 3), (65_533, 3)])
def test_reading_at_odd_offsets(runtime: Any, buffer: Any, offset: int, nbytes: int) -> None:
    upload(runtime, buffer, pattern(65_536))
    assert download(runtime, buffer, nbytes, offset) == pattern(65_536)[offset : offset + nbytes]


def test_a_transfer_larger_than_the_staging_buffers(runtime: Any) -> None:
    from anytorch.gpu.transfer import ARENA

    nbytes = 2 * ARENA + 4096 + 3
    large = runtime.take(nbytes)
    piece = pattern(4096, 5)
    data = (piece * (nbytes // 4096 + 1))[: nbytes - 3] + b"end"
    upload(runtime, large, data)
    assert download(runtime, large, nbytes) == data
    runtime.give(large)


ADD_ONE = """
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
struct Parameters { n: u32 }
var<immediate> p: Parameters;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  if (g.x < p.n) { x[g.x] = x[g.x] + 1u; }
}
"""


def add_one(runtime: Any) -> Any:
    return runtime.programs.make("test: add one", ADD_ONE, buffers=1, writable=1, immediates=4)


def test_uploads_keep_their_place_among_the_kernels(runtime: Any, buffer: Any) -> None:
    """queue.write_buffer would run before everything not yet submitted: the first kernel would see the second upload."""
    seen = runtime.take(1024)
    program, n = add_one(runtime), struct.pack("I", 64)
    for value in (10, 20):
        upload(runtime, buffer, struct.pack("64I", *[value] * 64))
        runtime.dispatch(program, [buffer], n, 1)
        runtime.copy(buffer, 0, seen, 0 if value == 10 else 256, 256)
    assert struct.unpack("128I", download(runtime, seen, 512)) == (11,) * 64 + (21,) * 64
    runtime.give(seen)


def test_many_dispatches_are_one_submission(runtime: Any, buffer: Any) -> None:
    runtime.synchronize()
    runtime.clear(buffer, 0, 256)
    before = runtime.statistics.submissions
    for _ in range(20):
        runtime.dispatch(add_one(runtime), [buffer], struct.pack("I", 64), 1)
    assert runtime.statistics.submissions == before, "nothing is submitted before somebody asks, or 32 have gathered"
    assert struct.unpack("64I", download(runtime, buffer, 256)) == (20,) * 64
    assert runtime.statistics.submissions == before + 1


def test_submissions_to_an_idle_gpu_grow_until_somebody_waits(
    runtime: Any, buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = add_one(runtime)
    runtime.synchronize()
    real = runtime.poll
    monkeypatch.setattr(runtime, "poll", lambda *, wait: real(wait=wait) or True)  # idle whenever it is asked
    for _ in range(2):
        sizes, commands = [], runtime.statistics.commands
        for _ in range(32 + 64 + 128 + 256 + 256):
            runtime.dispatch(program, (buffer,), struct.pack("I", 64), 1)
            if runtime.statistics.commands != commands:
                sizes.append(runtime.statistics.commands - commands)
                commands = runtime.statistics.commands
        assert sizes == [32, 64, 128, 256, 256]
        runtime.synchronize()


def test_a_program_is_compiled_once(runtime: Any) -> None:
    first = add_one(runtime)
    count = len(runtime.programs)
    assert add_one(runtime) is first and len(runtime.programs) == count


def test_a_shader_that_does_not_compile_is_our_exception_with_its_text(runtime: Any, buffer: Any) -> None:
    from anytorch.gpu.native import ShaderError

    with pytest.raises(ShaderError, match="does not compile") as caught:
        runtime.programs.make("test: broken", "fn main( { nonsense", buffers=1, writable=1, immediates=4)
    assert "   1  fn main( { nonsense" in str(caught.value)
    runtime.clear(buffer, 0, 256)
    runtime.dispatch(add_one(runtime), [buffer], struct.pack("I", 64), 1)
    assert download(runtime, buffer, 4) == struct.pack("I", 1), "the device works on"


def test_a_refused_command_raises_and_the_device_works_on(runtime: Any, buffer: Any) -> None:
    """An invalid command buffer that reached wgpuQueueSubmit would abort the process."""
    from anytorch.gpu.native import GpuError

    other = runtime.take(256)
    runtime.synchronize()
    runtime.copy(buffer, 0, other, 0, 1 << 20)  # more than either holds
    with pytest.raises(GpuError, match="submitting commands"):
        runtime.submit()
    upload(runtime, other, b"alive!!!")
    assert download(runtime, other, 8) == b"alive!!!"
    runtime.give(other)


def test_clearing_a_range_leaves_the_rest(runtime: Any, buffer: Any) -> None:
    upload(runtime, buffer, pattern(64))
    runtime.clear(buffer, 16, 16)
    assert download(runtime, buffer, 64) == pattern(64)[:16] + bytes(16) + pattern(64)[32:]


def test_a_bind_group_is_made_again_after_the_cache_was_emptied(runtime: Any, buffer: Any) -> None:
    runtime.clear(buffer, 0, 256)
    runtime.dispatch(add_one(runtime), [buffer], struct.pack("I", 64), 1)
    runtime.empty_cache()
    runtime.dispatch(add_one(runtime), [buffer], struct.pack("I", 64), 1)
    assert download(runtime, buffer, 4) == struct.pack("I", 2)


def test_a_lost_device_says_so_and_can_be_replaced(run_python: Any) -> None:
    """One clear error however often it is asked; after a reset new tensors work and old ones do not pretend to."""
    run_python(
        "import torch, anytorch.webgpu\n"
        "from anytorch.errors import DeviceLost\n"
        "from anytorch.gpu.runtime import open_runtime\n"
        "x = torch.ones(4, device='webgpu')\n"
        "assert (x + 1).tolist() == [2, 2, 2, 2]\n"
        "open_runtime().device.destroy()\n"
        "def lost(work):\n"
        "    try:\n"
        "        work()\n"
        "    except DeviceLost as exc:\n"
        "        assert exc.hint\n"
        "        return True\n"
        "assert all(lost(lambda: (x + 1).tolist()) for _ in range(3))\n"
        "anytorch.webgpu.reset()\n"
        "assert (torch.ones(4, device='webgpu') + 1).tolist() == [2, 2, 2, 2]\n"
        "assert lost(lambda: (x + 1).tolist()), 'its address must not lead to memory of the new device'\n",
        warm=True,
    )


def test_a_profile_names_and_times_every_launch(webgpu: Any) -> None:
    import torch

    x = torch.ones(64, 64, device="webgpu")
    (x @ x).exp()  # compiled before
    with torch.webgpu.profile() as profile:
        (x @ x).exp()
    assert len(profile.launches) == 2
    assert all(launch.seconds > 0 for launch in profile.launches)
    assert "exp" in profile.table() and "in 2 launches" in profile.table()
    with torch.webgpu.profile() as empty:
        pass
    assert empty.launches == []


@pytest.mark.long
def test_the_time_on_the_device(run_python: Any) -> None:
    """Asked for before the device is opened, as `anytorch run --report` does; more passes than a query set has room for."""
    run_python(
        "import time, torch, anytorch.webgpu\n"
        "from anytorch.gpu import meter\n"
        "assert torch.webgpu.device_seconds() is None, 'nobody asked'\n"
        "torch.webgpu.start_timing()\n"
        "assert torch.webgpu.device_seconds() == 0.0\n"
        "began = time.perf_counter()\n"
        "x = torch.ones(64, 64, device='webgpu')\n"
        "(x @ x).exp().sum().item()\n"
        "first = torch.webgpu.device_seconds()\n"
        "assert 0 < first < time.perf_counter() - began\n"
        "meter.QUERIES = 8\n"  # as if a set were small
        "for _ in range(2 * (meter.MOST_UNREAD + 4)):\n"
        "    (x + 1).sum().item()\n"
        "second = torch.webgpu.device_seconds()\n"
        "assert first < second < time.perf_counter() - began\n"
    )


def test_an_interrupt_while_waiting_for_a_readback_is_raised_and_harmless(run_python: Any) -> None:
    """Ctrl-C may arrive inside the C callback that says a buffer is mapped: no hang, nothing lost, right answers after."""
    run_python(
        "import signal, torch, anytorch.webgpu\n"
        "x = torch.randn(300, 300, device='webgpu')\n"
        "want = (x @ x).cpu()\n"
        "def interrupt(*_): signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGALRM, interrupt)\n"
        "interrupted = 0\n"
        "for i in range(12):\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.002 * i, 1.0)  # again, if a finaliser swallows it\n"
        "        while True: (x @ x).cpu()\n"
        "    except KeyboardInterrupt:\n"
        "        interrupted += 1\n"
        "    finally:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "assert interrupted == 12, interrupted\n"
        "assert torch.equal((x @ x).cpu(), want)\n",
        warm=True,
    )


@pytest.mark.long
def test_an_interrupt_at_any_instruction_leaves_the_device_right(run_python: Any) -> None:
    """Ctrl-C before every third instruction of `anytorch.gpu`, one after the other, while work is recorded and read back."""
    done = run_python(
        "import signal, sys, torch, anytorch.webgpu\n"
        "y, z = torch.randn(64, device='webgpu'), torch.randn(64, device='webgpu')\n"
        "host = torch.arange(64.0)\n"
        "def work():\n"
        "    a = y + z\n"
        "    b = host.to('webgpu') * y\n"
        "    return torch.cat([a, b, a.exp()]).cpu()\n"
        "want = work()\n"
        "class Press:\n"
        "    def __init__(self, at): self.at, self.seen = at, 0\n"
        "    def __call__(self, frame, event, argument):\n"
        "        if '/anytorch/gpu/' not in frame.f_code.co_filename.replace(chr(92), '/'): return None\n"
        "        frame.f_trace_opcodes = True\n"
        "        if event == 'opcode':\n"
        "            self.seen += 1\n"
        "            if self.seen == self.at: signal.raise_signal(signal.SIGINT)\n"
        "        return self\n"
        "at, pressed = 1, 0\n"
        "while True:\n"
        "    press = Press(at)\n"
        "    sys.settrace(press)\n"
        "    try: work()\n"
        "    except KeyboardInterrupt: pressed += 1\n"
        "    finally: sys.settrace(None)\n"
        "    assert torch.equal(work(), want), at\n"
        "    if press.seen < at: break\n"
        "    at += 3\n"
        "print(at, pressed)\n",
        warm=True,
    )
    instructions, pressed = map(int, done.stdout.split())
    assert instructions > 300 and pressed > instructions / 4


def test_looking_for_adapters_without_a_display_says_nothing(run_python: Any) -> None:
    done = run_python(
        "import os\n"
        "os.environ.pop('XDG_RUNTIME_DIR', None)\n"
        "from anytorch.gpu.adapters import list_adapters\n"
        "assert list_adapters()\n"
        "assert 'XDG_RUNTIME_DIR' not in os.environ\n"
    )
    assert "XDG_RUNTIME_DIR" not in done.stderr
