"""What the system says the process uses (VmHWM) is what the ledger says, and what goes is given back to the system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anytorch
from anytorch.memory.homes import LOADING

MB = 2**20
PROGRAM = """
import gc, json, sys
from pathlib import Path
import torch
from torch import nn
import anytorch, anytorch.memory.loading
from anytorch.memory.types import Speeds

WIDTH, LAYERS = 512, 6

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def used(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

x = torch.randn(4, WIDTH)
with torch.no_grad():
    Layer()(x)  # the matrix library's own memory
torch.zeros(30 * 2**20, dtype=torch.uint8)  # freed: from now on glibc serves as much from its heap, and keeps it there
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = used("VmRSS")
model = anytorch.memory.load(
    Model, "cpu", weights=sys.argv[1], device_budget="30MB", blocks="leaves", speeds=Speeds(10.0, 2.0)
)
handle = anytorch.memory.fitted(model)
with torch.no_grad():
    for _ in range(3):
        model(x)
found = {
    "ledger": handle.ledger.use("device").peak,
    "peak": used("VmHWM") - before,
    "resident": handle.plan.nbytes_at("device"),
    "weights": sum(p.numel() * 4 for p in model.parameters()),
}
handle.close()
del model
print(json.dumps(found | {"left": used("VmRSS") - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
def test_the_system_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    state = {}
    for number in range(6):
        for name, shape in (("up", (4096, 512)), ("down", (512, 4096))):
            state[f"layers.{number}.{name}.weight"] = torch.zeros(shape)
            state[f"layers.{number}.{name}.bias"] = torch.zeros(shape[:1])
    save_file(state, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model.safetensors")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] > 3 * 30 * MB and 0 < found["resident"] < found["ledger"] <= 30 * MB
    assert found["peak"] < found["ledger"] + 4 * MB, "something large is not counted"
    assert found["left"] < 5 * MB, "the allocator keeps what was given back"


FITTED = (
    PROGRAM[: PROGRAM.index("gc.collect()")]
    + """
gc.collect()
before = used("VmRSS")
model = Model()
options = {"disk": sys.argv[1], "blocks": json.loads(sys.argv[2]), "speeds": Speeds(10.0, 2.0)}
anytorch.memory.fit(model, "cpu", device_budget="30MB", **options)
Path("/proc/self/clear_refs").write_text("5")
with torch.no_grad():
    for _ in range(3):
        model(x)
handle = anytorch.memory.fitted(model)
print(json.dumps({"ledger": handle.ledger.use("device").peak, "peak": used("VmHWM") - before}))
"""
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
@pytest.mark.parametrize("blocks", [None, "leaves"])
def test_weights_of_a_model_that_was_in_memory_are_given_back_to_the_system(tmp_path: Path, blocks: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FITTED, str(tmp_path / "disk"), json.dumps(blocks)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["ledger"] <= 30 * MB and found["peak"] < found["ledger"] + 4 * MB, "malloc keeps what the model was"


@pytest.mark.parametrize("rest_format", [None, "int8"])
@pytest.mark.parametrize("levels", [{}, {"host_budget": "8MB"}], ids=["disk", "host"])
def test_buffers_for_setting_up_are_counted_and_go(
    models: Any, given: dict[str, Any], tmp_path: Path, levels: dict[str, Any], rest_format: str | None
) -> None:
    model = models.made(width=256)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")

    def made() -> nn.Module:
        result: nn.Module = models.made(width=256)
        return result

    options = {"device_budget": "4.5MB", "rest_format": rest_format, **levels, **given}
    for fitted in (
        anytorch.memory.load(made, "cpu", weights=tmp_path, **options),
        anytorch.memory.fit(model, "cpu", **options),
    ):
        handle = anytorch.memory.fitted(fitted)
        for level, use in handle.stats()["levels"].items():
            assert use["peak"] <= use["capacity"] and LOADING not in handle.ledger.holders(level)
        assert handle.block_homes._load_buffer is None
        assert all(spill._bounce is None for spill in handle.block_homes.spills)
        anytorch.memory.unfit(fitted)
