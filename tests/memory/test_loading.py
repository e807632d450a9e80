"""Models straight from their files: the logits and tokens of transformers' own, within budgets, with a cache in tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import anytorch
from anytorch.errors import ModelError, UsageError
from anytorch.memory.levels import create_tiers
from anytorch.memory.loading import preview
from anytorch.memory.types import Speeds

transformers = pytest.importorskip("transformers")
MB = 2**20
SPEEDS = Speeds(10.0, 2.0)
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
KINDS = {
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": False, "head_dim": 32}),
}


@pytest.fixture(scope="module", params=KINDS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, more = KINDS[request.param]
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    made = getattr(transformers, model)(
        getattr(transformers, config)(**SMALL, **more, pad_token_id=0, eos_token_id=None)
    )
    made.to(torch.bfloat16).save_pretrained(path, max_shard_size="500KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.arange(3, 15).view(2, 6)


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def tokens(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids)
    out: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)
    return out


@pytest.mark.parametrize("budgets", [{"device_budget": 2.8 * MB}, {"device_budget": 2.8 * MB, "host_budget": 3.6 * MB}])
def test_the_same_logits_and_tokens(folder: Path, ids: torch.Tensor, budgets: dict[str, Any]) -> None:
    plain = reference(folder)
    model: Any = anytorch.memory.load(folder, "cpu", speeds=SPEEDS, **budgets)
    handle = anytorch.memory.fitted(model)
    assert handle.plan.nbytes_at("disk") > 0 and not handle.block_homes.spills, "nothing is written"
    assert model.dtype == plain.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(tokens(model, ids), tokens(plain, ids))
    for use in handle.stats()["levels"].values():
        assert use["peak"] <= use["capacity"]
    found, wanted = model.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    handle.unfit("cpu")
    assert torch.equal(tokens(model, ids), tokens(plain, ids))


def test_a_cache_in_tiers(folder: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    from anytorch.memory.caching import tiered_cache

    plain = reference(folder)
    levels = [
        {"capacity_mb": 8 / 1024, "device": "cpu", "speed_gbps": 1},
        {"capacity_mb": 8 / 1024, "device": "cpu", "speed_gbps": 1},
        {"capacity_mb": 1, "device": f"{tmp_path}/", "speed_gbps": 1},
    ]
    cache = tiered_cache({"levels": levels})
    try:
        assert torch.equal(tokens(plain, ids, past_key_values=cache), tokens(plain, ids))
        stored = cache.stack
        assert stored.count(2) > 0, "the disk was needed"
        uses = [stored.ledger.use(str(level)) for level in range(3)]
        assert all(0 < use.peak <= use.capacity for use in uses)
    finally:
        cache.close()
    cache = tiered_cache({"levels": levels})
    beams = tokens(plain, ids, past_key_values=cache, num_beams=2)
    assert torch.equal(beams, tokens(plain, ids, num_beams=2))
    cache.close()


def test_the_plan_without_loading(folder: Path) -> None:
    tiers = create_tiers("cpu", device_budget=3 * MB, disk=folder, speeds=SPEEDS)
    plan = preview(folder, tiers)
    assert plan.nbytes_at("disk") > 0 and plan.prediction.pass_s > 0
    assert plan.prediction.limit == "disk"


def test_checkpoints_that_do_not_match(models: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no values for"):
        anytorch.memory.load(models.Tied, "cpu", weights=folder, speeds=SPEEDS)
    with pytest.raises(UsageError, match="weights="):
        anytorch.memory.load(models.Tied, "cpu", speeds=SPEEDS)
    with pytest.raises(ModelError, match=r"config\.json"):
        anytorch.memory.load(tmp_path, "cpu", speeds=SPEEDS)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["Nonsense"]}')
    with pytest.raises(ModelError, match="Nonsense"):
        anytorch.memory.load(tmp_path, "cpu", speeds=SPEEDS)
    from safetensors.torch import save_file

    save_file(
        {name: tensor[:1].clone() for name, tensor in models.made().named_parameters()}, tmp_path / "m.safetensors"
    )
    with pytest.raises(ModelError, match="shape"):
        anytorch.memory.load(models.Tied, "cpu", weights=tmp_path / "m.safetensors", speeds=SPEEDS)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    from anytorch.safetensors_files import locate_tensors

    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        locate_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="index"):
        locate_tensors(tmp_path)


@pytest.mark.long
def test_opening_a_folder_says_nothing_about_other_libraries(tmp_path: Path) -> None:
    """In a process of its own: the libraries speak when they are first imported."""
    import subprocess
    import sys

    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "anytorch", "fit", str(tmp_path / "model"), "--device", "cpu"]
    said = subprocess.run(
        [*command, "--device-budget", "200KB"], capture_output=True, text=True, check=True, timeout=120
    )
    assert said.stderr == "" and "device:" in said.stdout
