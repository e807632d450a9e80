"""Training a fitted model: gradients and optimizer states rest where the weights rest.

    model = anytorch.memory.fit(model, device_budget="8GB", reserve="1GB")
    optimizer = anytorch.memory.TieredOptimizer(model, torch.optim.AdamW, lr=1e-4, clip_norm=1.0)
    for batch in data:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

The arithmetic is torch's own optimizer, block by block on the CPU for blocks that do not live on the device, and on the
device for those that do: losses are those of plain training, to the last bit where both compute on the same processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from anytorch import limits, logs
from anytorch.errors import ModelError, UsageError
from anytorch.memory.block_updates import (
    GO_BACK,
    WORKING,
    BlockStep,
    Factory,
    Gradients,
    OptimizerStates,
    Options,
    Updates,
    half_a_step,
    options_of,
    reserve_working_memory,
    trained_of,
    tried,
)
from anytorch.memory.fitting import fitted
from anytorch.memory.fused import DTYPES, decoupled, kind_of, proved

log = logs.logger(__name__)
Overlap = Literal["forward", "backward"] | None


class TieredOptimizer(torch.optim.Optimizer):
    """A torch optimizer over a fitted model: schedulers, parameter groups and state_dict work as usual.

    `factory` is any optimizer that treats every parameter by itself (SGD, Adam, AdamW, RMSprop, …). `clip_norm` clips the
    norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does; the gradients of parked weights are not in
    `parameter.grad`, so that function cannot. Call `backward` several times before `step` to accumulate gradients.

    `overlap` lets blocks in host memory be updated beside the device's work, with the same result to the last bit:
    None: a step is complete when it returns. "forward": `step` returns at once, and a block is waited for when it is needed
    next. "backward": besides, a block that is computed again in backward (`activations(model, "checkpoint")`) is updated as
    soon as backward is through with it. Then the first backward without `accumulate()` around it decides: a step can no
    longer be skipped, and clipping, which needs all gradients first, is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: Factory,
        params: Iterable[Any] | None = None,
        *,
        clip_norm: float | None = None,
        overlap: Overlap = None,
        **options: Any,
    ) -> None:
        if clip_norm is not None:
            limits.SCALE_ABOVE_ZERO.check("clip_norm", clip_norm)
        if overlap not in (None, "forward", "backward"):
            raise UsageError(f"overlap is {overlap!r}; use None, 'forward' or 'backward'")
        if overlap == "backward" and clip_norm is not None:
            raise UsageError(
                "the norm of all gradients is known only after backward, so blocks cannot be updated during it",
                hint="overlap='forward' works with clip_norm",
            )
        self.fitted = fitted(model)
        self.factory = factory
        self.clip_norm = clip_norm
        self.last_norm: float | None = None  # of all gradients at the last step, before clipping
        defaults, moments = tried(factory, options)
        super().__init__(list(params) if params is not None else list(model.parameters()), defaults)
        running = self.fitted.running
        assert running is not None
        self._running = running
        self._trained = trained_of(self.fitted, self.param_groups)
        self.gradients = Gradients(self.fitted, self._trained.blocks)
        self.states = OptimizerStates(self.fitted)
        self.overlap = overlap
        kind = kind_of(factory)
        if kind is not None and defaults.get("fused"):
            for dtype in {p.dtype for found in self._trained.blocks.values() for _, p in found}.intersection(DTYPES):
                proved(decoupled(kind, defaults), dtype)  # compiled and compared now, not in the middle of a step
        self._step_block = BlockStep(self.fitted, factory, self._trained.groups, self.states)
        self._updates = Updates(self.fitted.mover, list(self.fitted.found.groups))
        self._changing = False  # has the step begun to change weights?
        self._half_done = ""  # what left the weights those of no step, in words
        self._early: set[str] = set()  # blocks that were updated, or wait for it, before the step was asked for
        self._accumulating = 0
        if overlap == "backward":
            running.forget_passes()
            running.after_backward = self._after_backward
        reserve_working_memory(self.fitted, self._trained, moments)
        self._resident = self._resident_optimizer()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._collect)
            for found in self._trained.blocks.values()
            for _, p in found
        ]

    def _resident_optimizer(self) -> torch.optim.Optimizer | None:
        """Make torch's own optimizer for the parameters that live on the device."""
        groups = [
            {**options_of(group), "params": [p for p in group["params"] if self.is_resident(p)]}
            for group in self.param_groups
        ]
        return self.factory(groups) if any(group["params"] for group in groups) else None

    def in_order(self) -> list[nn.Parameter]:
        """All parameters; `state_dict` calls each by its place here."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def is_resident(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and id(parameter) not in self._trained.places

    # --- gradients -------------------------------------------------------------------------------------------------

    def _collect(self, parameter: torch.Tensor) -> None:
        """Move a gradient that backward made from its parameter to its block's others."""
        block, path = self._trained.places[id(parameter)]
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        if block in self._early:
            raise UsageError(
                f"{path} got another gradient after the optimizer had already updated it in this step",
                hint="call every backward but the last of a step within `with optimizer.accumulate():`; after an "
                "interrupted backward, go back to the last checkpoint (anytorch.memory.resume_training)",
            )
        self.gradients.add(block, path, gradient)

    def _gathered(self) -> list[str]:
        """Blocks with gradients that no update has taken on, in the order that backward made them.

        The queue is looked at first: an update gives its gradients up before it leaves the queue, so one that ends
        between the two looks is not taken for a block with new gradients.
        """
        queued = self._updates.names()
        return [block for block in self.gradients.blocks() if block not in queued]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backwards within it only add up gradients: with overlap="backward", for all of a step but the last."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients.drop_pending()
        for block in self._gathered():
            self.gradients.drop(block)
        if self._resident is not None:
            self._resident.zero_grad(set_to_none)

    # --- the step --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Blocks are done one after another, each complete before the next.

        Raises ModelError if that ends half way (a full disk, no memory), and at every step from then on, until the weights
        are a checkpoint's again (`resume_training`): repeating it would update some weights twice.
        """
        self.check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._updates.failed():
            self.wait()
        self._changing = False
        try:
            self._step()
        except Exception as exc:
            if not self._changing or self._half_done:
                raise
            told = half_a_step(str(exc) or type(exc).__name__)
            self._half_done = told.message
            raise told from exc
        self._begin_anew()
        return loss

    def check_whole(self) -> None:
        """Raise ModelError if a step, or resuming, ended half way: such weights are worth no step and no checkpoint."""
        if self._half_done:
            raise ModelError(self._half_done, hint=GO_BACK)

    def _step(self) -> None:
        with torch.no_grad():
            self.gradients.keep_rest()
            if self.clip_norm is not None:
                self.gradients.arrive()
            gathered = self._gathered()
            scale = self._clipping(gathered)
            if self._resident is not None:
                for own, outer in zip(self._resident.param_groups, self.param_groups, strict=True):
                    own.update(options_of(outer))
                    for parameter in own["params"]:
                        if scale is not None and parameter.grad is not None:
                            parameter.grad.mul_(scale.to(parameter.grad.device))
                self._changing = True
                self._resident.step()
            self._step_blocks(gathered, scale)

    def _begin_anew(self) -> None:
        """Forget the last step: what comes now is the first pass of another."""
        self._early.clear()
        self._running.forget_passes()

    def _step_blocks(self, gathered: Sequence[str], scale: torch.Tensor | None) -> None:
        # In the order that backward made them: the first ones have arrived while the device is still at the last ones.
        waiting = list(gathered)
        options = self.state_dict_groups()
        if self.overlap is not None:
            for block in [block for block in waiting if block in self.fitted.block_homes.host]:
                self._queue(block, scale, options)
                self._changing = True
                waiting.remove(block)
        if waiting:
            self.wait()  # blocks on disk are written one at a time
        try:
            for block in waiting:
                self._changing = True
                self._update_at_home(block, scale, options)
        finally:
            if waiting:
                self.fitted.mover.forget_all()  # the ring has the old weights, also of a step that was broken off
        self.fitted.mover.fetch_ahead()

    def _after_backward(self, step: str) -> None:
        """Queue the updates of a step's blocks that have all gradients: backward needs these blocks no more."""
        if self._accumulating:
            return
        for block in self._trained.alone.get(step, ()):
            if self.gradients.is_whole(block) and block in self.fitted.block_homes.host:
                self._queue(block, None, self.state_dict_groups())
                self._early.add(block)

    def _queue(self, block: str, scale: torch.Tensor | None, options: Options) -> None:
        self._updates.add(block, partial(self._update_at_home, block, scale, options), self.gradients.ready(block))

    def wait(self) -> None:
        """Return when all weights and states are those of the last step. Raises ModelError if one could not be updated."""
        try:
            self._updates.wait()
        except ModelError as exc:
            self._half_done = exc.message
            raise

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Discard the current step: within this context all weights and states are replaced by a checkpoint's."""
        try:
            self.wait()
        except ModelError as exc:
            log.warning("%s: ignored, because the weights are reset to a checkpoint", exc.message)
        self.zero_grad()
        self._begin_anew()
        self._half_done = "resuming was interrupted, so only some weights are those of the checkpoint"
        yield
        self._half_done = ""

    def _clipping(self, gathered: Sequence[str]) -> torch.Tensor | None:
        """The factor that torch.nn.utils.clip_grad_norm_ would multiply all gradients by, from the same norms."""
        if self.clip_norm is None:
            return None
        norms: dict[int, torch.Tensor] = {}
        for block in gathered:
            found = self.gradients.take(block)
            for path, parameter in self._trained.blocks[block]:
                if path in found:
                    norms[id(parameter)] = torch.linalg.vector_norm(found[path])
        ordered = []
        for parameter in self.in_order():
            if id(parameter) in norms:
                ordered.append(norms[id(parameter)])
            elif self.is_resident(parameter) and parameter.grad is not None:
                ordered.append(torch.linalg.vector_norm(parameter.grad).cpu())
        if not ordered:
            return None
        total = torch.linalg.vector_norm(torch.stack(ordered))
        self.last_norm = float(total)
        return torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)

    def _update_at_home(self, block: str, scale: torch.Tensor | None, options: Options) -> None:
        """One block's step on the CPU. Gradients that another thread works with are given up by it."""
        self.gradients.wait_for(block)
        self._step_block(block, self.gradients.take(block), scale, options)
        if block in self._updates:
            self.gradients.drop(block)

    # --- state -----------------------------------------------------------------------------------------------------

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """A parameter's optimizer state, on the CPU for one that does not live on the device."""
        self.wait()
        if id(parameter) not in self._trained.places:
            return dict(self._resident.state.get(parameter, {})) if self._resident is not None else {}
        return self.states.of(*self._trained.places[id(parameter)])

    def state_dict_groups(self) -> list[dict[str, Any]]:
        """The groups' options as they are now: a schedule may change them before a block's turn comes."""
        return [options_of(group) for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers give it. All states are brought to memory for it; `save_training` streams them instead."""
        whole = super().state_dict()
        states = {index: self.state_of(parameter) for index, parameter in enumerate(self.in_order())}
        whole["state"] = {
            index: {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
            for index, state in states.items()
            if state
        }
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From `state_dict` of this class or of the plain optimizer over the same parameters."""
        self.wait()
        self._begin_anew()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.states.clear()
        states = state_dict["state"]
        self.give_states((parameter, states.get(index, {})) for index, parameter in enumerate(self.in_order()))
        self._half_done = ""

    def give_states(self, states: Iterable[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Put whole states of parameters to where each of these rests now; other parameters keep theirs."""
        self.wait()
        by_block: dict[str, dict[str, dict[str, Any]]] = {}
        for parameter, state in states:
            if not state:
                continue
            if id(parameter) not in self._trained.places:
                assert self._resident is not None
                self._resident.state[parameter] = {
                    key: value.to(parameter.device, copy=True) if is_like(value, parameter) else value
                    for key, value in state.items()
                }
                continue
            block, path = self._trained.places[id(parameter)]
            by_block.setdefault(block, {})[path] = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
            }
        for block, by_path in by_block.items():
            self.states.give(block, by_path)

    def close(self) -> None:
        """Give the memory and files of gradients and states back; the model stays fitted."""
        try:
            self.wait()
        finally:
            if self._running.after_backward == self._after_backward:
                self._running.after_backward = None
            while self._handles:
                self._handles.pop().remove()
            self.gradients.clear()
            self.states.clear()
            self.fitted.ledger.release(self.fitted.memory_level, WORKING)


def is_like(value: Any, parameter: nn.Parameter) -> bool:
    """Moments have their parameter's shape and belong on its device; a step count stays where its optimizer made it."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
