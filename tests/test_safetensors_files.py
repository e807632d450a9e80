"""The one reader of safetensors headers: which files it follows an index to, and which headers it lets pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anytorch.errors import ModelError
from anytorch.safetensors_files import (
    DTYPES,
    INDEX,
    check_layers,
    checkpoint_files,
    file_in,
    header_bytes,
    locate_tensors,
    read_header,
    stored_tensor,
)


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def whole(path: Path) -> Path:
    return raw_file(path, {"a": entry(0, 4)}, b"abcd")


def index_of(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    return folder


# --- which files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "inner/../../outside.safetensors",
        "inner/part.safetensors",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        "{outside}",
        "..",
        ".",
        "",
    ],
)
def test_an_index_cannot_name_a_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    outside = whole(tmp_path / "outside.safetensors")
    folder = index_of(tmp_path / "model", name.format(outside=outside))
    (folder / "inner").mkdir()
    whole(folder / "inner" / "part.safetensors")
    with pytest.raises(ModelError, match="names a file in another folder") as caught:
        locate_tensors(folder)
    assert INDEX in caught.value.message


def test_a_training_checkpoint_cannot_either(tmp_path: Path) -> None:
    whole(tmp_path / "outside.safetensors")
    (tmp_path / "optimizer").mkdir()
    with pytest.raises(ModelError, match=r"training\.json: names a file in another folder"):
        file_in(tmp_path / "optimizer", "../outside.safetensors", tmp_path / "training.json")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    whole(blobs / "feed")
    index_of(snapshot, "model-1.safetensors")
    (snapshot / INDEX).rename(blobs / "beef")
    (snapshot / INDEX).symlink_to("../../blobs/beef")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/feed")
    assert list(locate_tensors(snapshot)) == ["a"]
    (snapshot / "model.safetensors").symlink_to("../../blobs/feed")
    assert checkpoint_files(snapshot) == [snapshot / "model.safetensors"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_counts_as_missing(tmp_path: Path) -> None:
    index_of(tmp_path, "pipe.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for ever
    with pytest.raises(ModelError, match=r"pipe\.safetensors: this shard is missing"):
        locate_tensors(tmp_path)


def test_the_file_the_index_or_all_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        whole(tmp_path / f"{name}.safetensors")
    assert [file.stem for file in checkpoint_files(tmp_path)] == ["one", "two"]
    (tmp_path / "diffusion.safetensors.index.json").write_text('{"weight_map": {"a": "two.safetensors"}}')
    assert [file.stem for file in checkpoint_files(tmp_path)] == ["two"]
    index_of(tmp_path, "one.safetensors")
    assert [file.stem for file in checkpoint_files(tmp_path)] == ["one"]
    whole(tmp_path / "model.safetensors")
    assert [file.stem for file in checkpoint_files(tmp_path)] == ["model"]
    assert checkpoint_files(tmp_path / "two.safetensors") == [tmp_path / "two.safetensors"]


# --- which headers -----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    layout = [("a", "F32", (2, 3), 24), ("empty", "F32", (0, 4), 0), ("b", "BF16", (), 2), ("c", "F4", (3, 2), 3)]
    path.write_bytes(header_bytes(layout, {"format": "pt"}, align=4096) + bytes(29))
    tensors, metadata = read_header(path)
    assert metadata == {"format": "pt"}
    assert [(t.name, t.code, t.shape, t.nbytes) for t in tensors.values()] == layout
    assert [t.offset - 4096 for t in tensors.values()] == [0, 24, 24, 26]
    assert (tensors["b"].dtype, tensors["b"].itemsize, tensors["c"].itemsize) == ("bfloat16", 2, 1)


REFUSED: dict[str, tuple[object, bytes, str]] = {
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "'b' overlaps the one before"),
    "the same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4), "overlaps the one before"),
    "gap": ({"a": entry(0, 4), "b": entry(6, 8)}, bytes(8), "'b' leaves a gap to the one before: .* not at"),
    "gap at the start": ({"a": entry(2, 4)}, bytes(4), "leaves a gap"),
    "rest": ({"a": entry(0, 4)}, bytes(9), "last 5 bytes belong to no tensor"),
    "cut": ({"a": entry(0, 4)}, bytes(3), "cut off: tensor 'a' ends at byte"),
    "backwards": ({"a": entry(4, 0, shape=[4])}, bytes(4), "invalid offset"),
    "negative": ({"a": entry(-4, 0, shape=[4])}, bytes(4), "invalid offset"),
    "a number too large": ({"a": entry(0, 2**63)}, bytes(4), "invalid offset"),
    "a number of 4,000 digits": ({"a": entry(0, 4, shape=[10**4000])}, bytes(4), "invalid offset or shape: not sizes"),
    "an offset of 4,000 digits": ({"a": entry(0, 10**4000)}, bytes(4), "invalid offset or shape: not sizes"),
    "many dimensions": ({"a": entry(0, 4, shape=[1] * 9 + [4])}, bytes(4), "invalid offset or shape"),
    "a million dimensions": ({"a": entry(0, 4, shape=[1] * 10**6 + [4])}, bytes(4), "invalid offset or shape"),
    "nested deeply": (b'{"a": ' + b"[" * 200_000, b"", "not JSON"),
    "a fraction": ({"a": {**entry(0, 4), "data_offsets": [0, 4.0]}}, bytes(4), "invalid offset"),
    "too few bytes": (
        {"a": entry(0, 4, "F32", [2])},
        bytes(4),
        "'a' has 4 bytes, which does not match its dtype F32",
    ),
    "half a byte": ({"a": entry(0, 2, "F4", [3])}, bytes(2), "which does not match its dtype F4"),
    "unknown dtype": ({"a": entry(0, 4, "F99")}, bytes(4), "unknown dtype 'F99'"),
    "a dtype that is none": ({"a": entry(0, 4, [])}, bytes(4), "unknown dtype"),  # type: ignore[arg-type]
    "a name twice": (b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4), "occurs twice"),
    "metadata": ({"__metadata__": {"x": 1}, "a": entry(0, 4)}, bytes(4), "metadata"),
    "checksums": ({"__metadata__": {"anytorch.crc32": "x" * 8}, "a": entry(0, 4)}, bytes(4), "not hexadecimal"),
    "another encoding": ("{}".encode("utf-16"), b"", "not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    header, data, why = REFUSED[case]
    path = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ModelError, match=f"not a whole safetensors file: .*{why}") as caught:
        read_header(path)
    assert str(path) in caught.value.message and caught.value.hint


def test_a_shape_cannot_make_us_multiply_without_end(tmp_path: Path) -> None:
    """2**62 to the power of 200,000 has twelve million bits: minutes of multiplying, if somebody did it."""
    path = raw_file(tmp_path / "x.safetensors", {"a": entry(0, 4, "U8", [2**62] * 200_000)}, bytes(4))
    with pytest.raises(ModelError, match="invalid offset or shape"):
        read_header(path)
    raw_file(path, {"a": entry(0, 4, "U8", [2**62] * 8)}, bytes(4))
    with pytest.raises(ModelError, match="does not match its dtype"):
        read_header(path)


@pytest.mark.parametrize("shape", [[0, 2**63 - 1, 2], [2**32, 2**32, 0], [0, 2**62]])
def test_an_empty_tensor_has_strides_that_can_be_counted(shape: list[int], tmp_path: Path) -> None:
    """torch and NumPy count the bytes between its elements, though there are none."""
    path = raw_file(tmp_path / "x.safetensors", {"a": entry(0, 0, "F32", shape)})
    with pytest.raises(ModelError, match="is empty and has an invalid shape"):
        read_header(path)
    fine = read_header(raw_file(path, {"a": entry(0, 0, "F32", [0, 2**40])}))[0]
    assert fine["a"].shape == (0, 2**40)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this shard is missing"):
        checkpoint_files(index_of(tmp_path, "a" * 5000))


def test_layers_are_bounded_by_the_tensors() -> None:
    check_layers({"num_hidden_layers": 3, "n_layer": None}, 3, "config.json")
    for layers in (4, 10**9, -1, True, 1.0, "3", [], 10**4000):
        with pytest.raises(ModelError, match=r"config\.json: n_layers is .*and the checkpoint has 3 tensors"):
            check_layers({"n_layers": layers}, 3, "config.json")


@pytest.mark.parametrize("small", [True, False])
def test_a_file_that_was_cut_short_since_is_an_error(
    small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from anytorch import safetensors_files

    monkeypatch.setattr(safetensors_files, "SMALL_NBYTES", 2**20 if small else 16)
    path = raw_file(tmp_path / "x.safetensors", {"a": entry(0, 20_000)}, bytes(range(250)) * 80)
    stored = locate_tensors(path)["a"]
    kept = stored_tensor(stored)
    os.truncate(path, 9_000)
    with pytest.raises(ModelError, match="cut short"):
        stored_tensor(stored)
    if small:  # what was read stays; what is mapped would end this process now
        assert torch.equal(kept, torch.tensor(list(range(250)) * 80, dtype=torch.uint8))
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        stored_tensor(stored)


def test_the_library_refuses_the_same_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    # Our own metadata mean nothing to it, of two entries it takes one, and dimensions of 1 may be many.
    ours = {"checksums", "a name twice", "many dimensions", "a million dimensions"}
    for case, (header, data, _) in REFUSED.items():
        if case not in ours:
            path = raw_file(tmp_path / "x.safetensors", header, data)
            with pytest.raises(safetensors.SafetensorError):
                safetensors.safe_open(path, framework="np")


def test_the_sizes_are_torchs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, bits in DTYPES.values():
        if hasattr(torch, name):
            assert 8 * getattr(torch, name).itemsize == bits
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.randn(5).bfloat16(), "c": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    for name, stored in locate_tensors(tmp_path / "x.safetensors").items():
        assert torch.equal(stored_tensor(stored), tensors[name])


def test_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, anytorch.safetensors_files; sys.exit(bool({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
