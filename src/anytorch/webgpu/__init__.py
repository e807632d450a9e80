"""A PyTorch device for any GPU, through Vulkan, Metal or D3D12: `import anytorch.webgpu`, then `model.to("webgpu")`.

Importing this registers the device under the PrivateUse1 key and as `torch.webgpu`. The GPU itself is opened by the first
tensor. ANYTORCH_WEBGPU_ADAPTER names the adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    from anytorch.webgpu import libraries, registration

    registration.register()
    libraries.watch()
    for name in ("webgpu_fallback", "webgpu_checks", "webgpu_adapter", "webgpu_memory"):
        settings.get(name)  # a value that makes no sense is told now, not when it first matters
    _adapt_backward(_gradients_elsewhere_explained if _autograd_has_device_threads() else _in_the_callers_thread)


def _autograd_has_device_threads() -> bool:
    """Whether another accelerator makes autograd start at least one device thread, whenever it starts. Wakes no driver."""
    return torch.cuda.device_count() > 0 or (torch.xpu._is_compiled() and torch.xpu.device_count() > 0)


Backward = Callable[..., Any]


def _adapt_backward(wrapped: Callable[[Backward], Backward]) -> None:
    """Put a function around what `backward()` and `torch.autograd.grad` call."""
    made = wrapped(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = made
    torch.autograd._engine_run_backward = made  # type: ignore[attr-defined]


def _in_the_callers_thread(plain: Backward) -> Backward:
    """autograd starts a thread per device at the first backward of the process. If that came before this import, ours has
    none, and a backward here would fail an internal assertion. Without such threads backward runs in the caller's, as it
    does for the CPU, and saves a change of threads per op. Every thread has a switch of its own for that."""

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        torch._C._set_multithreading_enabled(False)
        return plain(*args, **kwargs)

    return backward


def _gradients_elsewhere_explained(plain: Backward) -> Backward:
    """Say in words what torch says as a failed assertion: to its autograd one accelerator of a process has streams, and a
    device under PrivateUse1 comes first (https://github.com/pytorch/pytorch/issues/161129, torch 2.8 and later)."""

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except RuntimeError as exc:
            if "opt_ready_stream" not in str(exc):
                raise
            raise RuntimeError(
                f"gradients cannot be computed on another accelerator in a process that has imported anytorch.webgpu: torch "
                f"{torch.__version__} knows one accelerator's streams per process, and takes webgpu's (pytorch issue "
                "161129). Train on that device in a process of its own, without this import."
            ) from exc

    return backward


def reset() -> None:
    """Forget a lost device; the next tensor opens a new one. Tensors of the old one are gone."""
    from anytorch.gpu.runtime import close_runtime

    close_runtime()


_register()
