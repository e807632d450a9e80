"""A whole text in one launch: tokens that the decoder would choose, on a GPU of NVIDIA from compute capability 9.0 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from anytorch.errors import InputError
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.cuda import CudaKernel, refusal
from anytorch.text.persistent.fused import FusedSteps, steps_for
from anytorch.text.persistent.kernel import PersistentKernel

pytestmark = pytest.mark.device

SMALL: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 264,
    "intermediate_size": 520,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 256, "attention_bias": True, "mlp_bias": True},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 70, "head_dim": 64},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 128},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "num_attention_heads": 14},
}


def decoder_on(device: torch.device, name: str, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(read_spec({**SMALL, **FAMILIES[name]}, "a config.json")).eval().requires_grad_(False)
    for parameter_name, parameter in decoder.named_parameters():
        spread = 1.0 if parameter.dim() == 1 or "embed" in parameter_name else parameter.shape[-1] ** -0.5
        parameter.data.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3 if parameter.dim() == 1 else spread)
    return decoder.to(device, dtype)


@pytest.fixture
def gpu(accelerator: Any, missing: Callable[[str, str], NoReturn]) -> torch.device:
    spec = read_spec({**SMALL, **FAMILIES["qwen3"]}, "a config.json")
    if why := refusal(spec, torch.bfloat16, accelerator):
        missing("hopper", why)
    device: torch.device = accelerator
    return device


def check(decoder: Decoder, ids: list[int], made: list[int]) -> None:
    """Every token is, by float32, as good as rounding to the decoder's dtype lets one tell."""
    wide = Decoder(decoder.spec).eval().requires_grad_(False).to(decoder.lm_head.weight.device)
    wide.load_state_dict(decoder.state_dict())
    whole = [ids + made[:-1]]
    truth, own = (one(whole)[0, len(ids) - 1 :].float() for one in (wide, decoder))
    chosen = truth[torch.arange(len(made)), torch.tensor(made)]
    rounding = (truth - own).abs().max()
    assert float((truth.amax(-1) - chosen).max()) <= 2 * float(rounding) < 0.5 * float(truth.std())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_decoders(gpu: torch.device, name: str, dtype: torch.dtype) -> None:
    decoder = decoder_on(gpu, name, dtype)
    kernel = CudaKernel(decoder, positions=400)
    for ids in ([5], list(range(3, 90))):
        made = kernel.generate(ids, 200)
        assert len(made) == 200
        check(decoder, ids, made)
    assert kernel.generate([5], 200) == kernel.generate([5], 200)


def test_a_long_text_is_split_among_many_blocks(gpu: torch.device) -> None:
    """From a few splits that everybody joins to many that one block joins, on the way."""
    decoder = decoder_on(gpu, "qwen2", torch.bfloat16)
    ids = torch.randint(0, 1003, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    made = CudaKernel(decoder, positions=2200).generate(ids, 150)
    assert len(made) == 150
    check(decoder, ids, made)


def test_ends_room_and_a_wish_to_stop(gpu: torch.device) -> None:
    kernel = CudaKernel(decoder_on(gpu, "qwen3", torch.bfloat16), positions=120)
    every = kernel.generate([7, 8], 60)
    end = every[40]
    assert kernel.generate([7, 8], 60, ends=[end, 1002]) == every[: every.index(end)]
    assert len(kernel.generate([7, 8], 1000)) == 119  # the last one needs no place
    some = kernel.stream([7, 8], 118)
    assert [next(some), next(some)] == every[:2]
    some.close()  # in the middle
    assert kernel.generate([7, 8], 60) == every
    with pytest.raises(InputError, match="room for 1 to 120"):
        kernel.generate([1] * 121, 3)


def test_a_thousand_launches(gpu: torch.device) -> None:
    kernel = CudaKernel(decoder_on(gpu, "mistral with a window", torch.float16), positions=100)
    want = kernel.generate([3, 4, 5], 8)
    kernel.read([3, 4, 5])
    for _ in range(1000):
        kernel.length = 3
        assert list(kernel.follow(want[0], 7)) == want[1:]


def test_a_model_that_computes_no_numbers_is_said(gpu: torch.device) -> None:
    decoder = decoder_on(gpu, "llama", torch.bfloat16)
    kernel = CudaKernel(decoder, positions=50)
    kernel.read([1, 2])
    dict(decoder.named_parameters())["model.layers.1.mlp.down_proj.weight"].data[0, 0] = torch.inf
    with pytest.raises(ArithmeticError, match="NaN or infinity"):
        list(kernel.follow(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_several_texts_by_recorded_steps_of_our_kernels(gpu: torch.device, name: str, dtype: torch.dtype) -> None:
    decoder = decoder_on(gpu, name, dtype)
    steps, why = steps_for(decoder, 5, 400)
    assert isinstance(steps, FusedSteps), why
    prompts = [list(range(3, 3 + count)) for count in (1, 40, 90, 2, 300)]
    for some in (prompts, prompts[2:3]):
        for ids, made in zip(some, steps.generate(some, 90), strict=True):
            assert len(made) == 90
            check(decoder, ids, made)
    assert not steps.recorded and steps._recorder.recordings


def test_what_was_recorded_outlives_another_kernel_of_the_same_decoder(gpu: torch.device) -> None:
    """A second kernel lays weights out anew: what the first one recorded reads the old ones."""
    decoder = decoder_on(gpu, "qwen2", torch.bfloat16)
    steps, _ = steps_for(decoder, 2, 200)
    wanted = steps.generate([[5], [7, 8]], 40)
    kernel = CudaKernel(decoder, positions=200)
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), float("nan"), device=gpu) for _ in range(64)]
    assert steps.generate([[5], [7, 8]], 40) == wanted and len(kernel.generate([5], 40)) == 40 and rubbish


def test_a_persistent_kernel_of_several_rows(gpu: torch.device) -> None:
    decoder = decoder_on(gpu, "qwen3", torch.bfloat16)
    kernel = PersistentKernel.from_model(decoder, 200, rows=3)
    assert "our own kernels" in kernel.explain()
    for ids, made in zip([[5], [6, 7]], kernel.generate([[5], [6, 7]], 50), strict=True):
        check(decoder, ids, made)
