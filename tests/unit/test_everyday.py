"""Memory, seeds, autocast and clean-up on this machine's CPU."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

import anytorch
from anytorch.devices.cpu import cpu_caps
from anytorch.devices.precision import autocast_dtype
from anytorch.errors import UnknownDevice, UsageError
from anytorch.probe.facts import Cpu


def test_memory_of_the_cpu_is_known_and_grows_with_what_is_allocated() -> None:
    before = anytorch.memory("cpu")
    assert before.total and before.free and before.allocated and before.peak
    assert before.free <= before.total
    held = torch.ones(2**26, dtype=torch.uint8)  # 64 MiB, touched
    after = anytorch.memory(torch.device("cpu"))
    assert after.allocated is not None and after.allocated - before.allocated > 2**25
    del held


def test_memory_of_a_device_that_is_not_here_is_unknown_not_zero() -> None:
    use = anytorch.memory("cuda:0")
    assert use.total is None and use.free is None and use.allocated is None
    assert "no such device" in use.source


def test_memory_of_an_unknown_device() -> None:
    with pytest.raises(UnknownDevice):
        anytorch.memory("cdua")


def test_cleanup_and_synchronize_work_with_no_accelerator() -> None:
    anytorch.cleanup()
    anytorch.cleanup("cpu")
    anytorch.synchronize("cpu")


def test_the_same_seed_gives_the_same_numbers_everywhere() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    assert anytorch.seed(42) == 42
    first = draw()
    anytorch.seed(42)
    assert draw() == first
    anytorch.seed(43)
    assert draw() != first


@pytest.mark.parametrize("value", [-1, 2**63, 1.5, True, "42"])
def test_bad_seeds(value: object) -> None:
    with pytest.raises(UsageError):
        anytorch.seed(value)  # type: ignore[arg-type]


def test_a_large_seed_fits_numpy_too() -> None:
    anytorch.seed(2**63 - 1)


def cpu(*features: str, vendor: str = "GenuineIntel") -> Cpu:
    return Cpu("a CPU", vendor, 8, 4, 8, None, features=frozenset(features))


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        (("avx2",), None),
        (("avx512f",), None),
        (("avx512f", "avx512_bf16"), "bfloat16"),
        (("amx_tile", "amx_bf16"), "bfloat16"),
        (("asimd", "bf16"), "bfloat16"),
        (("asimd", "asimdhp"), None),
    ],
)
def test_autocast_pays_only_with_instructions_for_it(features: tuple[str, ...], dtype: str | None) -> None:
    assert cpu_caps(cpu(*features)).autocast_dtype == dtype


def test_autocast_uses_the_fast_dtype_or_nothing() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with anytorch.use(cpu_dtype="bfloat16"), anytorch.autocast("cpu"):
        assert layer(x).dtype is torch.bfloat16
    with anytorch.use(cpu_dtype="float32"), anytorch.autocast("cpu"):
        assert layer(x).dtype is torch.float32
    with anytorch.use(cpu_dtype="bfloat16"), anytorch.autocast("cpu", enabled=False):
        assert layer(x).dtype is torch.float32


def test_the_stored_dtype_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_CPU_DTYPE", "float16")
    assert autocast_dtype("cpu") == "float16"


def test_the_documented_modes_of_torch_do_not_leak() -> None:
    with anytorch.autocast("cpu"):
        pass
    assert not torch.is_autocast_enabled("cpu")
