"""New values for blocks that are not on the device: an optimizer's, a checkpoint's, or those of `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.buffers import scatter
from anytorch.memory.formats import pack_block
from anytorch.memory.images import from_files
from anytorch.memory.parked import PARKED, park, wake
from anytorch.memory.running import held_by
from anytorch.memory.shelf import spill_of

if TYPE_CHECKING:
    from anytorch.memory.handle import Fitted


def write_back(fit: Fitted, block: str, weights: Mapping[str, torch.Tensor]) -> None:
    """New values take the place of a block's old ones at its home; parameters that are not named keep theirs.

    The new version on disk is complete before the old one goes. The caller sees to it that nobody fetches the block
    meanwhile (`Mover.begin_change`) or that the ring is emptied afterwards.
    """
    assert fit.running is not None
    image = fit.images[block]
    packing = fit.packings.get(block)
    if packing is not None:
        whole = {path: weights.get(path, tensor) for path, tensor in fit.rest.tensors(block).items()}
        weights = pack_block(packing, {path: tensor.detach().cpu() for path, tensor in whole.items()})
    if block in fit.rest.host:
        pieces = fit.rest.host[block]
        for view in image.views:
            if view.name in weights:
                scatter(weights[view.name].contiguous().view(-1).view(torch.uint8), pieces, view.offset)
        return
    everything = dict(weights)
    if packing is None:
        everything = {path: weights.get(path, tensor) for path, tensor in fit.rest.tensors(block).items()}
    nbytes = sum(tensor.nbytes for tensor in everything.values())
    spill = spill_of(fit)
    fit.ledger.reserve("disk", f"new block {block}", nbytes)
    try:
        located = spill.write({path: tensor.detach() for path, tensor in everything.items()})
    except BaseException:
        fit.ledger.release("disk", f"new block {block}")
        raise
    # From here on the new file is the truth; the old one goes if it is ours, never if it is the checkpoint's.
    fit.images[block] = from_files(block, located.values(), in_place=fit.tiers.shared)
    fit.running.forget_views(block)
    for path in {piece.path for piece in image.pieces}:
        if path.startswith(str(spill.folder)):
            spill.remove(path)
    fit.ledger.release("disk", f"block {block}")
    fit.ledger.release("disk", f"new block {block}")
    fit.ledger.reserve("disk", f"block {block}", nbytes)


class Loading:
    """What torch's `load_state_dict` does to parameters that are not there: their new values wait in memory, a block's at a
    time, and are written to its home when all of them have come, or at the end."""

    def __init__(self, fit: Fitted) -> None:
        self.fit = fit
        self._top: nn.Module | None = None  # the module whose load_state_dict was called
        self._awake: dict[nn.Module, list[tuple[str, str]]] = {}  # owner → (parameter's name, block)
        self._new: dict[str, dict[str, torch.Tensor]] = {}

    def before(self, module: nn.Module, names: Mapping[str, str], state: Any, prefix: str, metadata: Any) -> None:
        """The parameters that the state has values for show them, so that torch's own copying does no harm."""
        if not prefix:
            self._top = module
            self._forget_broken_off()
        for name, block in names.items():
            parameter = held_by(module, name)
            values = state.get(f"{prefix}{name}")
            if not isinstance(values, torch.Tensor) or not isinstance(parameter, PARKED):
                continue
            if metadata.get("assign_to_params_buffers"):
                raise UsageError(
                    "load_state_dict(assign=True) would replace the parameters of a fitted model",
                    hint="leave assign out: the values are then copied into the fitted model",
                )
            if values.shape == parameter.shape:  # torch says so if not
                wake(parameter, values.detach().to("cpu", parameter.dtype, copy=True))
                self._awake.setdefault(module, []).append((name, block))

    def _forget_broken_off(self) -> None:
        """A load that an exception ended left parameters awake; listed twice, a placeholder would count as a new value."""
        for module, waiting in self._awake.items():
            for name, _ in waiting:
                parameter = held_by(module, name)
                if not isinstance(parameter, PARKED):
                    park(parameter, self.fit.device)
        self._awake.clear()
        self._new.clear()

    def after(self, module: nn.Module) -> None:
        running = self.fit.running
        assert running is not None
        for name, block in self._awake.pop(module, ()):
            parameter = held_by(module, name)
            values = parameter.data
            park(parameter, self.fit.device)
            collected = self._new.setdefault(block, {})
            collected[running.path_of(parameter, block)] = values
            if len(collected) == len(self.fit.found.groups[block].parameters):
                self._write(block)
        if module is self._top:
            self._top = None
            self.finish()

    def finish(self) -> None:
        for block in list(self._new):
            self._write(block)

    def _write(self, block: str) -> None:
        mover = self.fit.mover
        mover.begin_change(block)
        try:
            write_back(self.fit, block, self._new.pop(block))
        finally:
            mover.end_change(block)
