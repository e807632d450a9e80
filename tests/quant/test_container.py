"""The file: what was written comes back, and what is damaged or foreign is refused in words."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anytorch.errors import ModelError
from anytorch.quant import Reader, container, pack, quantize, save_tensors, unpack
from anytorch.quant.container import KEY
from anytorch.safetensors_files import read_header

FORMATS = ["int8", "int4", "int4-sym-g32", "int2", "nvfp4", "mxfp4", "nf4"]


def written(path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    weights = {f"block.{number}.weight": torch.randn(5, 100 + number) for number in range(len(FORMATS))}
    packed = {name: pack(weight, format) for (name, weight), format in zip(weights.items(), FORMATS, strict=True)}
    plain = {
        "norm.weight": torch.randn(7),
        "half": torch.randn(3).bfloat16(),
        "ids": torch.arange(3),
        "b": torch.ones(1),
    }
    save_tensors(path, packed, {**plain, "odd": torch.ones(3, dtype=torch.uint8)})
    return path, weights


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path, weights = written(tmp_path / "model.safetensors")
    reader = Reader(path)
    assert reader.plain == ["b", "half", "ids", "norm.weight", "odd"]
    for (name, weight), format in zip(weights.items(), FORMATS, strict=True):
        assert torch.equal(unpack(reader.get_packed(name)), unpack(pack(weight, format)))
    assert reader.get("half").dtype == torch.bfloat16


def test_other_readers_of_safetensors_can_read_it(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "model.safetensors")
    tensors = load_file(path)
    assert tensors["block.1.weight.codes"].dtype == torch.uint8
    assert torch.equal(tensors["ids"], torch.arange(3))


def test_every_tensor_starts_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "model.safetensors")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 8 == 0
    header = json.loads(data[8 : 8 + length])
    size = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "I64": 8}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % size[entry["dtype"]] == 0, name


def test_the_parts_of_a_weight_lie_together(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, {f"{n}.weight": pack(torch.randn(16, 128), "int4") for n in "abc"})
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    offsets = sorted(entry["data_offsets"] for name, entry in header.items() if name.startswith("b.weight"))
    assert offsets[-1][1] - offsets[0][0] == pack(torch.randn(16, 128), "int4").nbytes


def test_a_damaged_weight_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "model.safetensors")
    assert KEY in read_header(path)[1]
    data = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    place = json.loads(data[8:start])["block.2.weight.codes"]["data_offsets"][0]
    data[start + place + 5] ^= 0x10
    path.write_bytes(data)
    reader = Reader(path)
    reader.get_packed("block.1.weight")
    with pytest.raises(ModelError, match=r"block\.2\.weight is damaged"):
        reader.get_packed("block.2.weight")
    assert Reader(path, verify=False).get_packed("block.2.weight").shape == (5, 102)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        Reader(path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "plain.safetensors")
    with pytest.raises(ModelError, match="no weights packed by anytorch"):
        Reader(tmp_path / "plain.safetensors")
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04not a model")
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        Reader(tmp_path / "pickle.safetensors")
    with pytest.raises(ModelError, match="there is no file"):
        Reader(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ('{"version": 99, "weights": {}}', "version 99"),
        ("not json", "cannot be understood"),
        ('{"version": 1}', "cannot be understood"),
        (
            '{"version": 1, "weights": {"w": {"format": "int5", "shape": [2, 2], "dtype": "float32", "crc32": ""}}}',
            "int5",
        ),
        (
            '{"version": 1, "weights": {"w": {"format": "int8", "shape": [2, 2], "dtype": "save", "crc32": ""}}}',
            "dtype",
        ),
        (
            '{"version": 1, "weights": {"w": {"format": "int8", "shape": [2, 2], "dtype": "float32", "crc32": ""}}}',
            "lacks w.codes, w.scale",
        ),
        *[
            (
                '{"version": 1, "weights": {"w": {"format": "int8", "dtype": "float32", "crc32": "", "shape": '
                + f"{shape}}}}}}}",
                "invalid shape|cannot be understood",
            )
            for shape in (
                f"[{'9' * 4000}, 2]",
                f"[{'9' * 9000}, 2]",
                "[-1, 2]",
                "[2.5, 2]",
                '["2", 2]',
                str([1] * 9),
                "[]",
                "[0, 2]",
                "7",
                "null",
            )
        ],
        ('{"version": 1, "weights": ' + "[" * 100_000, "cannot be understood"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, description: str, message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata={KEY: description})
    with pytest.raises(ModelError, match=message):
        Reader(path)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the old file")

    def interrupted(_: torch.Tensor) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "tensor_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_tensors(path, {}, {"x": torch.ones(2)})
    assert path.read_bytes() == b"the old file"
    assert list(tmp_path.iterdir()) == [path]


def test_a_whole_model_is_compared_before_it_is_changed(tmp_path: Path) -> None:
    """What the file says of tensors that are shared, or multiply inputs, is checked as its weights are."""
    model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.LayerNorm(8))
    model[2].weight = model[1].weight
    quantize(model, "int8")
    packed = {"0.weight": model[0].packed}
    plain = {
        name: value for name, value in model.state_dict().items() if name in ("0.bias", "1.weight", "1.bias", "2.bias")
    }

    def fresh() -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.LayerNorm(8))
        made[1].weight = nn.Parameter(torch.full((8,), 3.0))
        return made

    path = tmp_path / "model.safetensors"
    save_tensors(path, packed, plain, {"shared": {"2.weight": "1.weight"}})
    loaded = container.load(fresh(), path)
    assert loaded[2].weight is loaded[1].weight and torch.equal(loaded[1].weight, torch.ones(8))
    wrong: list[object] = [
        5, None, "x", [1], {"2.weight": 3}, {"2.weight": "none"}, {"2.weight": "0.weight"},
        {"2.weight": "1.weight", "a.b": "1.weight"},
        {"2.weight": "1.weight", "0.weight": "1.weight"}, {"2.weight": "1.weight", "1.bias": "1.weight"},
    ]  # fmt: skip
    for shared in wrong:
        save_tensors(path, packed, plain, {"shared": shared})
        given = fresh()
        with pytest.raises(ModelError, match=r"share|lacks 2\.weight"):
            container.load(given, path)
        assert isinstance(given[0], nn.Linear) and torch.equal(given[1].weight, torch.full((8,), 3.0)), shared
    save_tensors(path, packed, {**plain, "0.input_scale": torch.ones(3)}, {"shared": {"2.weight": "1.weight"}})
    with pytest.raises(ModelError, match=r"0\.input_scale is \(3,\); 0\.weight has 64 inputs"):
        container.load(fresh(), path)
