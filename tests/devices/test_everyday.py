"""Memory, seeds, autocast and clean-up on this machine's CPU."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy
import pytest
import torch

import anytorch
from anytorch.devices import seeds
from anytorch.devices.base import TorchBackend
from anytorch.devices.cpu import cpu_caps
from anytorch.devices.precision import autocast_dtype
from anytorch.devices.registry import Registry, registry
from anytorch.devices.seeds import own_random_numbers
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


def test_cleanup_and_synchronize_work_with_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cleanup()` asks every back end for its cached memory, `cleanup(device)` that device's alone."""
    asked: list[str] = []

    def told(name: str, real: Callable[..., None]) -> Callable[..., None]:
        return lambda *index: (asked.append(":".join([name, *map(str, index)])), real(*index))[1]

    for name, backend in registry().backends.items():
        monkeypatch.setattr(backend, "empty_cache", told(name, backend.empty_cache))
        monkeypatch.setattr(backend, "synchronize", told(name, backend.synchronize))
    for cleaned in ((), ("cpu",)):
        cycle = Cycle()
        gone = weakref.ref(cycle)
        del cycle
        anytorch.cleanup(*cleaned)
        assert gone() is None, "garbage that refers to itself is collected"
    assert asked == [*registry().backends, "cpu"]
    anytorch.synchronize("cpu")
    assert asked[-1] == "cpu:0"


class Cycle:
    def __init__(self) -> None:
        self.itself = self


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
    assert anytorch.seed(2**63 - 1) == 2**63 - 1 == torch.initial_seed()
    assert numpy.random.rand() == numpy.random.RandomState(2**32 - 1).rand(), "NumPy takes the lower 32 bits"


class Generators:
    """What `torch.<type>` of an accelerator says about its random numbers, for two devices."""

    def __init__(self, *, awake: bool) -> None:
        self.awake, self.states = awake, [torch.tensor([1]), torch.tensor([2])]

    def is_initialized(self) -> bool:
        return self.awake

    def get_rng_state_all(self) -> list[torch.Tensor]:
        assert self.awake, "asking for a state wakes the driver"
        return list(self.states)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        assert self.awake
        self.states = list(states)

    def manual_seed_all(self, value: int) -> None:
        self.states = [torch.tensor([value])] * 2


@pytest.mark.parametrize("awake", [True, False])
def test_who_seeds_for_himself_leaves_the_callers_random_numbers(awake: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(awake=awake)
    backend = TorchBackend()
    monkeypatch.setattr(backend, "module", lambda: generators)
    monkeypatch.setattr(seeds, "registry", lambda: Registry({"it": backend}, {}))
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with pytest.raises(KeyError), own_random_numbers():
        torch.manual_seed(99)
        generators.manual_seed_all(99)
        raise KeyError
    assert torch.equal(torch.rand(3), wanted)
    assert [int(state) for state in generators.states] == ([1, 2] if awake else [7, 7])


def test_states_of_a_module_that_knows_one_device() -> None:
    """So are Metal's and ours for WebGPU."""
    state = [torch.tensor([1])]
    backend = TorchBackend()
    backend.module = lambda: SimpleNamespace(  # type: ignore[method-assign]
        get_rng_state=lambda: state[0], set_rng_state=lambda given: state.__setitem__(0, given)
    )
    kept = backend.random_states()
    state[0] = torch.tensor([9])
    assert kept is not None
    backend.restore_random_states(kept)
    assert int(state[0]) == 1
    backend.module = lambda: None  # type: ignore[method-assign]
    assert backend.random_states() is None


def test_own_random_numbers_on_this_machine() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with own_random_numbers():
        torch.manual_seed(99)
    assert torch.equal(torch.rand(3), wanted)


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
