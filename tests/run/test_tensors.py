"""Tensors that a program makes on "cuda", moves there and asks where they are."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest

MAKERS = {
    "zeros": lambda torch, **k: torch.zeros(3, **k),
    "ones": lambda torch, **k: torch.ones(3, **k),
    "full": lambda torch, **k: torch.full((3,), 2.0, **k),
    "empty": lambda torch, **k: torch.empty(3, **k),
    "rand": lambda torch, **k: torch.rand(3, **k),
    "randn": lambda torch, **k: torch.randn(3, **k),
    "randint": lambda torch, **k: torch.randint(9, (3,), **k),
    "randperm": lambda torch, **k: torch.randperm(3, **k),
    "arange": lambda torch, **k: torch.arange(3, **k),
    "linspace": lambda torch, **k: torch.linspace(0, 1, 3, **k),
    "eye": lambda torch, **k: torch.eye(3, **k),
    "tensor": lambda torch, **k: torch.tensor([1.0, 2.0], **k),
    "as_tensor": lambda torch, **k: torch.as_tensor([1.0, 2.0], **k),
    "asarray": lambda torch, **k: torch.asarray([1.0, 2.0], **k),
    "tril_indices": lambda torch, **k: torch.tril_indices(2, 2, **k),
    "hann_window": lambda torch, **k: torch.hann_window(4, **k),
    "fftfreq": lambda torch, **k: torch.fft.fftfreq(4, **k),
    "zeros_like": lambda torch, **k: torch.zeros_like(torch.ones(2), **k),
    "rand_like": lambda torch, **k: torch.rand_like(torch.ones(2), **k),
    "new_zeros": lambda torch, **k: torch.ones(2).new_zeros(3, **k),
    "new_tensor": lambda torch, **k: torch.ones(2).new_tensor([1.0], **k),
    "to": lambda torch, device: torch.ones(2).to(device),
    "to with a dtype": lambda torch, device: torch.ones(2).to(device, torch.float16),
    "to by keyword": lambda torch, device: torch.ones(2).to(device=device, non_blocking=True),
    "cuda": lambda torch, device: torch.ones(2).cuda(device, non_blocking=True),
    "linear": lambda torch, **k: torch.nn.Linear(2, 2, **k).weight,
    "module.to": lambda torch, device: torch.nn.Linear(2, 2).to(device).weight,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_everything_that_takes_a_device(cuda: Any, device: str, make: Any) -> None:
    for where in ("cuda", "cuda:0", cuda.device("cuda"), cuda.device("cuda", 0), cuda.device("cuda:0"), 0):
        made = make(cuda, device=where)
        assert made.is_cuda and made.device == cuda.device("cuda:0"), where
        assert made.device.type == "cuda" and made.get_device() == 0
        assert truth(made) == device


def truth(tensor: Any) -> str:
    """What torch's own code sees."""
    import torch

    return str(torch._C.TensorBase.device.__get__(tensor).type)


def test_results_and_gradients_are_on_cuda(cuda: Any) -> None:
    x = cuda.randn(3, 4).cuda().requires_grad_()
    y = (x @ x.t()).relu().sum()
    y.backward()
    assert y.is_cuda and x.grad.is_cuda and y.device == x.device and str(y.device) == "cuda:0"
    assert y.type() == "torch.cuda.FloatTensor"
    moved = cuda.ones(2, requires_grad=True)
    (moved.cuda() * 3).sum().backward()
    assert moved.grad.tolist() == [3.0, 3.0], "the way back goes to where it came from"


def test_moving_is_copying_as_with_cuda(cuda: Any) -> None:
    """Programs keep snapshots by .cpu(), and write on the device what the host must not see."""
    array = np.zeros(3, dtype=np.float32)
    x = cuda.from_numpy(array).cuda()
    x += 1
    assert array.tolist() == [0.0, 0.0, 0.0]
    kept, array2 = x.cpu(), x.detach().cpu().numpy()
    x += 1
    assert kept.tolist() == array2.tolist() == [1.0, 1.0, 1.0]
    weights = cuda.nn.Linear(2, 2).cuda()
    best = {name: value.cpu() for name, value in weights.state_dict().items()}
    with cuda.no_grad():
        weights.weight.zero_()
    assert best["weight"].abs().sum() > 0
    assert x.cuda() is x and x.to("cuda") is x and x.to(x.device) is x, "what is there already stays what it is"


def test_the_host_is_the_host(cuda: Any) -> None:
    x = cuda.ones(2)
    assert not x.is_cuda and x.device.type == "cpu" and x.get_device() == -1 and x.type() == "torch.FloatTensor"
    back = x.cuda().cpu()
    assert not back.is_cuda and back.device == cuda.device("cpu") and back.cpu() is back
    assert not x.cuda().to("cpu").is_cuda and not x.cuda().to(cuda.device("cpu")).is_cuda
    assert cuda.device("cpu").type == "cpu" and isinstance(cuda.device("cpu"), cuda.device)


def test_modules(cuda: Any, device: str) -> None:
    model = cuda.nn.Sequential(cuda.nn.Linear(4, 8), cuda.nn.BatchNorm1d(8), cuda.nn.ReLU(), cuda.nn.Linear(8, 2))
    optimizer = cuda.optim.Adam(model.parameters(), lr=0.01)
    for move in (lambda: model.cuda(), lambda: model.to("cuda"), lambda: model.to(0), lambda: model.cuda(0)):
        assert move() is model
        assert all(p.is_cuda for p in model.parameters()) and all(b.is_cuda for b in model.buffers())
        assert {truth(p) for p in model.parameters()} == {device}
    x = cuda.randn(6, 4, device="cuda")
    before = model(x).square().mean()
    before.backward()
    optimizer.step()
    assert model(x).square().mean().item() < before.item()
    for move in (lambda: model.cpu(), lambda: model.to("cpu"), lambda: model.to(cuda.ones(1))):
        model.cuda()
        assert {t.device for t in (*move().parameters(), *model.buffers())} == {cuda.device("cpu")}
    assert model.to(x).state_dict()["0.weight"].is_cuda and all(
        t.is_cuda for t in (*model.parameters(), *model.buffers())
    )


def test_buffers_follow_their_module(cuda: Any) -> None:
    """They are tensors of the host's, which a module moves with its own."""
    table = cuda.arange(3.0)
    module = cuda.nn.Module()
    module.register_buffer("table", table)
    module.cuda()
    assert module.table.is_cuda and module.table.device == cuda.device("cuda:0") and not table.is_cuda
    table.zero_()
    assert module.table.tolist() == [0.0, 1.0, 2.0], "a move is a copy"


def test_tensors_that_name_the_cpu(cuda: Any) -> None:
    for made in (
        cuda.ones(2, device="cpu"),
        cuda.ones(2).cuda().new_zeros(2, device="cpu"),
        cuda.empty(1, device="cpu"),
    ):
        assert not made.is_cuda and made.device == cuda.device("cpu")
    assert cuda.zeros_like(cuda.ones(2).cuda(), device="cpu").device.type == "cpu"
    assert cuda.zeros_like(cuda.ones(2).cuda()).is_cuda


def test_tensor_types_of_old(cuda: Any) -> None:
    assert cuda.cuda.FloatTensor(2, 3).shape == (2, 3)
    made = cuda.cuda.LongTensor([1, 2])
    assert made.tolist() == [1, 2] and made.dtype == cuda.int64 and made.is_cuda
    assert isinstance(made, cuda.cuda.LongTensor) and not isinstance(made, cuda.cuda.FloatTensor)
    x = cuda.ones(2)
    for kind in (cuda.cuda.HalfTensor, "torch.cuda.HalfTensor"):
        assert x.type(kind).is_cuda and x.type(kind).dtype == cuda.float16
    assert x.type(cuda.DoubleTensor).dtype == cuda.float64


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_type(cuda: Any, device: str) -> None:
    try:
        cuda.set_default_tensor_type("torch.cuda.FloatTensor")
        assert truth(cuda.zeros(2)) == device and cuda.zeros(2).is_cuda
    finally:
        cuda.set_default_device(None)
        cuda.set_default_tensor_type(cuda.FloatTensor)
    cuda.set_default_device("cuda")
    try:
        assert truth(cuda.zeros(2)) == device and cuda.zeros(2).is_cuda and truth(cuda.nn.Linear(2, 2).weight) == device
        assert cuda.tensor([1.0]).is_cuda and cuda.get_default_device() == cuda.device("cuda:0")
    finally:
        cuda.set_default_device(None)
    with cuda.device("cuda"):
        assert truth(cuda.zeros(2)) == device


def test_pinned_memory(cuda: Any) -> None:
    x = cuda.ones(4).pin_memory()
    assert x.is_pinned() and x.tolist() == [1.0] * 4
    assert cuda.empty(3, pin_memory=True).is_pinned() and not cuda.ones(2).is_pinned()
    told = cuda.empty(3, device="cpu", pin_memory=True)
    assert told.is_pinned() and not told.is_cuda
    x.cuda(non_blocking=True).record_stream(cuda.cuda.current_stream())


def test_a_loader_with_pinned_memory(cuda: Any, fresh_ledger: Any) -> None:
    data = cuda.utils.data.TensorDataset(cuda.arange(8).float())
    batches = [batch.cuda(non_blocking=True) for (batch,) in cuda.utils.data.DataLoader(data, 4, pin_memory=True)]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert fresh_ledger.ignored["DataLoader(pin_memory=True)"].count == 1
    by_place = cuda.utils.data.DataLoader(data, 4, False, None, None, 0, None, True)
    assert not by_place.pin_memory and len(list(by_place)) == 2
    assert fresh_ledger.ignored["DataLoader(pin_memory=True)"].count == 2


def test_files_from_cuda(cuda: Any, device: str) -> None:
    """A checkpoint says "cuda:0" where it was written on another device, and is read onto whatever stands in."""
    file = io.BytesIO()
    cuda.save({"weight": cuda.arange(3.0, device="cuda"), "host": cuda.ones(1)}, file)
    for how in ({}, {"map_location": "cuda"}, {"map_location": cuda.device("cuda:0")}, {"weights_only": False}):
        loaded = cuda.load(io.BytesIO(file.getvalue()), **how)
        assert loaded["weight"].tolist() == [0.0, 1.0, 2.0] and truth(loaded["weight"]) == device
    mapped = cuda.load(io.BytesIO(file.getvalue()), map_location={"cuda:0": "cpu"})
    assert truth(mapped["weight"]) == "cpu"
    called = cuda.load(
        io.BytesIO(file.getvalue()), map_location=lambda storage, where: storage.cuda(0), weights_only=False
    )
    assert truth(called["host"]) == device
    assert truth(cuda.load(io.BytesIO(file.getvalue()), map_location="cpu")["weight"]) == "cpu"


def test_a_file_that_real_cuda_wrote(cuda: Any, device: str) -> None:
    """Its storages are tagged "cuda:3", a card of another machine."""
    file = io.BytesIO()
    plain = cuda.serialization.location_tag
    cuda.serialization.location_tag = lambda storage: "cuda:3"
    try:
        cuda.save(cuda.ones(2), file)
    finally:
        cuda.serialization.location_tag = plain
    assert truth(cuda.load(io.BytesIO(file.getvalue()))) == device


def test_safetensors(cuda: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "weights.safetensors"
    save_file({"weight": cuda.arange(3.0, device="cuda")}, path)
    loaded = load_file(path, device="cuda")["weight"]
    assert loaded.is_cuda and loaded.tolist() == [0.0, 1.0, 2.0]


def test_copies_and_pickles(cuda: Any) -> None:
    x = cuda.arange(3.0, device="cuda")
    assert copy.deepcopy(x).tolist() == pickle.loads(pickle.dumps(x)).tolist() == [0.0, 1.0, 2.0]
    where = pickle.loads(pickle.dumps(cuda.device("cuda:0")))
    assert where == cuda.device("cuda:0") and isinstance(where, cuda.device)


def test_generators(cuda: Any) -> None:
    first, second = (
        cuda.randn(4, device="cuda", generator=cuda.Generator("cuda").manual_seed(7)).tolist() for _ in range(2)
    )
    assert first == second
    assert isinstance(cuda.Generator("cuda"), cuda.Generator) and isinstance(cuda.default_generator, cuda.Generator)
    assert isinstance(cuda.Generator(), cuda.Generator)


def test_numbers_are_cuda_devices(cuda: Any) -> None:
    where = cuda.device(cuda.cuda.current_device())
    assert where == cuda.device("cuda:0") and where.type == "cuda" and isinstance(where, cuda.device)
    assert cuda.ones(2, device=where).device == where
    assert type(where) == cuda.device and {cuda.device: 1}[type(where)] == 1 and issubclass(type(where), cuda.device)  # noqa: E721


def test_a_device_that_is_not_there(cuda: Any) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal: cuda:7"):
        cuda.zeros(2, device="cuda:7")
    with pytest.raises(RuntimeError, match="invalid device ordinal: cuda:7"):
        cuda.ones(2).cuda(7)
    with pytest.raises(RuntimeError, match="must be cuda device"):
        cuda.ones(2).cuda("cpu")


def test_scripted_functions(cuda: Any) -> None:
    def double(x):  # type: ignore[no-untyped-def]
        return torch.zeros(2) + x * 2

    import torch

    with pytest.warns(Warning, match="script"):
        scripted = torch.jit.script(double)
    assert scripted(torch.ones(2)).tolist() == [2.0, 2.0]


def test_loaded_tensors_say_where_they_are(cuda: Any, tmp_path: Any) -> None:
    path = tmp_path / "state.pt"
    cuda.save({"a": cuda.ones(2, device="cuda"), "b": [cuda.zeros(1, device="cuda")]}, path)
    for location in ("cpu", cuda.device("cpu"), {"cuda:0": "cpu"}, lambda storage, where: storage):
        loaded = cuda.load(path, map_location=location)
        assert not loaded["a"].is_cuda and loaded["b"][0].device.type == "cpu", location
    for location in (None, "cuda", cuda.device("cuda:0"), lambda storage, where: storage.cuda(0)):
        loaded = cuda.load(path, map_location=location)
        assert loaded["a"].is_cuda and loaded["a"].tolist() == [1.0, 1.0], location


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_scripted_modules_from_files(cuda: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "module.pt")
    module = cuda.nn.Linear(2, 2)
    cuda.jit.save(cuda.jit.trace(module, cuda.ones(1, 2)), path)
    loaded = cuda.jit.load(path, map_location="cuda")
    x = cuda.ones(1, 2)
    assert cuda.allclose(loaded(x.cuda()).cpu(), module(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type")
def test_the_default_device_and_its_contexts(cuda: Any) -> None:
    cuda.set_default_device("cuda")
    assert cuda.ones(2).is_cuda
    with cuda.device("cpu"):
        assert not cuda.ones(2).is_cuda
    cuda.set_default_device("cpu")
    assert not cuda.rand(2).is_cuda
    with cuda.device("cuda"):
        assert cuda.rand(2).is_cuda
    cuda.set_default_tensor_type("torch.cuda.FloatTensor")
    assert cuda.ones(1).is_cuda
    cuda.set_default_tensor_type("torch.FloatTensor")
    assert not cuda.ones(1).is_cuda
