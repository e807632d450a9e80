"""Steps of transformers' own models on an accelerator: recorded, with the CPU's logits, and tokens chosen there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch.devices.locate import locate
from anytorch.devices.precision import capabilities
from anytorch.text.decoders.choosing import Choice
from anytorch.text.persistent.ahead import Ahead

transformers = pytest.importorskip("transformers")

from anytorch.text.generate.model_steps import open_model  # noqa: E402

pytestmark = pytest.mark.device

LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 2},
    "Bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "Gemma2": {**LLAMA, "head_dim": 16, "sliding_window": 16},
    "Mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "Bamba": {**LLAMA, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
              "attn_layer_indices": [1]},
}  # fmt: skip
PROMPTS = [list(range(5, 25)), [7, 9, 11]]


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_recorded_and_give_what_the_cpu_gives(name: str, accelerator: torch.device) -> None:
    torch.manual_seed(3)
    words = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.3}
    config = getattr(transformers, f"{name}Config")(**{**words, **FAMILIES[name]})
    on_cpu = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    opened = open_model(copy.deepcopy(on_cpu).to(accelerator), Path(name), 512)
    backend, index = locate(accelerator)
    assert opened.says.startswith("one recorded step") == capabilities(backend.name, index).graphs, opened.says
    steps: Any = opened.make(2, 64)
    with torch.no_grad():
        texts = [list(ids) for ids in PROMPTS]
        best = [int(steps.read(row, ids).argmax()) for row, ids in enumerate(texts)]
        for _ in range(20):
            for row, text in enumerate(texts):
                text.append(best[row])
                steps.follow(row, best[row])
            logits = steps.step()[:2].float().cpu()
            for row, text in enumerate(texts):
                wanted = on_cpu(torch.tensor([text]), use_cache=False).logits[0, -1]
                assert float((logits[row] - wanted).norm() / wanted.norm()) < 0.01
            best = logits.argmax(-1).tolist()
        if isinstance(steps, Ahead):  # as many again, chosen there: all of them the CPU's, or next to it
            for row, text in enumerate(texts):
                text.append(best[row])
                steps.follow(row, best[row])
            flow = steps.tokens([0, 1], [Choice(most=10), Choice(most=10)])
            for made in flow:
                for row, text in enumerate(texts):
                    wanted = on_cpu(torch.tensor([text]), use_cache=False).logits[0, -1]
                    assert float(wanted.max() - wanted[made[row]]) < 0.05 * float(wanted.std())
                    text.append(made[row])
            assert [len(text) - len(ids) for text, ids in zip(texts, PROMPTS, strict=True)] == [31, 31]
