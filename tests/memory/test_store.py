"""The stack against a plain dictionary: whatever the order, sizes and budgets, every tensor comes back unchanged."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from anytorch_compat.stack import VGPULevel, VGPUStack, VGPUStackLinear, create_vgpu_stack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytorch.errors import BudgetTooSmall, ModelError, OutOfMemory, UsageError
from anytorch.memory import levels
from anytorch.memory import spill as spill_module
from anytorch.memory.stack import StoreLevel, TensorStore

KB = 1024
CPU = torch.device("cpu")


def stack_of(folder: Path, *capacities_kb: float) -> VGPUStack:
    levels: list[dict[str, Any]] = [{"capacity_mb": kb / KB, "device": "cpu", "speed_gbps": 1} for kb in capacities_kb]
    levels[-1]["device"] = str(folder) + "/"
    return VGPUStack({"levels": levels})


def consistent(store: TensorStore, expected: dict[str, torch.Tensor]) -> None:
    """Every key on exactly one level, the ledger in step, no file too many."""
    assert set(store.keys()) == set(expected)
    for level, place in enumerate(store.places):
        held = store.ledger.holders(str(level))
        assert held == {k: expected[k].nbytes for k in expected if store.level_of(k) == level}
        assert store.ledger.use(str(level)).peak <= place.capacity
        if place.folder is not None and place.folder.exists():
            assert len(list(place.folder.rglob("*.safetensors"))) == len(held)
            assert not list(place.folder.rglob("*.partial"))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "remove", "promote", "hold"]), st.integers(0, 7), st.integers(0, 3000)),
    min_size=1,
    max_size=40,
)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=OPERATIONS, capacities=st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 60_000)))
def test_against_a_dictionary(operations: list[tuple[str, int, int]], capacities: tuple[int, int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second, third = capacities
        store = TensorStore([StoreLevel(first, CPU), StoreLevel(second, CPU), StoreLevel(third, None, Path(folder))])
        expected: dict[str, torch.Tensor] = {}
        try:
            for number, (operation, which, size) in enumerate(operations):
                key = f"k{which}"
                if operation == "put":
                    value = torch.arange(size).add(number).to(DTYPES[which % len(DTYPES)])
                    try:
                        store.put(key, value.clone(), priority=which % 3)
                    except BudgetTooSmall:
                        pass
                    else:
                        expected[key] = value
                elif operation == "get":
                    found = store.get(key)
                    assert (found is None) == (key not in expected)
                    assert found is None or torch.equal(found, expected[key])
                elif operation == "remove":
                    found = store.remove(key)
                    assert found is None or torch.equal(found, expected[key])
                    assert (found is not None) == (expected.pop(key, None) is not None)
                elif operation == "promote":
                    store.promote([key, f"k{(which + 1) % 8}"])
                elif key in expected:
                    with store.hold(key) as held:
                        level = store.level_of(key)
                        for other in list(expected):
                            assert torch.equal(store.get(other), expected[other])  # type: ignore[arg-type]
                        assert torch.equal(held, expected[key]) and store.level_of(key) == level
                consistent(store, expected)
        finally:
            store.close()
        assert not list(Path(folder).iterdir())


def test_a_cycle_larger_than_level_0_still_hits(tmp_path: Path) -> None:
    """LRU would hit nothing here."""
    with stack_of(tmp_path, 40, 400) as stack:
        for number in range(8):
            stack.register(str(number), torch.full((KB * 10 // 4,), float(number)))
        for _ in range(6):
            for number in range(8):
                found = stack.access(str(number))
                assert found is not None and float(found[0]) == number
        stats = stack.get_stats()
        assert stats["l0_hit_rate"] > 0.3
        assert stats["total_tensors"] == 8 and stats["total_requests"] == 48
        assert {
            "level",
            "device",
            "capacity_mb",
            "used_mb",
            "usage",
            "hit_rate",
            "hits",
            "misses",
            "evictions",
        } <= stats["levels"][0].keys()
        assert "8 tensors" in stack.summary()


def test_priority_is_honoured(tmp_path: Path) -> None:
    with stack_of(tmp_path, 20, 400) as stack:
        stack.register("keep", torch.zeros(KB * 10 // 4), priority=9)
        stack.register("go", torch.zeros(KB * 10 // 4), priority=1)
        stack.register("new", torch.zeros(KB * 10 // 4), priority=5)
        assert stack.level_of("keep") == 0 and stack.level_of("go") == 1 and stack.level_of("new") == 0


def test_prefetch_runs_ahead_and_keeps_the_budget(tmp_path: Path) -> None:
    with stack_of(tmp_path, 20, 400) as stack:
        for number in range(4):
            stack.register(str(number), torch.full((KB * 10 // 4,), float(number)))
        low = [key for key in "0123" if stack.level_of(key) == 1]
        stack.prefetch(low)
        stack.wait()
        assert [stack.level_of(key) for key in low] == [0, 0]
        assert stack.levels[0].get_stats()["peak_mb"] <= 20 / KB


def test_too_large_for_every_level(tmp_path: Path) -> None:
    with stack_of(tmp_path, 1, 2) as stack, pytest.raises(BudgetTooSmall, match="no level has room"):
        stack.register("big", torch.zeros(KB))
    with stack_of(tmp_path, 1, 20) as stack:
        stack.register("big", torch.arange(KB, dtype=torch.float32))
        assert stack.level_of("big") == 1
        assert torch.equal(stack.access("big"), torch.arange(KB, dtype=torch.float32))  # type: ignore[arg-type]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack_of(tmp_path, 20, 400) as stack:
        stack.register("a", torch.ones(KB * 10 // 4))
        stack.register("b", torch.full((KB * 10 // 4,), 2.0))

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfMemory, match="full"):
            stack.register("c", torch.zeros(KB * 10 // 4))
        monkeypatch.undo()
        assert "c" not in stack
        assert float(stack.access("a")[0]) == 1 and float(stack.access("b")[0]) == 2  # type: ignore[index]
        consistent(stack, {"a": torch.ones(KB * 10 // 4), "b": torch.ones(KB * 10 // 4)})
        stack.register("c", torch.zeros(KB * 10 // 4))


def test_ctrl_c_in_the_middle_of_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack_of(tmp_path, 10, 400) as stack:
        stack.register("a", torch.ones(KB * 10 // 4))

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(spill_module, "write_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stack.register("b", torch.zeros(KB * 10 // 4))
        monkeypatch.undo()
        assert float(stack.access("a")[0]) == 1  # type: ignore[index]
        consistent(stack, {"a": torch.ones(KB * 10 // 4)})


def test_a_damaged_file_is_an_error_and_not_a_wrong_tensor(tmp_path: Path) -> None:
    with stack_of(tmp_path, 10, 400) as stack:
        for key in "ab":
            stack.register(key, torch.ones(KB * 10 // 4))
        (file,) = tmp_path.rglob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        low = next(key for key in "ab" if stack.level_of(key) == 1)
        with pytest.raises(ModelError, match="damaged"):
            stack.access(low)


def test_a_level_alone() -> None:
    level = VGPULevel(0, 1, "cpu", 50.0)
    assert level.put("a", torch.ones(100_000)) and level.put("b", torch.ones(100_000))
    assert not level.put("c", torch.ones(100_000)), "full: it says no and keeps what it has"
    assert level.get("a") is not None and level.get("c") is None
    assert level.get_stats()["hits"] == 1 and level.get_stats()["misses"] == 1
    assert level.put("a", torch.ones(100_000)), "replacing counts once"
    assert level.get_stats()["used_mb"] == pytest.approx(0.8e6 / 2**20)
    assert level.remove("a") is not None and level.remove("a") is None
    level.close()


def test_the_linear_layer_trains_like_torchs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with stack_of(tmp_path, 20, 4000) as stack:
        ours = VGPUStackLinear(32, 32, stack)
        plain = torch.nn.Linear(32, 32)
        with torch.no_grad():
            plain.weight.copy_(stack.access(ours.key))  # type: ignore[arg-type]
            plain.bias.copy_(ours.bias)  # type: ignore[arg-type]
        x = torch.randn(8, 32)
        optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (ours, plain)]
        for step in range(3):
            for layer, optimizer in zip((ours, plain), optimizers, strict=True):
                optimizer.zero_grad()
                layer(x).square().mean().backward()
                optimizer.step()
            ours.offload()
            stack.register(f"other {step}", torch.zeros(KB * 18 // 4))  # pushes the weight out
            with torch.no_grad():
                assert torch.equal(ours(x), plain(x))


def test_this_machines_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LINK_NBYTES", 2**20)
    monkeypatch.setattr(levels, "DISK_NBYTES", 2**20)
    with create_vgpu_stack() as stack:
        assert len(stack.levels) >= 2
        assert all(level.capacity_mb > 0 and level.transfer_speed_gbps > 0 for level in stack.levels)
        device = torch.device(stack.levels[0].device)
        monkeypatch.setattr(levels, "_device", lambda device: pytest.fail("measured again"))
        assert stack.levels[0].transfer_speed_gbps == levels.device_speed(device), "it was measured, and is remembered"
        stack.register("x", torch.ones(10))
        assert torch.equal(stack.access("x"), torch.ones(10))  # type: ignore[arg-type]


def test_a_level_nobody_understands() -> None:
    with pytest.raises(UsageError, match="level 0"):
        VGPUStack({"levels": [{"capacity": 3}]})
