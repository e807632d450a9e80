"""Whole models, as their users write them, without the CPU: inference, a training step, and generation with a cache.

The classes are those of `transformers` and `diffusers`, with few and narrow layers and random weights. Every test is marked
`native`: an op that would fall back raises. Results are compared with the same model's on the CPU.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

pytestmark = pytest.mark.native
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Libraries:
    transformers: ModuleType
    diffusers: ModuleType


@pytest.fixture(scope="module")
def libraries(missing: Callable[[str, str], NoReturn]) -> Iterator[Libraries]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")  # nothing is downloaded here
    before = dict(os.environ)
    try:
        import diffusers
        import transformers
    except ImportError as exc:
        missing("models", f"{exc.name} is not installed")
    transformers.logging.set_verbosity_error()
    yield Libraries(transformers, diffusers)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    patch.undo()


# --- the models -------------------------------------------------------------------------------------------------------

NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # random numbers differ per device
DECODER = {**NARROW, "vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 60, shape)


def labelled(ids: torch.Tensor, **more: torch.Tensor) -> Inputs:
    return {"input_ids": ids, "labels": ids, **more}


def bert(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    config = given.transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **NARROW, **NO_DROPOUT)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return given.transformers.BertForMaskedLM(config), labelled(tokens(2, 9), attention_mask=mask)


def gpt2(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = given.transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=63)
    return given.transformers.GPT2LMHeadModel(config), labelled(tokens(2, 9))


def llama(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    config = given.transformers.LlamaConfig(**DECODER)
    return given.transformers.LlamaForCausalLM(config), labelled(tokens(2, 9))


def qwen3(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    config = given.transformers.Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0  # padded on the left, as batches are for generation
    return given.transformers.Qwen3ForCausalLM(config), labelled(tokens(2, 9), attention_mask=mask)


def qwen3_moe(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = given.transformers.Qwen3MoeConfig(**DECODER, **experts, head_dim=8)
    return given.transformers.Qwen3MoeForCausalLM(config), labelled(tokens(2, 9))


def vit(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    config = given.transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **NARROW, **NO_DROPOUT)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}
    return given.transformers.ViTForImageClassification(config), inputs


def resnet50(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    """All 50 layers, an eighth as wide."""
    config = given.transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=5
    )
    inputs = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.tensor([1, 3, 0, 4])}
    return given.transformers.ResNetForImageClassification(config), inputs


def smooth_resnet50(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    """The same without kinks, whose gradients can be compared closely."""
    model, inputs = resnet50(given)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.ReLU):
                setattr(module, name, torch.nn.SiLU())
    return model, inputs


def whisper_encoder(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = given.transformers.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=12, dropout=0.0)
    return WhisperEncoder(config), {"input_features": torch.randn(2, 8, 24)}


def unet(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    model = given.diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 700])}


class LstmLanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 16)
        self.lstm = torch.nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(24, 64)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.head(self.lstm(self.embedding(ids))[0]),)


def lstm(given: Libraries) -> tuple[torch.nn.Module, Inputs]:
    return LstmLanguageModel(), {"ids": tokens(2, 7)}


MODELS = (bert, gpt2, llama, qwen3, qwen3_moe, vit, resnet50, smooth_resnet50, whisper_encoder, unet, lstm)
DECODERS = (gpt2, llama, qwen3, qwen3_moe)
# How far a training step may be from the CPU's, all parameters together. Fifty layers of batch norm over a small batch make
# 1e-4 of float32's rounding, on the CPU too (against float64). And of resnet50's 392,192 activations a few lie so near zero
# that rounding decides their side: each that changes sides changes every gradient behind it, for the CPU as for us.
APART = {resnet50: 0.1, smooth_resnet50: 2e-3}
by_name = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


# --- what is compared -------------------------------------------------------------------------------------------------


def first_output(made: Any) -> torch.Tensor:
    result = made[0] if isinstance(made, tuple) else None
    for name in ("logits", "sample", "last_hidden_state"):
        if result is None:
            result = getattr(made, name, None)
    assert isinstance(result, torch.Tensor)
    return result


def loss_of(made: Any) -> torch.Tensor:
    """The model's own loss where it has one."""
    loss = getattr(made, "loss", None)
    return loss if loss is not None else first_output(made).square().mean()


def moved(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    return {name: value.to("webgpu", dtype if value.is_floating_point() else None) for name, value in inputs.items()}


def pair(make: Any, given: Libraries) -> tuple[torch.nn.Module, torch.nn.Module, Inputs]:
    """The model on the CPU, its copy on the device, and inputs."""
    torch.manual_seed(0)
    model, inputs = make(given)
    torch.webgpu.reset_fallback_stats()  # type: ignore[attr-defined]
    return model, copy.deepcopy(model).to("webgpu"), inputs


def close(have: torch.Tensor, want: torch.Tensor, error: float) -> None:
    """Within `error` of the largest element: what is small beside it is the rest of a cancellation, on the CPU too."""
    assert have.device.type == "webgpu"
    scale = float(want.detach().abs().max())
    torch.testing.assert_close(have.detach().cpu().to(want.dtype), want.detach(), rtol=error, atol=error * scale)


def distance(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """How far the first ones are from the second, all together, as a share of the second."""
    apart = sum(float((have - want).double().square().sum()) for have, want in pairs)
    return float((apart / sum(float(want.double().square().sum()) for _, want in pairs)) ** 0.5)


def nothing_fell_back() -> None:
    assert torch.webgpu.fallback_stats() == {}  # type: ignore[attr-defined]


# --- the tests --------------------------------------------------------------------------------------------------------


@by_name
def test_inference(webgpu: Any, libraries: Libraries, make: Any) -> None:
    model, ours, inputs = pair(make, libraries)
    model.eval()
    ours.eval()
    with torch.no_grad():
        expected = first_output(model(**inputs))
        close(first_output(ours(**moved(inputs))), expected, 1e-5)
        half = first_output(ours.half()(**moved(inputs, torch.float16)))
        assert half.dtype is torch.float16
        close(half, expected, 5e-3)
    nothing_fell_back()


@by_name
def test_a_training_step(webgpu: Any, libraries: Libraries, make: Any) -> None:
    model, ours, inputs = pair(make, libraries)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for trained, given in ((model, inputs), (ours, moved(inputs))):
        trained.train()
        # Adam divides a gradient by its own size, which makes a step of rounding errors where there is no gradient (the bias
        # of attention's keys); with this epsilon such a step stays as small as the error.
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, eps=1e-3)
        losses.append(loss_of(trained(**given)))
        losses[-1].backward()
        optimizer.step()
    close(losses[1], losses[0], 1e-4)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names, "tied weights are still tied"
    mine, theirs = list(ours.parameters()), list(model.parameters())
    assert [p.grad is None for p in mine] == [p.grad is None for p in theirs]
    with_gradient = [name for name, p in zip(names, theirs, strict=True) if p.grad is not None]
    gradients = [(a.grad.cpu(), b.grad) for a, b in zip(mine, theirs, strict=True) if a.grad is not None]
    steps = [(a.detach().cpu() - x, b.detach() - x) for a, b, x in zip(mine, theirs, before, strict=True)]
    if make in APART:
        assert distance(gradients) < APART[make]
        assert distance(steps) < APART[make]
    else:
        largest = max(float(b.abs().max()) for _, b in gradients)
        for name, (have, want) in zip(with_gradient, gradients, strict=True):
            torch.testing.assert_close(
                have, want, rtol=1e-3, atol=2e-5 * largest, msg=lambda m, name=name: f"{name}: {m}"
            )
        for name, (have, want) in zip(names, steps, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    nothing_fell_back()


@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_prefill_and_decode(webgpu: Any, libraries: Libraries, make: Any) -> None:
    """Token by token with the cache: the logits of every step are the CPU's; and so is what generate() writes."""
    model, ours, inputs = pair(make, libraries)
    ids, more = inputs["input_ids"], {n: v for n, v in inputs.items() if n not in ("input_ids", "labels")}
    steps: list[list[torch.Tensor]] = [[], []]
    for runs, network, device in ((steps[0], model.eval(), "cpu"), (steps[1], ours.eval(), "webgpu")):
        cache, fed = None, ids.to(device)
        mask = inputs.get("attention_mask", torch.ones_like(ids)).to(device)
        with torch.no_grad():
            for step in range(3):
                made = network(input_ids=fed, attention_mask=mask, past_key_values=cache, use_cache=True)
                runs.append(made.logits)
                cache = made.past_key_values
                fed = ids[:, step : step + 1].to(device)
                mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
    for have, want in zip(steps[1], steps[0], strict=True):
        close(have, want, 1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **more, **options)  # type: ignore[operator]
    written = ours.generate(ids.to("webgpu"), **moved(more), **options)  # type: ignore[operator]
    assert written.tolist() == expected.tolist()
    nothing_fell_back()


def test_sampled_generation_repeats(webgpu: Any, libraries: Libraries) -> None:
    _, ours, inputs = pair(qwen3, libraries)
    written = []
    for _ in range(2):
        torch.webgpu.manual_seed(7)  # type: ignore[attr-defined]
        options = {"max_new_tokens": 4, "do_sample": True, "top_k": 20, "top_p": 0.9, "pad_token_id": 0}
        written.append(ours.eval().generate(**moved({"input_ids": inputs["input_ids"]}), **options))  # type: ignore[operator]
    assert written[0].tolist() == written[1].tolist()
    assert written[0].shape == (2, 13)
    nothing_fell_back()
