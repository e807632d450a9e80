"""Copying, pickling, saving, and loading to the device and from it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

from tests.webgpu.agree import close


def test_deepcopy_and_pickle(torch: Any) -> None:
    x = torch.randn(3, 4).to("webgpu")
    twin = copy.deepcopy(x)
    twin[0] = 0
    assert twin.device.type == "webgpu" and x[0].abs().sum().item() > 0
    close(pickle.loads(pickle.dumps(x)), x.cpu())
    parameter = torch.nn.Parameter(x)
    again = copy.deepcopy(parameter)
    assert isinstance(again, torch.nn.Parameter) and torch.equal(again.cpu(), parameter.cpu())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to("webgpu")
    model[1].weight = torch.nn.Parameter(model[0].weight.t()[:2])  # shared storage
    twin_model = copy.deepcopy(model)
    assert all(p.device.type == "webgpu" for p in twin_model.parameters())


def test_saving_and_loading_both_ways(torch: Any) -> None:
    held = {"a": torch.randn(3, 4), "b": torch.arange(5), "h": torch.randn(7).half(), "view": torch.randn(4, 4).t()}
    ours = {name: value.to("webgpu") for name, value in held.items()}

    def through(values: Any, **options: Any) -> Any:
        stream = io.BytesIO()
        torch.save(values, stream)
        stream.seek(0)
        return torch.load(stream, weights_only=True, **options)

    for name, value in through(ours).items():
        close(value, held[name])
    for name, value in through(ours, map_location="cpu").items():
        assert value.device.type == "cpu" and torch.equal(value, held[name])
    for name, value in through(held, map_location="webgpu").items():
        close(value, held[name])
    for name, value in through(held, map_location=torch.device("webgpu", 0)).items():
        close(value, held[name])
    shared = torch.arange(6.0).to("webgpu")
    a, b = through([shared[:3], shared[2:]])
    a[2] = 50
    assert b[0].item() == 50, "views that shared a storage still do"


def test_state_dict(torch: Any) -> None:
    cpu = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    ours = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to("webgpu")
    ours.load_state_dict(cpu.state_dict())
    for name, value in ours.state_dict().items():
        close(value, cpu.state_dict()[name])
    cpu.load_state_dict(ours.state_dict())
    x = torch.randn(5, 4)
    close(ours.eval()(x.to("webgpu")).detach(), cpu.eval()(x).detach(), rtol=1e-4, atol=1e-5)
    assert all(v.device.type == "cpu" for v in ours.to("cpu").state_dict().values())
