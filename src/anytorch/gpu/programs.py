"""Compiled shaders and their bind groups. Compile once, launch many."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from anytorch.errors import AnytorchError
from anytorch.gpu import layer
from anytorch.gpu.buffers import Buffer
from anytorch.gpu.native import NULL, BindingTooLarge, ShaderError, ffi, lib, raising, shader_module, wgpu
from anytorch.gpu.plans import Recent

if TYPE_CHECKING:
    from anytorch.gpu.launcher import Launcher

Source = str | layer.Spirv  # WGSL, or a kernel for matrix cores
# Of all layouts: each is a mapping of memory to Mesa's software driver, and Linux gives a process 65,530 of those.
BIND_GROUPS_KEPT = 32_768
PROGRAMS_KEPT = 8_192


class Program:
    """A compute pipeline, and what is needed to launch it."""

    __slots__ = ("buffers", "groups", "handle", "key", "layout", "pipeline", "source")

    def __init__(
        self, key: Hashable, pipeline: Any, layout: Any, groups: dict[Any, Any], source: str, buffers: int
    ) -> None:
        self.key = key  # its maker's name for it
        self.pipeline = pipeline  # wgpu's object, which owns the handle
        self.handle = pipeline._internal
        self.layout = layout
        self.groups = groups  # bind groups by the buffers' keys, shared by all programs of this layout
        self.source = source
        self.buffers = buffers  # how many it binds


class Programs:
    """The programs of one device, by whatever key their maker chooses."""

    def __init__(self, device: Any, binding_limit: int) -> None:
        self._device = device
        self._binding_limit = binding_limit
        self.launcher: Launcher | None = None  # remembers bind groups too
        self._programs = Recent(PROGRAMS_KEPT)
        self._lock = threading.Lock()
        self._layouts: dict[tuple[int, int], Any] = {}
        self._pipeline_layouts: dict[tuple[int, int, int], Any] = {}
        self._groups: dict[tuple[int, int], dict[Any, Any]] = {}  # by layout, then by buffers

    def __len__(self) -> int:
        return len(self._programs)

    def make(
        self, key: Hashable, source: Source | Callable[[], Source], *, buffers: int, writable: int, immediates: int
    ) -> Program:
        """The program for `key`, compiled on first use. `writable` has bit i set if binding i is written."""
        with self._lock:
            program: Program | None = self._programs[key]
        if program is None:
            found = source() if callable(source) else source
            made = self._compile(key, found, buffers, writable, immediates)  # threads may compile side by side
            with self._lock:
                program = self._programs[key] = self._programs[key] or made
        return program

    def _compile(self, key: Hashable, source: Source, buffers: int, writable: int, immediates: int) -> Program:
        layout_key = (buffers, writable)
        kernel = source if isinstance(source, layer.Spirv) else None
        text = kernel.stand_in if kernel is not None else str(source)
        try:
            with raising("compiling a shader"), layer.standing_in(kernel) if kernel is not None else nullcontext():
                with self._lock:
                    layout = self._layout(layout_key)
                    whole = self._pipeline_layout(layout_key, immediates)
                module = shader_module(self._device, text)
                pipeline = self._device.create_compute_pipeline(
                    layout=whole,
                    compute={"module": module, "entry_point": "main"},
                )
        except (AnytorchError, wgpu.GPUError, RuntimeError) as exc:
            numbered = "\n".join(f"{i:4d}  {line}" for i, line in enumerate(text.splitlines(), 1))
            raise ShaderError(f"webgpu: a shader does not compile: {exc}\n{numbered}") from exc
        return Program(key, pipeline, layout, self._groups.setdefault(layout_key, {}), text, buffers)

    def _layout(self, key: tuple[int, int]) -> Any:
        if key not in self._layouts:
            buffers, writable = key
            self._layouts[key] = self._device.create_bind_group_layout(
                entries=[
                    {
                        "binding": i,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": "storage" if writable >> i & 1 else "read-only-storage"},
                    }
                    for i in range(buffers)
                ]
            )
        return self._layouts[key]

    def _pipeline_layout(self, key: tuple[int, int], immediates: int) -> Any:
        whole = (*key, immediates)
        if whole not in self._pipeline_layouts:
            sized = {"immediate_size": immediates} if immediates else {}
            self._pipeline_layouts[whole] = self._device.create_pipeline_layout(
                bind_group_layouts=[self._layout(key)], **sized
            )
        return self._pipeline_layouts[whole]

    def bind(self, program: Program, buffers: Sequence[Buffer], windows: tuple[tuple[int, int], ...] | None) -> Any:
        """A bind group that `program.groups` does not have yet. The pool recycles buffers, so nearly every one is there.

        A binding may not exceed the adapter's limit (a longer one reads silent zeros): larger buffers need `windows`, an
        (offset, nbytes) pair per buffer.
        """
        if sum(map(len, self._groups.values())) >= BIND_GROUPS_KEPT:
            self._forget(max(self._groups.values(), key=len))
        entries = ffi.new("WGPUBindGroupEntry[]", len(buffers))
        for i, buffer in enumerate(buffers):
            offset, nbytes = windows[i] if windows is not None else (0, buffer.nbytes)
            if nbytes > self._binding_limit:
                raise BindingTooLarge(
                    f"webgpu: a kernel was given {nbytes:,} bytes in one binding; this adapter's limit is "
                    f"{self._binding_limit:,} bytes",
                    hint="split the tensor; elementwise ops do it by themselves",
                )
            entry = entries[i]
            entry.binding = i
            entry.buffer = buffer.handle
            entry.offset = offset
            entry.size = nbytes
        descriptor = ffi.new("WGPUBindGroupDescriptor *")
        descriptor.layout = program.layout._internal
        descriptor.entryCount = len(buffers)
        descriptor.entries = entries
        descriptor.label.data = NULL
        descriptor.label.length = 0
        with raising("binding buffers"):
            group = lib.wgpuDeviceCreateBindGroup(self._device._internal, descriptor)
        key = tuple(buffers)
        program.groups[key if windows is None else (key, windows)] = group
        return group

    def forget_bind_groups(self) -> None:
        """Bind groups keep their buffers alive: drop them all before buffers are destroyed."""
        for groups in self._groups.values():
            self._forget(groups)

    def _forget(self, groups: dict[Any, Any]) -> None:
        if self.launcher is not None:
            self.launcher.forget_groups()
        for group in groups.values():
            lib.wgpuBindGroupRelease(group)
        groups.clear()
