"""Where a tensor's numbers live.

Any name stands for the host's memory, where NumPy computes: `CustomDevice()`, `CustomDevice("custom_gpu")`. Only the name
of the GPU device means something else; see `anytorch.lite.gpu`.
"""

from __future__ import annotations

from anytorch.devices.webgpu import WebgpuBackend
from anytorch.errors import UsageError

GPU_TYPE = WebgpuBackend.name


class CustomDevice:
    """A device by name: `CustomDevice("custom_gpu")`, `CustomDevice("webgpu:0")`.

    Tensors on differently named host devices share one memory and mix freely; the result takes the first one's device.
    A tensor on the GPU meets a host tensor only after `.to(device)`.
    """

    __slots__ = ("device_type", "index")

    def __init__(self, device_type: str = "custom", index: int | None = None) -> None:
        name, colon, number = device_type.partition(":")
        if not name or (colon and not number.isdigit()):
            raise UsageError(f"{device_type!r} is not a device name", hint="write 'custom' or 'custom:0'")
        self.device_type = name
        self.index = index if index is not None else int(number or 0)
        if self.index < 0:
            raise UsageError(f"the device index {self.index} is negative")
        if self.is_gpu and self.index:
            raise UsageError(
                f"{self} does not exist: the process uses one adapter, {GPU_TYPE}:0",
                hint="the setting ANYTORCH_WEBGPU_ADAPTER chooses which GPU that is",
            )

    @property
    def type(self) -> str:
        return self.device_type

    @property
    def is_gpu(self) -> bool:
        """Whether the numbers live on a GPU instead of in the host's memory."""
        return self.device_type == GPU_TYPE

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CustomDevice):
            return NotImplemented
        return (self.device_type, self.index) == (other.device_type, other.index)

    def __hash__(self) -> int:
        return hash((self.device_type, self.index))

    def __str__(self) -> str:
        return f"{self.device_type}:{self.index}"

    def __repr__(self) -> str:
        return f"CustomDevice('{self.device_type}:{self.index}')"


DEFAULT = CustomDevice()


def as_device(device: CustomDevice | str | None) -> CustomDevice:
    if device is None:
        return DEFAULT
    return CustomDevice(device) if isinstance(device, str) else device
