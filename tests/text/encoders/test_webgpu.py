"""A tiny BERT on the webgpu device, on whatever adapter there is: the whole path from ids to vectors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

LAVAPIPE = Path(__file__).resolve().parents[3] / ".cache" / "mesa" / "lvp.json"
# As in tests/webgpu: the Vulkan loader reads these once, when the first adapter of the process is looked for.
if "VK_ICD_FILENAMES" not in os.environ and "VK_DRIVER_FILES" not in os.environ and LAVAPIPE.exists():
    os.environ["VK_ICD_FILENAMES"] = str(LAVAPIPE)
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")


@pytest.fixture(scope="module")
def webgpu(missing: Callable[[str, str], NoReturn]) -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("wgpu")
    pytest.importorskip("transformers")
    from anytorch.errors import DeviceUnavailable

    try:
        import anytorch.webgpu  # noqa: F401  (registers the device)
        from anytorch.gpu.runtime import open_runtime

        open_runtime()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    yield torch
    torch.webgpu.synchronize()


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_bert_on_webgpu(
    graphs: bool,
    webgpu: Any,
    open_model: Callable[[str], tuple[Any, Any]],
    texts: tuple[np.ndarray, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anytorch.text.encoders.encoder import TorchEncoder
    from anytorch.text.encoders.strategy import worst_cosine

    # No operation may leave for the CPU: an encoder that does is no GPU path.
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "error")
    wanted = TorchEncoder(*open_model("bert"), device="cpu", layout="rows").run(*texts)
    with TorchEncoder(
        *open_model("bert"), device=webgpu.device("webgpu"), dtype="float32", layout="rows", graphs=graphs
    ) as encoder:
        for _ in range(3):  # the third is a replay
            found = encoder.run(*texts)
            assert worst_cosine(wanted, found) > 0.99999
            np.testing.assert_allclose(found, wanted, atol=1e-3, rtol=1e-3)
        if graphs:
            assert encoder.recorder is not None and encoder.recorder.recordings, encoder.recorder
            assert not encoder.recorder.failed
