"""Packed weights of the CUDA kernel: what `anytorch.quant` rounds, laid out as its source reads them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from anytorch.errors import InputError, UsageError
from anytorch.quant.tensor import pack, unpack
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent import cuda, cuda_weights
from anytorch.text.persistent.cuda_weights import PackedDecoder, input_nbytes, packed_rows, row_of, unpacked_rows
from anytorch.text.persistent.panels import FORMATS

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("shape", [(5, 40), (3, 32), (7, 12_288), (2, 8200), (1, 264)])
def test_rows_stand_for_what_quant_rounds(
    weights: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_weights, "AT_A_TIME", 2 * shape[1])  # in several pieces
    weight = torch.randn(shape) * 0.02
    rows, scale = packed_rows(weight, weights)
    row = row_of(shape[1], 8 if weights == "int8" else 4)
    assert rows.shape == (shape[0], row.nbytes) and row.part_nbytes <= 4096 and row.part_nbytes % 16 == 0
    assert torch.equal(unpacked_rows(rows, scale, row), unpack(pack(weight, FORMATS[weights])))


def test_what_is_added_to_fill_a_part_is_zero() -> None:
    row = row_of(8200, 4)  # 257 groups in two parts of 129
    assert (row.parts, row.groups) == (2, 129)
    rows, scale = packed_rows(torch.ones(1, 8200), "int4")
    whole = cuda_weights.PackedRow(2 * 129 * 32, 4, 2, 129)
    assert (unpacked_rows(rows, scale, whole)[0, 257 * 32 :] == 0).all()


@pytest.mark.parametrize(
    ("columns", "bits", "parts", "nbytes"),
    [(1024, 4, 1, 576), (4096, 4, 1, 2304), (12_288, 4, 2, 6912), (4096, 8, 2, 4352), (40, 8, 1, 80)],
)
def test_how_rows_lie(columns: int, bits: int, parts: int, nbytes: int) -> None:
    row = row_of(columns, bits)
    assert (row.parts, row.nbytes) == (parts, nbytes)
    assert input_nbytes(columns, bits) == row.parts * row.groups * 40 and input_nbytes(columns, 16) == 2 * columns


def test_the_source_has_the_same_sizes() -> None:
    source = cuda.SOURCE.read_text()
    assert re.search(r"CHUNK = (\d+)", source)[1] == str(cuda_weights.SLOT)  # type: ignore[index]
    assert "GROUP_SIZE = 32;" in source and "INPUT = PARTS * GROUPS * (GROUP_SIZE + 8)" in source


def test_a_decoder_is_packed_phase_by_phase() -> None:
    torch.manual_seed(0)
    decoder = Decoder(read_spec({**SMALL, "tie_word_embeddings": True}, "a config.json")).requires_grad_(False)
    packed = PackedDecoder(decoder, "int8")
    every = {f"{number}.{phase}" for number in (0, 1) for phase in ("qkv", "out", "gate_up", "down")}
    assert set(packed.matrices) == {"head", *every}
    rows, scale = packed.matrices["1.gate_up"]
    mlp: Any = decoder.model.layers[1].mlp
    found = unpacked_rows(rows, scale, row_of(40, 8))
    torch.testing.assert_close(found[0::2], mlp.gate_proj.weight, atol=2e-3, rtol=0)
    torch.testing.assert_close(found[1::2], mlp.up_proj.weight, atol=2e-3, rtol=0)
    assert packed.nbytes == sum(len(rows) * rows.shape[1] for rows, _ in packed.matrices.values())
    words, head = decoder.model.embed_tokens.weight.clone(), decoder.lm_head.weight.clone()
    packed.lend(decoder)
    torch.testing.assert_close(mlp.gate_proj.weight, found[0::2], atol=0, rtol=0)
    assert torch.equal(decoder.model.embed_tokens.weight, words) and not torch.equal(decoder.lm_head.weight, head)
    again = PackedDecoder(decoder, "int8")  # what was rounded once stays, up to the scales' rounding
    torch.testing.assert_close(
        unpacked_rows(*again.matrices["0.qkv"], row_of(40, 8)),
        unpacked_rows(*packed.matrices["0.qkv"], row_of(40, 8)),
        atol=1e-4,
        rtol=1e-3,
    )
    decoder.lm_head.weight.data[0, 0] = torch.inf
    with pytest.raises(InputError, match="not finite"):
        PackedDecoder(decoder, "int8")
    with pytest.raises(UsageError, match="weights='int2' is unknown"):
        PackedDecoder(decoder, "int2")
