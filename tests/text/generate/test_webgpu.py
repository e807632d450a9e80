"""Steps of transformers' models on the webgpu device, on whatever adapter there is: recorded, and with its tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

LAVAPIPE = Path(__file__).resolve().parents[3] / ".cache" / "mesa" / "lvp.json"
# As in tests/webgpu: the Vulkan loader reads these once, when the first adapter of the process is looked for.
if "VK_ICD_FILENAMES" not in os.environ and "VK_DRIVER_FILES" not in os.environ and LAVAPIPE.exists():
    os.environ["VK_ICD_FILENAMES"] = str(LAVAPIPE)
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")

PROMPTS = ["The quick brown fox jumps over the lazy dog and then some more text", "x"]


@pytest.fixture(scope="module")
def webgpu(missing: Callable[[str, str], NoReturn]) -> Any:
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
    return torch


@pytest.mark.parametrize("name", ["Gemma2", "Mixtral", "Mamba"])
def test_every_token_is_a_replay(name: str, webgpu: Any, tmp_path: Path) -> None:
    import transformers
    from tests.text.generate.test_families import FAMILIES, generated, tiny, tokens_of

    from anytorch.text.generate.generator import TextGenerator

    tokenizer = tiny(name, FAMILIES[name][1], tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    wanted = [generated(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    with TextGenerator(tmp_path, device="webgpu", dtype="float32") as generator:
        assert generator.describe()["decoding"] == "ModelSteps"
        assert generator.describe()["decoding_why"].startswith("one recorded step of transformers' own model")
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            assert tokens_of(generator.stream(prompt, max_tokens=12, temperature=0)) == tokens
        steps = generator._scheduler._way._kernel  # type: ignore[attr-defined]
        assert len(steps._recorder.recordings) == 1 and not steps.recorded
        streams = [generator.stream(prompt, max_tokens=12, temperature=0) for prompt in PROMPTS]
        assert [tokens_of(stream) for stream in streams] == wanted
