"""Document 5's integration check, on whatever accelerator is there: an Ascend NPU, a GPU, or the CPU.

python training/test_npu_integration.py
"""

import sys

import apt_model.optimization.vb_global as vb
import torch
from apt_model.core.system import get_device, get_device_info, memory_cleanup, set_seed
from apt_model.optimization.npu_backend import (
    get_accelerator_type,
    get_device_manager,
    get_unified_backend,
    is_npu_available,
)
from apt_model.optimization.vgpu_stack import create_vgpu_stack


def detection() -> str:
    info = get_device_info()
    assert info["npu_available"] == is_npu_available() and info["device_type"] == get_accelerator_type()
    return f"{info['device_name']} ({info['device_type']}), NPU: {'yes' if is_npu_available() else 'none here'}"


def adapter() -> str:
    backend = get_unified_backend()
    assert backend.is_available() and backend.to_device(torch.ones(3)).device.type == get_device().type
    backend.synchronize()
    return backend.get_device_name()


def manager() -> str:
    summary = get_device_manager().get_device_summary()
    assert summary["total_devices"] == len(get_device_manager().get_all_devices())
    return f"{summary['total_devices']} devices, {summary['npu_devices']} of them NPUs"


def stack() -> str:
    made = create_vgpu_stack()
    made.register("weights", torch.arange(4.0))
    assert made.access("weights").tolist() == [0, 1, 2, 3]
    return "numbers came back from the memory tiers"


def modes() -> str:
    active = vb.enable_balanced_mode(verbose=False)
    assert vb.is_enabled()
    vb.disable()
    return str(type(active).__name__)


def training() -> str:
    set_seed(42)
    device = get_device()
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(64, 8).to(device)
    target = x.sum(1, keepdim=True)
    losses = []
    for _ in range(50):
        loss = torch.nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    memory_cleanup()
    assert losses[-1] < losses[0] / 10, losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.4f} on {device}"


def main() -> int:
    for number, check in enumerate((detection, adapter, manager, stack, modes, training), 1):
        print(f"{number}. ✅ {check.__name__}: {check()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
