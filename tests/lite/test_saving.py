"""safetensors files: readable by the reference implementation and from it, and safe against files that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from anytorch import lite
from anytorch.errors import ModelError

TYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]


def test_the_reference_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    arrays = {t: (np.arange(6).reshape(2, 3) % 2).astype(t) for t in TYPES}
    arrays |= {"strided": np.arange(12.0).reshape(3, 4).T, "empty": np.zeros((0, 3)), "one": np.array(2.5)}
    lite.save(arrays, tmp_path / "ours.safetensors")
    theirs = load_file(tmp_path / "ours.safetensors")
    save_file({n: np.ascontiguousarray(a).reshape(a.shape) for n, a in arrays.items()}, tmp_path / "theirs.safetensors")
    ours = lite.load(tmp_path / "theirs.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(ours[name].numpy(), array)
        assert ours[name].dtype == array.dtype


def test_bfloat16(tmp_path: Path) -> None:
    x = torch.randn(3, 4).bfloat16()
    save_torch({"x": x}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    assert lite.load(tmp_path / "b.safetensors")["x"].tolist() == x.float().tolist()


def test_a_module_and_back(tmp_path: Path) -> None:
    first, second = (lite.Sequential(lite.CustomConv2d(1, 2, 3), lite.BatchNorm2d(2)) for _ in range(2))
    lite.save(first, tmp_path / "m.safetensors")
    second.load_state_dict(lite.load(tmp_path / "m.safetensors"))
    assert second[0].weight.tolist() == first[0].weight.tolist()
    loaded = lite.load(tmp_path / "m.safetensors")["0.weight"]
    loaded += 1  # memory of its own, which may be written to


def entry(**changes: Any) -> bytes:
    text = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


LIES = {
    "empty file": b"",
    "huge header": (1 << 60).to_bytes(8, "little") + b"{}",
    "not JSON": (4).to_bytes(8, "little") + b"oops",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "unknown type": entry(dtype="F99"),
    "past the end": entry(shape=[200], data_offsets=[0, 800]),
    "wrong length": entry(shape=[3]),
    "negative": entry(data_offsets=[-8, 0]),
    "negative shape": entry(shape=[-1, -2]),
    "overflowing shape": entry(shape=[1 << 40, 1 << 40]),
    "text for a number": entry(shape=["2"]),
    "no offsets": entry(data_offsets=None),
}


@pytest.mark.parametrize("name", LIES)
def test_lies(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(LIES[name])
    with pytest.raises(ModelError):
        lite.load(tmp_path / "x")


@given(st.binary(max_size=60), st.integers(0, 80))
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_give_tensors_or_our_error(tmp_path: Path, junk: bytes, at: int) -> None:
    good = entry()
    (tmp_path / "x").write_bytes(good[:at] + junk + good[at + len(junk) :])
    try:
        found = lite.load(tmp_path / "x")
    except ModelError as exc:
        assert str(tmp_path / "x") in str(exc)
    else:
        assert all(isinstance(tensor, lite.CustomTensor) for tensor in found.values())


@pytest.mark.parametrize("shape", [[True], [0] * 100, [0, 2**70]], ids=["bool", "many", "large"])
def test_shapes_that_numpy_does_not_have(shape: list[int], tmp_path: Path) -> None:
    size = 4 if shape == [True] else 0
    text = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ModelError, match="'x'"):
        lite.load(path)
    deep = b"[" * 200_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ModelError, match="not JSON"):
        lite.load(path)


@pytest.mark.parametrize(
    "state", [{"x": np.ones(2, np.complex128)}, {"__metadata__": np.ones(2)}, {"x": np.array(["a"])}]
)
def test_what_the_format_does_not_have_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot hold"):
        lite.save(state, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
