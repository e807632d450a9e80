"""Data loaders, forks, a taken device name and a late opening: other processes and what is said in them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


def test_data_loader_with_workers(torch: Any, run_script: Any) -> None:
    """In a process of its own: a fork ends what threads of other tests keep, and some of that cannot be ended there."""
    said = run_script(
        """
        import torch, anytorch.webgpu
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
        total = torch.zeros((), device="webgpu")
        for x, _ in DataLoader(data, batch_size=2, num_workers=1):
            total += x.to("webgpu").sum()
        answer(total=total.item())
        """
    )
    assert said == {"total": 66.0}


def test_a_pinned_data_loader_goes_on_working(torch: Any) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(4.0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [batch.to("webgpu").cpu() for (batch,) in DataLoader(data, batch_size=2, pin_memory=True)]
        again = torch.arange(3).pin_memory()
    assert torch.equal(torch.cat(batches), torch.arange(4.0)) and torch.equal(again, torch.arange(3))
    assert len([w for w in said if "page-locked" in str(w.message)]) <= 1  # none if another test was told already


def test_a_forked_worker_that_touches_the_device_explains_itself(torch: Any, run_script: Any) -> None:
    said = run_script(
        """
        import os, torch, anytorch.webgpu
        torch.ones(2, device="webgpu").sum().item()
        end, start = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.ones(2, device="webgpu")
                message = "no error"
            except Exception as exc:
                message = f"{type(exc).__name__}: {exc}"
            os.write(start, f"{torch.webgpu._is_in_bad_fork()} {message}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer(said=os.read(end, 10_000).decode(), parent=torch.ones(2, device="webgpu").sum().item())
        """,
        {"ANYTORCH_WEBGPU_FALLBACK": "silent"},
    )
    assert said["said"].startswith("True DeviceUnavailable") and "spawn" in said["said"], said["said"]
    assert said["parent"] == 2.0


def test_another_private_device_is_named(run_script: Any, torch: Any) -> None:
    said = run_script(
        """
        import torch
        torch.utils.rename_privateuse1_backend("other")
        try:
            import anytorch.webgpu
            message = "no error"
        except Exception as exc:
            message = f"{type(exc).__name__}: {exc}"
        answer(message=message)
        """
    )
    assert said["message"].startswith("DeviceUnavailable") and "'other' has taken it" in said["message"]


@pytest.mark.long
def test_importing_twice_and_opening_late(run_script: Any, torch: Any) -> None:
    said = run_script(
        """
        import torch, importlib, anytorch.webgpu
        importlib.reload(anytorch.webgpu)
        opened = torch.webgpu.is_initialized()
        answer(opened=opened, value=(torch.ones(2, device="webgpu") + 1)[0].item())
        """,
        {"ANYTORCH_WEBGPU_FALLBACK": "silent"},
    )
    assert said == {"opened": False, "value": 2.0}
