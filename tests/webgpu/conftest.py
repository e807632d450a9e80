"""What the tests of the webgpu device get: the device, a software GPU to run it on, and a rule about CPU fallbacks.

    webgpu                 torch, with the device registered; without an adapter the test is skipped, or fails
                           (ANYTORCH_TEST_REQUIRE)
    @pytest.mark.native    the test may not fall back to the CPU: an op without a kernel raises FallbackForbidden

Mesa 25's lavapipe is five to nine times as fast as Debian 12's own; `.cache/mesa/lvp.json` names it where it is
installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LAVAPIPE = REPOSITORY / ".cache" / "mesa" / "lvp.json"

# Here, not in a fixture: the Vulkan loader reads it once, when the first adapter of the process is looked for.
if "VK_ICD_FILENAMES" not in os.environ and "VK_DRIVER_FILES" not in os.environ and LAVAPIPE.exists():
    os.environ["VK_ICD_FILENAMES"] = str(LAVAPIPE)
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # the loader complains on standard error without one


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "native: the test may not fall back to the CPU (tests/webgpu)")


@pytest.fixture(autouse=True)
def fallback_rule(request: pytest.FixtureRequest, isolation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By environment variable, not by context: backward runs on a thread of autograd's own."""
    native = request.node.get_closest_marker("native") is not None
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "error" if native else "silent")


@pytest.fixture(scope="module")
def webgpu(missing: Callable[[str, str], NoReturn]) -> Iterator[Any]:
    """torch, with `torch.webgpu` and the device "webgpu" registered and opened."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("wgpu")
    from anytorch.errors import DeviceUnavailable

    try:
        import anytorch.webgpu  # noqa: F401  (registers the device)
        from anytorch.gpu.runtime import open_runtime

        open_runtime()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    yield torch
    torch.webgpu.synchronize()  # an error of this file's kernels belongs to this file


@pytest.fixture
def fresh_plans(webgpu: Any) -> Iterator[None]:
    """No plan of earlier tests is found, and none of this one later: for tests that change what plans are made by."""
    from anytorch.gpu.plans import plans

    plans.clear()
    yield
    plans.clear()


@pytest.fixture
def ours(webgpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernel graphs run by our kernels wherever those are right, fast or not; nothing found by other tests is used."""
    from anytorch.graph import compiler, faster, search

    def chosen(trials: Sequence[Any], *, noise: float = 0.0) -> tuple[str, str]:
        timed = [one.name for one in trials if one.seconds is not None]
        return next((name for name in timed if name != search.EAGER), search.EAGER), "a test wants it"

    monkeypatch.setattr(search, "fastest", chosen)
    monkeypatch.setattr(search, "HOPELESS", float("inf"))
    monkeypatch.setattr(faster, "GAIN", float("inf"))
    webgpu._dynamo.reset()
    compiler._found.clear()
    yield
    compiler._found.clear()


@pytest.fixture(scope="module")
def torch(webgpu: Any) -> Any:
    """The same, for tests that read as a user's program does."""
    return webgpu
