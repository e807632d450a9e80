"""Reading safetensors: what safetensors itself wrote, and files that are damaged in every way we could think of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anytorch.errors import ModelError
from anytorch.text.checkpoints.checkpoint import Checkpoint

safetensors_numpy = pytest.importorskip("safetensors.numpy")


def write(path: Path, **tensors: np.ndarray) -> Path:
    safetensors_numpy.save_file(tensors, path)
    return path


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2], np.float16),
        "c": np.array(7, np.int64),
        "d": np.zeros((0, 4), np.float32),
    }
    write(tmp_path / "model.safetensors", **tensors)
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(tensors)
        for name, expected in tensors.items():
            found = checkpoint.tensor(name)
            assert found.dtype == expected.dtype and checkpoint.shape(name) == expected.shape
            assert np.array_equal(found, expected)
        assert checkpoint.dtype("b") == "F16" and "a" in checkpoint and "z" not in checkpoint
        assert checkpoint.nbytes() == sum(t.nbytes for t in tensors.values())
        kept = checkpoint.tensor("a")
    assert kept[1, 2] == 5.0  # after the checkpoint was closed
    with pytest.raises(ValueError, match="read-only"):
        kept[0, 0] = 1


def test_bfloat16_comes_as_float32_exactly(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = torch.randn(50).to(torch.bfloat16)
    save_file({"x": values}, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path).tensor("x")
    assert found.dtype == np.float32 and np.array_equal(found, values.float().numpy())
    assert Checkpoint(tmp_path).raw("x").nbytes == 100


def test_shards(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", a=np.ones(2, np.float32))
    write(tmp_path / "model-2.safetensors", b=np.zeros(3, np.float32))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("a").sum() == 2 and checkpoint.shape("b") == (3,)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: this shard is missing"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(ModelError, match="another folder"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match=r"index\.json: cannot be read"):
        Checkpoint(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(
        tmp_path / "whole.safetensors", a=np.arange(40, dtype=np.float32), b=np.ones(3, np.float32)
    ).read_bytes()
    cut = tmp_path / "model.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError) as caught:
            Checkpoint(tmp_path)
        assert str(cut) in str(caught.value) and caught.value.hint
    cut.write_bytes(whole)
    assert Checkpoint(tmp_path).tensor("b").sum() == 3


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},  # 12 bytes, not 8
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": None},
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}',
    ],
)
def test_a_damaged_header_is_refused(header: object, tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + bytes(100))
    with pytest.raises(ModelError, match="cut off in its header"):
        Checkpoint(tmp_path)


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelError) as caught:
        Checkpoint(tmp_path)
    assert "pytorch_model.bin" in caught.value.message and "pickle" in caught.value.message
    assert "safetensors" in caught.value.hint


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found no weights"):
        Checkpoint(tmp_path)


def test_an_unknown_tensor_and_an_unknown_dtype(tmp_path: Path) -> None:
    raw_file(
        tmp_path / "model.safetensors", {"weight": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"ab"
    )
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"no tensor 'weigth'\nhint: it has 'weight'"):
        checkpoint.tensor("weigth")
    with pytest.raises(ModelError, match="F8_E4M3"):
        checkpoint.tensor("weight")
    assert bytes(checkpoint.raw("weight")) == b"ab"
