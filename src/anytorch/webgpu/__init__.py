"""A PyTorch device for any GPU, through Vulkan, Metal or D3D12: `import anytorch.webgpu`, then `model.to("webgpu")`.

Importing this registers the device under the PrivateUse1 key and as `torch.webgpu`. The GPU itself is opened by the first
tensor. ANYTORCH_WEBGPU_ADAPTER names the adapter.
"""

from __future__ import annotations

import torch

from anytorch import settings
from anytorch.errors import DeviceUnavailable

NAME = "webgpu"
_NEEDED = ("_construct_storage_from_data_pointer", "_acc", "_get_privateuse1_backend_name", "_swap_tensor_impl")


def _register() -> None:
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    if missing:
        raise ImportError(
            f"anytorch's webgpu device needs torch._C.{', '.join(missing)}, which torch {torch.__version__} does not have; "
            "it was written for torch 2.11 to 2.13"
        )
    holder = torch._C._get_privateuse1_backend_name()
    if holder == NAME and hasattr(torch, NAME):
        return
    if holder != "privateuseone":
        raise DeviceUnavailable(
            f"torch has one slot for a device of this kind, and {holder!r} has taken it",
            hint=f"use a process that does not load the {holder} plug-in (TORCH_DEVICE_BACKEND_AUTOLOAD=0)",
        )
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from anytorch.webgpu.module import WebgpuModule

    _setup_privateuseone_for_python_backend(NAME, backend_module=WebgpuModule())
    from anytorch.webgpu import registration

    registration.register()
    for name in ("webgpu_fallback", "webgpu_checks", "webgpu_adapter", "webgpu_memory"):
        settings.get(name)  # a value that makes no sense is told now, not when it first matters
    if not _autograd_has_device_threads():
        # autograd starts a thread per device at the first backward of the process. If that came before this import, ours
        # has none, and a backward here would fail an internal assertion. Without such threads backward runs in the caller's,
        # as it does for the CPU, and saves a change of threads per op.
        torch.autograd.set_multithreading_enabled(False)


def _autograd_has_device_threads() -> bool:
    """Does another accelerator make autograd start at least one device thread, whenever it starts? Wakes no driver."""
    return torch.cuda.device_count() > 0 or (torch.xpu._is_compiled() and torch.xpu.device_count() > 0)


def reset() -> None:
    """Forget a lost device; the next tensor opens a new one. Tensors of the old one are gone."""
    from anytorch.gpu.runtime import close_runtime

    close_runtime()


_register()
