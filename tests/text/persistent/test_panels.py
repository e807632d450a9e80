"""Packed weights of the CPU's decoder: what they stand for, and products and tokens beside a decoder that has exactly that.

The reference has the weights that the panels stand for, in torch, and rounds its inputs as `code/panels.h` does. Without
that rounding an input is off by at most 1/254 of the largest of its group, which bounds every product (`_bound`).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytorch import native
from anytorch.errors import InputError, UsageError
from anytorch.quant import pack, unpack
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.host import HostKernel
from anytorch.text.persistent.host_code import panel_product
from anytorch.text.persistent.panels import FORMATS, PanelMemory, Panels, rounded, unpacked

SHAPES = [(16, 32), (40, 96), (5, 37), (33, 1000), (1, 1)]
SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 36,  # no multiple of a group, nor are the others of a panel
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 200,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama with biases": {"model_type": "llama", "head_dim": 10, "attention_bias": True, "mlp_bias": True},
    "qwen2 with a tied head": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 18},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


def _packed(weight: Tensor, weights: str) -> Panels:
    return PanelMemory([tuple(weight.shape)], weights).add(weight)


def _groups(x: Tensor) -> Tensor:
    """[…, columns] as […, groups, 32], the last one filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))


def _tops(x: Tensor) -> Tensor:
    return _groups(x).abs().amax(-1)


def _bound(x: Tensor, weight: Tensor) -> Tensor:
    """How far a product with rounded inputs may be from the one with the inputs as they are: [texts, rows]."""
    return (_tops(x) / 254) @ _groups(weight.abs()).sum(-1).T


def _decoder(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(read_spec({**SMALL, **FAMILIES[name]}, "a config.json")).eval()
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.3)
    return decoder.requires_grad_(False).to(dtype)


def _reference(decoder: Decoder, weights: str, rounding: bool = True) -> Decoder:
    """In float32, with the weights that the kernel's panels stand for. Words that the head shares stay as they are."""
    made = copy.deepcopy(decoder).float()
    for layer in made.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(unpacked(_packed(layer.weight, weights)), requires_grad=False)
            if rounding:
                layer.register_forward_pre_hook(lambda _layer, given: (rounded(given[0]),))
    return made


def _kernel(decoder: Decoder, weights: Any, reference: Decoder, **options: Any) -> HostKernel:
    kernel = HostKernel(decoder, weights=weights, **options)
    kernel.decoder = reference  # reads the prompts
    return kernel


# --- panels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", FORMATS)
def test_panels_stand_for_what_quant_rounds(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[tuple[int, int]] = []
    monkeypatch.setattr("anytorch.large_pages.ask", lambda address, nbytes: pages.append((address, nbytes)))
    made = [torch.randn(shape) * 0.02 for shape in SHAPES]
    memory = PanelMemory(SHAPES, weights)
    for weight, packed in [(weight, memory.add(weight)) for weight in made]:
        assert torch.equal(unpacked(packed), unpack(pack(weight, FORMATS[weights])))
        assert packed.codes.data_ptr() % 64 == 0 and packed.scales.data_ptr() % 64 == 0
        (begin, nbytes) = pages[0]
        assert begin <= packed.codes.data_ptr() < packed.scales.data_ptr() + packed.scales.nbytes <= begin + nbytes
    assert pages[0][0] % (2 << 20) == 0 and pages[0][1] == memory.nbytes


def test_large_matrices_are_arranged_some_panels_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytorch.text.persistent.panels.CHUNK", 3 * 16 * 64)
    weight = torch.randn(130, 50)
    assert torch.equal(unpacked(_packed(weight, "int4")), unpack(pack(weight, FORMATS["int4"])))


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="1 of 64 weights are not finite"):
        _packed(torch.tensor([torch.inf, *[0.0] * 63]).view(2, 32), "int8")


def test_rounded_inputs_are_near_their_own() -> None:
    x = torch.randn(3, 100) * 5
    assert (
        (rounded(x) - x).abs() <= torch.cat([one.repeat(1, 32) for one in _tops(x).split(1, 1)], 1)[:, :100] / 253.9
    ).all()
    assert len(rounded(torch.randn(1, 32)).unique()) > 20
    assert (rounded(torch.zeros(1, 5)) == 0).all()


# --- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", native.supported())
@pytest.mark.parametrize("weights", FORMATS)
def test_products_are_right_at_every_simd_level(weights: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_SIMD", level)
    torch.manual_seed(4)
    for rows, columns in SHAPES:
        weight, x, bias = torch.randn(rows, columns), torch.randn(7, columns) * 3, torch.randn(rows)
        x[1] = x[1].sign() * 3  # all of the largest, by weights of which some are: nothing may overflow
        weight[: rows // 2] = weight[: rows // 2].sign()
        packed = _packed(weight, weights)
        values = unpacked(packed)
        found = panel_product(x, packed, bias)
        size = x.abs() @ values.abs().T + bias.abs()
        exact = rounded(x).double() @ values.double().T + bias
        assert ((found - exact).abs() <= 2e-6 * size).all(), (rows, columns)
        plain = x.double() @ values.double().T + bias
        assert ((found - plain).abs() <= _bound(x, values) + 2e-6 * size).all(), (rows, columns)


@pytest.mark.parametrize("weights", FORMATS)
def test_a_product_has_the_same_bits_in_every_batch(weights: str) -> None:
    packed, x = _packed(torch.randn(40, 100), weights), torch.randn(6, 100)
    alone = torch.cat([panel_product(one[None], packed) for one in x])
    assert torch.equal(panel_product(x, packed), alone)


@pytest.mark.parametrize("weights", FORMATS)
def test_inputs_without_a_whole_number(weights: str) -> None:
    """Not-a-number and infinity spoil the outputs of their row alone; what is too small to divide by counts as nothing."""
    packed, x = _packed(torch.randn(20, 64), weights), torch.randn(5, 64)
    whole = panel_product(x, packed)
    x[1, 40], x[2, 3], x[3], x[4, :32] = torch.nan, -torch.inf, 0.0, 1e-44
    found = panel_product(x, packed)
    assert torch.equal(found[0], whole[0])
    assert found[1:3].isnan().all()
    assert (found[3] == 0).all()
    x[4, :32] = 0.0
    assert torch.equal(found[4], panel_product(x, packed)[4])


# --- decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", native.supported())
@pytest.mark.parametrize("weights", FORMATS)
def test_logits_are_those_of_the_unpacked_weights(weights: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both round inputs, an input may still go to the next whole number on one side: a 127th of a group's largest."""
    monkeypatch.setenv("ANYTORCH_SIMD", level)
    ids = [5, 6, 7, 8, 9, 10, 11]
    for name in FAMILIES:
        decoder = _decoder(name)
        reference, plain = _reference(decoder, weights), _reference(decoder, weights, rounding=False)
        kernel = _kernel(decoder, weights, reference, positions=40, threads=2)
        kernel.read(0, ids[:2])
        for place in range(2, 7):
            kernel.follow(0, ids[place])
            found = kernel.step()[0]
            truth, other = reference([ids[: place + 1]])[0, -1], plain([ids[: place + 1]])[0, -1]
            assert (found - truth).norm() <= 5e-3 * truth.norm(), (name, place)
            assert (found - other).norm() <= 0.05 * other.norm(), (name, place)
            assert (found - decoder([ids[: place + 1]])[0, -1]).norm() > 1e-4 * truth.norm(), "the weights are packed"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_references(name: str, weights: str, threads: int) -> None:
    """Several rows at once. A token may differ only where the reference's own two best are as close as rounding is."""
    decoder = _decoder(name)
    reference = _reference(decoder, weights)
    prompts = [[3, 1, 4, 1, 5], [9, 2], list(range(40)), [7], [8, 8, 8], [60]]
    kernel = _kernel(decoder, weights, reference, rows=6, positions=90, threads=threads)
    made = kernel.generate(prompts, 20)
    equal = 0
    for prompt, tokens in zip(prompts, made, strict=True):
        assert len(tokens) == 20
        logits = reference([prompt + tokens])[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(1) - chosen <= 5e-3 * logits.norm(dim=1)).all()
        equal += int((logits.argmax(1) == torch.tensor(tokens)).sum())
    assert equal >= 115, "of 120"
    alone = _kernel(decoder, weights, reference, positions=90, threads=threads)
    assert [alone.generate([prompt], 20)[0] for prompt in prompts] == made, "a row's tokens do not depend on the others"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_words_keys_and_values_keep_the_decoders_dtype(dtype: torch.dtype) -> None:
    decoder = _decoder("qwen2 with a tied head", dtype)
    kernel = HostKernel(decoder, positions=20, threads=2, weights="int8")
    reference = _reference(decoder, "int8")
    kernel.read(0, [5])
    for place in range(1, 4):
        kernel.follow(0, 5 + place)
        truth = reference([list(range(5, 6 + place))])[0, -1]
        assert (kernel.step()[0] - truth).norm() <= 0.05 * truth.norm()
    assert kernel.kept.keys.dtype == dtype


def test_numbers_that_are_none_are_an_error() -> None:
    decoder = _decoder("qwen3")
    decoder.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ArithmeticError, match="NaN"):
        HostKernel(decoder, positions=20, threads=2, weights="int4").generate([[1]], 5)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UsageError, match=r"weights='int2' is unknown; use 'int8', 'int4' or None"):
        HostKernel(_decoder("qwen3"), weights="int2")  # type: ignore[arg-type]
