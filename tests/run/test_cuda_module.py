"""`torch.cuda`: facts of the device that stands in, its memory, its random numbers, and what has no effect."""

from __future__ import annotations

from typing import Any

import pytest

import anytorch
from anytorch.errors import CannotStandIn


def test_the_devices(cuda: Any, device: str) -> None:
    module = cuda.cuda
    assert module.is_available() and module.device_count() == 1 and module.current_device() == 0
    assert module.is_initialized() and cuda.backends.cuda.is_built()
    module.init()
    module.set_device(0), module.set_device("cuda:0"), module.set_device(cuda.device("cuda"))
    with module.device(0), module.device(cuda.device("cuda:0")), module.device_of(cuda.ones(1).cuda()):
        assert module.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        module.set_device(3)
    with pytest.raises(ValueError, match="Expected a cuda device"):
        module.get_device_name("cpu")


def test_its_facts(cuda: Any, device: str) -> None:
    from anytorch.devices.registry import registry

    backend = registry().get(device)
    found = cuda.cuda.get_device_properties("cuda")
    assert found.name == cuda.cuda.get_device_name() == backend.device_name(0)
    assert (found.major, found.minor) == cuda.cuda.get_device_capability(0) == (8, 0)
    assert found.multi_processor_count >= 1 and found.warp_size == 32
    assert found.name in repr(found)
    assert cuda.cuda.is_bf16_supported() and cuda.cuda.get_arch_list() == []
    if device == "cpu":
        assert found.total_memory == backend.memory(0).total


@pytest.mark.parametrize(("mask", "seen"), [("", 0), ("-1", 0), ("0", 1), ("0,1,2", 1), ("GPU-abc", 1)])
def test_hidden_devices(cuda: Any, monkeypatch: pytest.MonkeyPatch, mask: str, seen: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert cuda.cuda.device_count() == seen and cuda.cuda.is_available() is (seen > 0)


def test_memory(cuda: Any) -> None:
    module = cuda.cuda
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    x = cuda.ones(4 * 2**20, device="cuda")
    module.synchronize()
    assert module.memory_allocated() >= before
    assert module.max_memory_allocated() >= module.memory_allocated() - 2**20
    assert module.max_memory_allocated() >= 16 * 2**20, "16 MiB are in use"
    free, total = module.mem_get_info()
    assert 0 < free <= total == module.get_device_properties(0).total_memory
    stats = module.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= 16 * 2**20 and stats["active_bytes.all.current"] > 0
    assert module.memory_reserved() >= 0 and module.max_memory_reserved() >= module.memory_reserved() - 2**20
    assert "MiB" in module.memory_summary()
    assert stats["allocation.small_pool.current"] == stats["num_ooms"] == 0, "what no other device counts"
    assert module.memory_stats_as_nested_dict()["active_bytes"]["all"]["current"] > 0
    module.empty_cache()
    assert x.numel() == 4 * 2**20


def test_random_numbers(cuda: Any) -> None:
    module = cuda.cuda
    draws = []
    for seed in (module.manual_seed, module.manual_seed_all, cuda.manual_seed):
        seed(5)
        draws.append(cuda.randn(3, device="cuda").tolist())
    assert draws[0] == draws[1] == draws[2]
    assert module.initial_seed() == 5
    state, states = module.get_rng_state(), module.get_rng_state_all()
    first = cuda.randn(3, device="cuda").tolist()
    module.set_rng_state(state)
    assert cuda.randn(3, device="cuda").tolist() == first
    module.random.set_rng_state_all(states)
    assert cuda.randn(3, device="cuda").tolist() == first
    with cuda.random.fork_rng(devices=[0], device_type="cuda"):
        cuda.randn(3, device="cuda")
    module.seed(), module.seed_all()


def test_without_effect(cuda: Any, fresh_ledger: Any) -> None:
    module = cuda.cuda
    with module.nvtx.range("step"):
        module.nvtx.range_push("a"), module.nvtx.range_pop(), module.nvtx.mark("b")
    module.profiler.start(), module.profiler.stop(), module.ipc_collect()
    module.set_per_process_memory_fraction(0.5)
    cuda.backends.cudnn.benchmark = cuda.backends.cudnn.benchmark
    cuda.backends.cudnn.deterministic = cuda.backends.cudnn.deterministic
    cuda.backends.cuda.matmul.allow_tf32 = cuda.backends.cuda.matmul.allow_tf32
    cuda.backends.cuda.enable_flash_sdp(cuda.backends.cuda.flash_sdp_enabled())
    assert {"torch.cuda.nvtx.mark()", "torch.cuda.ipc_collect()"} <= fresh_ledger.ignored.keys()
    assert fresh_ledger.ignored["torch.cuda.ipc_collect()"].first.startswith(__file__)


def test_what_nobody_else_has_is_refused_with_its_line(cuda: Any, fresh_ledger: Any) -> None:
    with pytest.raises(CannotStandIn) as told:
        cuda.cuda.temperature()
    assert f"{__file__}:" in str(told.value) and "torch.cuda.temperature()" in str(told.value)
    with pytest.raises(RuntimeError, match="caching_allocator_alloc"):
        cuda.cuda.caching_allocator_alloc(16)
    assert len(fresh_ledger.refused) == 2


def test_streams_and_events_of_torch_itself(cuda: Any) -> None:
    stream, other = cuda.Stream(device="cuda"), cuda.Stream("cuda:0", priority=-1)
    stream.wait_stream(other)
    with stream:
        x = cuda.ones(2, device="cuda") * 2
    assert stream.device == x.device and isinstance(stream, cuda.Stream) and stream.query()
    assert isinstance(cuda.cuda.Stream(), cuda.Stream) and isinstance(cuda.cuda.Event(), cuda.Event)
    start, end = cuda.Event("cuda", enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    x.sum().item()
    end.record(other)
    end.synchronize()
    assert start.elapsed_time(end) > 0 and end.query() and start.device == x.device
    done = cuda.accelerator.current_stream().record_event(cuda.Event())
    other.wait_event(done)
    cuda.Stream().synchronize()
    assert not isinstance(x, cuda.Stream) and not isinstance(x, cuda.Event)


def test_streams_and_events(cuda: Any) -> None:
    module = cuda.cuda
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    start.record()
    with module.stream(stream):
        assert module.current_stream() == stream
        x = cuda.randn(64, 64, device="cuda") @ cuda.randn(64, 64, device="cuda")
        done = stream.record_event()
    assert module.current_stream() == module.default_stream() != stream
    module.current_stream().wait_event(done)
    module.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0 and end.query() and stream.query()
    assert stream.device == x.device
    with pytest.raises(ValueError, match="enable_timing=True"):
        module.Event().elapsed_time(end)
    with pytest.raises(ValueError, match="recorded"):
        module.Event(enable_timing=True).elapsed_time(end)


def test_graphs(cuda: Any) -> None:
    module = cuda.cuda
    x, weight = cuda.ones(3, device="cuda"), cuda.full((3,), 2.0, device="cuda")
    (x * weight).sum()  # warm, as CUDA asks for
    graph = module.CUDAGraph()
    assert not module.is_current_stream_capturing()
    with module.graph(graph):
        y = (x * weight + 1).relu()
        z = y[1:] * 2
    for value in (5.0, -1.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [max(2 * value + 1, 0.0)] * 3 and z.tolist() == [2 * max(2 * value + 1, 0.0)] * 2


def test_callables_made_graphs_run(cuda: Any) -> None:
    model = cuda.nn.Linear(2, 2).cuda()
    x = cuda.ones(1, 2, device="cuda")
    graphed = cuda.cuda.make_graphed_callables(model, (x,))
    assert graphed(x).tolist() == model(x).tolist()


def test_switches_of_cudnn_are_kept_and_listed(device: str, cpu_wheel: None, fresh_ledger: Any) -> None:
    import torch

    import anytorch

    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    with anytorch.stand_in(device):
        torch.backends.cudnn.benchmark = not before[0]
        torch.backends.cuda.matmul.allow_tf32 = not before[1]
        assert (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32) == (not before[0], not before[1])
        with torch.backends.cudnn.flags(enabled=False):
            pass
        torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = before
    assert fresh_ledger.ignored["torch.backends.cudnn.benchmark"].count == 2
    assert fresh_ledger.ignored["torch.backends.cuda.matmul.allow_tf32"].first.startswith(f"{__file__}:")
    torch.backends.cudnn.benchmark = before[0]
    assert fresh_ledger.ignored["torch.backends.cudnn.benchmark"].count == 2, "nothing is noted after the block"


def test_the_accelerator_is_cuda(cuda: Any, fresh_ledger: Any) -> None:
    """A program may ask by either name; torch's own code goes on with the real device."""
    accelerator = cuda.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 1 and accelerator.current_device_index() == 0
    assert accelerator.current_accelerator(check_available=True) == cuda.device("cuda")
    x = cuda.ones(2, device=accelerator.current_accelerator())
    accelerator.synchronize(), accelerator.set_device_index(0), accelerator.empty_cache()
    assert x.is_cuda and x.device.type == accelerator.current_accelerator().type
    assert accelerator.memory_allocated() >= 0
    assert fresh_ledger.redirected["torch.accelerator.synchronize()"].count == 1
    asked = {"__name__": "torch.somewhere", "accelerator": accelerator}
    exec("found = accelerator.current_accelerator()", asked)
    assert asked["found"] != cuda.device("cuda")


def test_torchs_own_code_finds_no_accelerator_where_the_cpu_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA names it with or without a card: torch.compile asked for the stream of one that is not there."""
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    asked = {"__name__": "torch.somewhere", "torch": torch}
    question = "found = torch.accelerator.is_available(), torch.accelerator.device_count()"
    with anytorch.stand_in("cpu"):
        assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
        exec(question, asked)
    assert asked["found"] == (False, 0)
    exec(question, asked)
    assert asked["found"] == (True, 1)


def test_nvidias_libraries(cuda: Any, fresh_ledger: Any) -> None:
    before = cuda.backends.cuda.preferred_linalg_library()
    assert cuda.backends.cuda.preferred_linalg_library("magma") == before
    cuda.backends.cuda.cufft_plan_cache.clear()
    cuda.backends.cuda.cufft_plan_cache[0].max_size = 10
    assert cuda.backends.cuda.cufft_plan_cache.size == 0
    assert "torch.backends.cuda.preferred_linalg_library()" in fresh_ledger.ignored
    with pytest.raises(CannotStandIn, match="jiterator"):
        cuda.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
