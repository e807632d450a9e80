"""BackendType, get_available_backends, set_backend and get_backend."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from anytorch_compat.selection import BackendType, get_available_backends, get_backend, set_backend
from anytorch_compat.system import get_best_device

import anytorch
from anytorch import settings
from anytorch.devices.registry import BUILT_IN
from anytorch.errors import DeviceFallbackWarning, DeviceUnavailable, UnknownDevice


@pytest.fixture(autouse=True)
def nothing_set() -> Iterator[None]:
    before = dict(settings._for_process)
    settings._for_process.clear()
    yield
    settings._for_process.clear()
    settings._for_process.update(before)


@pytest.fixture(autouse=True)
def only_a_cpu() -> None:
    if get_best_device() != "cpu":
        pytest.skip("these answers are those of a machine without an accelerator")


def test_members_are_the_back_ends_we_ship() -> None:
    assert [member.value for member in BackendType] == list(BUILT_IN)
    assert [member.name for member in BackendType] == [name.upper() for name in BUILT_IN]


def test_a_member_is_text() -> None:
    cuda = BackendType.CUDA
    assert isinstance(cuda, str) and cuda == "cuda" and cuda.value == "cuda"
    assert str(cuda) == f"{cuda}" == "cuda" and f"{cuda:>6}" == "  cuda"
    assert pickle.loads(pickle.dumps(cuda)) is cuda
    assert {"cuda": 1}[cuda] == 1  # equal things have equal hashes


@pytest.mark.parametrize(("text", "name"), [("CUDA", "cuda"), ("hip", "rocm"), ("vulkan", "webgpu"), (" cpu ", "cpu")])
def test_by_value_takes_case_and_aliases(text: str, name: str) -> None:
    assert BackendType(text) is BackendType[name.upper()]


@pytest.mark.parametrize("value", ["nonsense", "", 7, None])
def test_by_value_raises_as_an_enum_does(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid BackendType"):
        BackendType(value)


def test_available_backends() -> None:
    assert get_available_backends() == [BackendType.CPU]


def test_auto_is_the_best() -> None:
    assert get_backend() is BackendType.CPU
    assert set_backend("auto") is BackendType.CPU
    assert get_backend().value == "cpu"


def test_set_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YIRAGE_BACKEND", "cuda")
    with pytest.warns(DeviceFallbackWarning, match="from YIRAGE_BACKEND"):
        assert get_backend().value == "cpu"
    set_backend("cpu")
    assert get_backend().value == "cpu"  # said in code: no warning, which would be an error here


@pytest.mark.parametrize("name", ["cuda", "CUDA", "Mps", BackendType.NPU])
def test_a_missing_one_falls_back_once(name: str) -> None:
    with pytest.warns(DeviceFallbackWarning, match="Using cpu"):
        assert set_backend(name) is BackendType.CPU
    assert get_backend() is BackendType.CPU  # and says so no more


def test_an_unknown_one_changes_nothing() -> None:
    set_backend("cpu")
    with pytest.raises(UnknownDevice, match="did you mean 'cuda'"):
        set_backend("cdua")
    assert settings.lookup("backend") == settings.Value("cpu", "code")


def test_strict_changes_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    with pytest.raises(DeviceUnavailable):
        set_backend("cuda")
    assert settings.lookup("backend").source == "default"


def asked_in_a_thread() -> settings.Value:
    answers: list[settings.Value] = []
    thread = threading.Thread(target=lambda: answers.append(settings.lookup("backend")))
    thread.start()
    thread.join()
    return answers[0]


def test_set_holds_in_every_thread() -> None:
    set_backend("cpu")
    assert asked_in_a_thread() == settings.Value("cpu", "code")
    thread = threading.Thread(target=set_backend, args=("auto",))
    thread.start()
    thread.join()
    assert settings.get("backend") == "auto"


def test_a_with_block_is_stronger_and_stays_in_its_thread() -> None:
    set_backend("auto")
    with anytorch.use(backend="cpu"):
        assert settings.get("backend") == "cpu"
        assert asked_in_a_thread().value == "auto"
    assert settings.get("backend") == "auto"


def test_setting_inside_a_block_takes_effect_at_once() -> None:
    with anytorch.use(backend="auto"):
        set_backend("cpu")
        assert settings.get("backend") == "cpu"
    assert settings.get("backend") == "cpu"
