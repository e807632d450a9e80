"""`anytorch.stand_in(device)`: CUDA, as far as a program can see, on another device."""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import TracebackType
from typing import Any

import torch

from anytorch.devices.choose import Resolution, as_usable, resolve, survey
from anytorch.run import (
    accelerator,
    batch_norm,
    compiling,
    cuda_module,
    defaults,
    equivalents,
    factories,
    graphs,
    loading,
    parallel,
    precision,
    refusals,
    scripts,
    streams,
    tensors,
)
from anytorch.run.hooks import Finder
from anytorch.run.ledger import ledger
from anytorch.run.patches import Patches
from anytorch.run.place import NAME, Place
from anytorch.run.tensors import Marks

_lock = threading.RLock()
_active: list[stand_in] = []  # the last one is in force


class stand_in:
    """Let a device stand in for CUDA: `with anytorch.stand_in("webgpu"): program()`, or `.start()` and `.stop()`.

    None is the configured device or the best one, as for `anytorch.resolve`. Inside, `torch.cuda.is_available()` is True and
    `.cuda()`, `device="cuda"`, `torch.cuda.amp` and the rest work on that device. It holds for the whole process, for
    threads, too, and everything is put back at the end. Blocks may be nested; the innermost is in force. Where the device
    is a CUDA device already, nothing is changed.

    >>> import torch, anytorch
    >>> with anytorch.stand_in("cpu"):
    ...     x = torch.ones(2, device="cuda")
    ...     print(torch.cuda.is_available(), x.device, x.is_cuda)
    True cuda:0 True
    >>> x.device
    device(type='cpu')
    """

    def __init__(self, device: str | torch.device | Resolution | None = None) -> None:
        self.resolution = device if isinstance(device, Resolution) else resolve(device)
        self._patches = Patches()
        self._place: Place | None = None

    def start(self) -> stand_in:
        """Begin. `stop` ends it."""
        with _lock:
            if self in _active:
                return self
            if _active:
                _active[-1]._uninstall()
            _active.append(self)
            try:
                self._install()
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Put everything back, whether or not other blocks are under way."""
        with _lock:
            if self not in _active:
                return
            in_force = _active[-1] is self
            _active.remove(self)
            if in_force:
                self._uninstall()
                if _active:
                    _active[-1]._install()

    __enter__ = start

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def place(self) -> Any:
        """The device that does the work; None where CUDA itself does."""
        return self._place

    def _install(self) -> None:
        if self.resolution.chosen.torch_type == NAME:
            return
        if self._place is None:
            self._place = Place(self.resolution)
        place, patches, marks = self._place, self._patches, Marks()
        factories.install(patches, place, ledger, marks)
        tensors.install(patches, place, ledger, marks)
        defaults.install(patches, place, ledger, marks)
        cuda_module.install(patches, place, ledger)
        streams.install(patches, place, ledger)
        scripts.install(patches, place, ledger)
        accelerator.install(patches, place, ledger)
        graphs.install(patches, place, ledger)
        precision.install(patches, place, ledger)
        loading.install(patches, place, ledger, marks)
        parallel.install(patches, place, ledger)
        batch_norm.install(patches, place, ledger)
        compiling.install(patches, place, ledger)
        refusals.install(patches)
        finder = Finder(
            equivalents.MODULES,
            equivalents.fill,
            refusals.PACKAGES,
            refusals.missing_package,
            {
                compiling.DYNAMO: partial(compiling.trace_as_the_program_sees_it, patches, place),
                **{name: partial(change, patches) for name, change in refusals.LATER.items()},
                **{name: partial(change, patches, place) for name, change in parallel.LATER.items()},
            },
        )
        sys.meta_path.insert(0, finder)
        patches.at_the_end(finder.leave)

    def _uninstall(self) -> None:
        self._patches.undo()


def chosen_before(name: str) -> Resolution:
    """The resolution of a device that `anytorch run` has chosen and tried: a child process need not try it again."""
    listed = survey("never").devices
    found = next((candidate for candidate in listed if candidate.torch_name == name), None)
    return resolve(name) if found is None else Resolution(name, as_usable(found))


def in_force() -> stand_in | None:
    """The stand-in that holds now; None without one."""
    with _lock:
        return _active[-1] if _active else None
