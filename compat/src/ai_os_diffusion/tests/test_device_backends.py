"""Every usable device computes what the CPU computes.

python -m pytest ai_os_diffusion/tests/test_device_backends.py -v
"""

from __future__ import annotations

import pytest

import anytorch
from anytorch.devices.choose import activate
from anytorch.devices.exercise import exercise
from anytorch.devices.types import Candidate, State

DEVICES: list[Candidate] = [device for device in anytorch.devices() if device.state is State.USABLE]


@pytest.mark.parametrize("device", DEVICES, ids=[device.id for device in DEVICES])
def test_device(device: Candidate) -> None:
    activate(device)
    names = [check.name for check in exercise(device.torch_name)]
    assert names == ["allocate", "copy", "matmul", "backward"]
