"""A model of one's own under torchrun: two processes end where one does, on the CPU and on a device with no collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

SOURCES = Path(__file__).parents[1] / "src"
PROGRAM = """
import json, sys
{prelude}
import torch
torch.set_num_threads(1)
from anytorch import train

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
with train.world({device!r}) as world:
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = world.synchronised(plain.to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in world.loader(dataset, batch_size=16, shuffle=False):
            loss = torch.nn.functional.mse_loss(model(x.to(world.device)), y.to(world.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    spread = (world.mean(weights.to(world.device)).cpu() - weights).abs().max().item()
    if world.first:
        print("ANSWER", json.dumps([weights.tolist(), spread, str(world.device), world.size]))
"""


def run(folder: Path, processes: int, device: str = "cpu", prelude: str = "") -> list[Any]:
    script = folder / f"train_{processes}.py"
    script.write_text(PROGRAM.format(prelude=prelude, device=device), encoding="utf-8")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *start, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: list[Any] = json.loads(done.stdout.partition("ANSWER ")[2].splitlines()[0])
    return answer


@pytest.mark.long
def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    one, _, _, _ = run(tmp_path, 1)
    two, apart, device, size = run(tmp_path, 2)
    # Each process has every second row of a batch, so the batch of both is the one process's in another order.
    assert two == pytest.approx(one, abs=1e-5) and apart == 0.0 and (device, size) == ("cpu", 2)


@pytest.mark.long
def test_two_processes_on_a_device_without_collectives(tmp_path: Path, npu_extension: Any) -> None:
    one, _, _, _ = run(tmp_path, 1)
    two, apart, device, size = run(tmp_path, 2, "npu", npu_extension.loader())
    assert two == pytest.approx(one, abs=1e-5) and apart == 0.0 and (device, size) == ("npu:0", 2)


def test_a_mean_of_whole_numbers_is_a_float_by_any_number_of_processes() -> None:
    import torch

    from anytorch.train import World

    class Same(World):
        """Whose other processes have the same number."""

        def total(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.size

    for size in (1, 2):
        mean = Same(torch.device("cpu"), 0, size).mean(torch.tensor(3))
        assert mean.dtype is torch.float32 and mean == 3


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    import torch

    from anytorch.errors import UsageError
    from anytorch.train import World

    with pytest.raises(UsageError, match="cannot be shared by 3"):
        World(torch.device("cpu"), size=3).loader([1, 2, 3], batch_size=4)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are looked at in /proc")
def test_the_end_waits_for_the_threads_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from anytorch import train

    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    until(lambda: list(train._gloo_states()), "gloo's threads to take their name; or it is another one now")
    train._let_gloo_rest(patience=120)
    del group
    # One that works, then waits for Python's lock, then rests: its first sleep does not count.
    seen = iter("RSRSSR")
    monkeypatch.setattr(train, "_gloo_states", lambda: [next(seen)])
    train._let_gloo_rest(patience=120)
    assert list(seen) == ["R"]
