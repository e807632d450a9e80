"""Every way to embed on the device: each family of encoders, layout, dtype, recorded or not, and the engine as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from tests.text.encoders.conftest import FAMILIES, LENGTHS, make_model

from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.spec import read_spec
from anytorch.text.encoders.encoder import TorchEncoder
from anytorch.text.encoders.strategy import candidates, worst_cosine

pytestmark = pytest.mark.device


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(family).save_pretrained(made[family])
        return made[family]

    return make


def texts(turn: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(7 + turn).integers(5, 120, sum(LENGTHS)).astype(np.int32)
    return ids, np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)


def opened(path: Path, device: Any, **options: Any) -> TorchEncoder:
    spec = read_spec(json.loads((path / "config.json").read_text()))
    return TorchEncoder(spec, Checkpoint(path), device=device, **options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_every_family(
    accelerator: torch.device, folder: Callable[[str], Path], family: str, dtype: str
) -> None:
    """Each way that the device has to compute it (rows, packed, our kernels, recorded), for other texts each time."""
    if accelerator.type == "cpu" and dtype == "float16":
        pytest.skip("a CPU computes in no float16")
    with opened(folder(family), "cpu", dtype="float32", layout="rows") as host:
        wanted = [host.run(*texts(turn)) for turn in range(3)]
    with opened(folder(family), accelerator, dtype=dtype, layout="rows", graphs=False) as encoder:
        plans = candidates(
            encoder.caps,
            encoder.spec,
            dtype,
            accelerator.type == "cpu",
            "auto",
            None,
            can_fuse=encoder.module.can_fuse(),
        )
        assert len(plans) > 1
        for plan in plans:
            encoder.use(plan)
            found = [encoder.run(*texts(turn)) for turn in range(3)]
            cosine = min(worst_cosine(one, other) for one, other in zip(wanted, found, strict=True))
            assert cosine > (0.9999 if dtype == "float32" else 0.99), plan
            if plan.graphs:
                assert encoder.recorder is not None and not encoder.recorder.failed and encoder.recorder.recordings, (
                    plan
                )


def test_packed_weights(accelerator: torch.device, folder: Callable[[str], Path]) -> None:
    with opened(folder("bert"), "cpu", dtype="float32", layout="rows") as host:
        wanted = host.run(*texts())
    with opened(folder("bert"), accelerator, dtype="float32", layout="rows", quantization="int8") as encoder:
        assert worst_cosine(wanted, encoder.run(*texts())) > 0.99


def test_the_engine(accelerator: torch.device, tmp_path: Path) -> None:
    """Texts to vectors as users have it, with what is measured on first use, alone and through the queue."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from anytorch import ArrowEngine

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(116))]
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path)
    model = make_model("bert")
    model.save_pretrained(tmp_path)
    generator = np.random.default_rng(3)
    given = [" ".join(f"word{n}" for n in generator.integers(0, 116, length)) for length in (3, 9, 1, 30, 17, 5) * 20]
    with ArrowEngine(tmp_path, str(accelerator)) as engine:
        found, queued = engine.encode(given), engine.queue.encode(given)
        assert str(accelerator.type) in engine.device
    wanted = []
    with torch.no_grad():
        for text in given:
            states = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            wanted.append(states.mean(0).numpy())
    assert worst_cosine(np.stack(wanted), found) > 0.999
    assert worst_cosine(np.stack(wanted), queued) > 0.999
