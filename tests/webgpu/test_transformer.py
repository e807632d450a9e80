"""torch's own transformer modules in inference, where they call ops for a whole layer, against the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.native
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
LATER = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


def both(module: torch.nn.Module, *tensors: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    ours = copy.deepcopy(module).eval().to("webgpu")
    moved = {n: v.to("webgpu") if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    copies = {id(tensor): tensor.to("webgpu") for tensor in tensors}  # what is one tensor stays one
    with torch.no_grad():
        return ours(*[copies[id(tensor)] for tensor in tensors], **moved), module.eval()(*tensors, **options)


def make(kind: Any, *sizes: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(*sizes, batch_first=True, **options)


@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDED}, {"src_mask": LATER}])
@pytest.mark.parametrize("kind", [{"norm_first": True, "activation": "gelu"}, {"norm_first": False}])
def test_encoder_layer(webgpu: Any, kind: dict[str, Any], masks: dict[str, Any]) -> None:
    layer = make(torch.nn.TransformerEncoderLayer, 16, 4, 32, **kind)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # norms and biases with an effect
    found, expected = both(layer, torch.randn(2, 5, 16), **masks)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_encoder_with_padding(webgpu: Any) -> None:
    """The CPU makes a nested tensor and leaves zeros where the padding was; we compute on."""
    layer = make(torch.nn.TransformerEncoderLayer, 16, 4, 32)
    ours = copy.deepcopy(torch.nn.TransformerEncoder(layer, 2)).eval().to("webgpu")
    reference = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    reference.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        found = ours(x.to("webgpu"), src_key_padding_mask=PADDED.to("webgpu"))
        expected = reference(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(found.cpu()[~PADDED], expected[~PADDED], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("masks", [{}, {"key_padding_mask": PADDED}, {"attn_mask": LATER}])
def test_attention_and_its_weights(webgpu: Any, masks: dict[str, Any], average: bool) -> None:
    module = make(torch.nn.MultiheadAttention, 16, 4)
    x = torch.randn(2, 5, 16)
    (out, weights), (expected, wanted) = both(module, x, x, x, average_attn_weights=average, **masks)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-4, atol=1e-5)
    (out, weights), (expected, _) = both(module, x, x, x, need_weights=False, **masks)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert weights is None


def test_attention_of_three_tensors(webgpu: Any) -> None:
    module = make(torch.nn.MultiheadAttention, 16, 4)
    q, k, v = torch.randn(2, 5, 16), torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    for need_weights in (True, False):
        found, expected = both(module, q, k, v, need_weights=need_weights)
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16), (0, 0, 16)])
def test_nothing_is_attended_to(webgpu: Any, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for module, inputs in (
        (make(torch.nn.TransformerEncoderLayer, 16, 4, 32), (x,)),
        (make(torch.nn.MultiheadAttention, 16, 4), (x, x, x)),
    ):
        found, expected = both(module, *inputs)
        found, expected = (made[0] if isinstance(made, tuple) else made for made in (found, expected))
        assert found.shape == expected.shape
