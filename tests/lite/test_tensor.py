"""CustomTensor as documented, and its way in and out."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from anytorch import lite
from anytorch.errors import AnytorchError, UsageError
from anytorch.lite.dtypes import check_numpy


def test_as_documented() -> None:
    device = lite.CustomDevice("custom_gpu")
    x = lite.CustomTensor([1, 2, 3, 4], device=device)
    assert (device.device_type, device.index, str(device)) == ("custom_gpu", 0, "custom_gpu:0")
    assert isinstance(x.data, np.ndarray)
    assert (x.dtype, x.shape, x.device) == (np.float32, (4,), device)
    assert lite.CustomTensor(np.random.randn(3, 4)).dtype == np.float32
    assert lite.CustomTensor([1], dtype=np.int64).dtype == np.int64
    assert (x + x).device == device
    assert (x @ x).item() == 30.0


def test_names_of_the_hosts_memory_mix() -> None:
    a, b = lite.CustomTensor([1], device="here"), lite.CustomTensor([2], device="there:1")
    assert (a + b).device == lite.CustomDevice("here")
    moved = a.to("elsewhere")
    moved.data[0] = 5
    assert a.item() == 5, "no copy between names"


@pytest.mark.parametrize("name", ["", ":0", "a:b"])
def test_bad_device_names(name: str) -> None:
    with pytest.raises(UsageError, match="device name"):
        lite.CustomDevice(name)


def test_tensor_keeps_types() -> None:
    for data in ([1, 2], [1.5], [True], np.float64(2), np.array([1], "int32"), np.zeros(2, "float16"), 3, 2.5):
        assert str(lite.tensor(data).dtype) == str(torch.tensor(data).dtype)[6:]


def test_copies_and_shared_memory() -> None:
    host = np.zeros(3, "float32")
    copied, shared = lite.CustomTensor(host), lite.from_numpy(host)
    host[0] = 1
    assert copied[0].item() == 0
    assert shared[0].item() == 1
    assert shared.numpy() is host
    view = shared[1:]
    view += 4
    assert host.tolist() == [1, 4, 4]
    shared[0].fill_(7)
    assert host.tolist() == [7, 4, 4], "one number is a view too"


def test_numpy_and_dlpack_both_ways() -> None:
    x = lite.CustomTensor([[1, 2], [3, 4]])
    assert np.asarray(x) is x.data
    assert np.array(x, dtype="float64").dtype == "float64"
    theirs = torch.from_dlpack(x)
    theirs[0, 0] = 9
    assert x[0, 0].item() == 9
    back = lite.from_dlpack(torch.arange(3))
    assert back.tolist() == [0, 1, 2]
    assert back.dtype == np.int64


def test_arrays_beside_tensors() -> None:
    x = lite.CustomTensor([1, 2])
    host = np.array([10, 20], "float32")
    for both in (x + host, host + x):
        assert isinstance(both, lite.CustomTensor)
        assert both.tolist() == [11, 22]
    assert (np.float32(2) * x).tolist() == [2, 4]


def test_conversions() -> None:
    x = lite.CustomTensor([2.5])
    assert (float(x), int(x), bool(x), len(x)) == (2.5, 2, True, 1)
    assert [1, 2, 3][lite.tensor(1)] == 2
    assert [t.item() for t in lite.arange(3)] == [0, 1, 2]
    assert repr(lite.CustomTensor([1, 2])) == "CustomTensor([1., 2.], device='custom:0')"
    assert "grad_fn=<AddBackward>" in repr(lite.CustomTensor([1], requires_grad=True) + 1)
    with pytest.raises(UsageError, match="ambiguous"):
        bool(lite.zeros(2))
    with pytest.raises(UsageError, match="not one"):
        lite.zeros(2).item()
    with pytest.raises(TypeError):
        len(lite.tensor(1))
    with pytest.raises(TypeError):
        [1, 2][lite.tensor(1.0)]


def test_errors_name_the_shapes() -> None:
    with pytest.raises(UsageError, match=r"\(2, 3\).*\(2, 3\)"):
        lite.zeros(2, 3) @ lite.zeros(2, 3)
    with pytest.raises(UsageError, match="float32 and float64"):
        lite.zeros(2, 2) @ lite.zeros(2, 2, dtype="float64")
    with pytest.raises(UsageError, match="invalid for"):
        lite.zeros(6).reshape(4)
    with pytest.raises(IndexError, match=r"shape \(2,\)"):
        lite.zeros(2)[5]
    with pytest.raises(UsageError, match="an empty"):
        lite.zeros(0).amax()
    with pytest.raises(UsageError, match="dimension 3"):
        lite.zeros(2).sum(3)
    with pytest.raises(UsageError, match="holds numbers"):
        lite.CustomTensor(["a"], dtype=object)
    with pytest.raises(UsageError, match="neither a tensor nor a number"):
        lite.zeros(2) + "a"
    with pytest.raises(UsageError, match="cannot be written"):
        lite.tensor([1]).add_(0.5)
    with pytest.raises(UsageError, match="change the shape"):
        lite.zeros(1).add_(lite.zeros(3))


def test_in_place_methods() -> None:
    x = lite.zeros(3)
    x.fill_(2).mul_(3)
    assert x.tolist() == [6, 6, 6]
    x.copy_(lite.CustomTensor([1]))
    assert x.tolist() == [1, 1, 1]
    x[x > 0] = 4
    x[0] = lite.tensor(9)
    assert x.tolist() == [9, 4, 4]


def test_it_can_be_pickled_and_copied() -> None:
    x = lite.CustomTensor([1, 2], requires_grad=True)
    for twin in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert twin.tolist() == [1, 2]
        assert twin.requires_grad
        assert twin.data is not x.data


def test_an_old_numpy_is_refused() -> None:
    check_numpy("2.0.0")
    with pytest.raises(AnytorchError, match=r"NumPy 1\.26\.4"):
        check_numpy("1.26.4")


def test_random_numbers_are_repeatable() -> None:
    lite.seed(3)
    first = lite.randn(4).tolist(), lite.rand(4).tolist()
    lite.seed(3)
    assert (lite.randn(4).tolist(), lite.rand(4).tolist()) == first
    assert all(0 <= v < 1 for v in first[1])


def test_every_public_name_loads() -> None:
    import ast
    from pathlib import Path

    for name in lite.__all__:
        assert getattr(lite, name) is not None
    tree = ast.parse(Path(lite.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anytorch.lite")
        for alias in node.names
    }
    assert typed == set(lite.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lite.nothing  # noqa: B018
