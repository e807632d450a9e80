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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from anytorch import logs
from anytorch.errors import BudgetTooSmall, ModelError, UsageError
from anytorch.memory.buffers import parts_of
from anytorch.memory.fitting import fitted
from anytorch.memory.fused import DTYPES, MOMENTS, Update, can_do, decoupled, kind_of, proved
from anytorch.memory.fused import step as step_natively
from anytorch.memory.rewriting import write_back
from anytorch.memory.shelf import Shelf, Tensors, memory_level
from anytorch.memory.sizes import words
from anytorch.memory.streams import Copies
from anytorch.memory.updating import Updates

log = logs.logger(__name__)
Factory = Callable[..., torch.optim.Optimizer]
OF = "::"  # between a parameter's path and the name of its state
WORKING = "optimizer step"
Overlap = Literal["forward", "backward"] | None


class TieredOptimizer(torch.optim.Optimizer):
    """A torch optimizer over a fitted model: schedulers, parameter groups and state_dict work as usual.

    `factory` is any optimizer that treats every parameter by itself (SGD, Adam, AdamW, RMSprop, …). `clip_norm` clips the
    norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does; the gradients of parked weights are not in
    `parameter.grad`, so that function cannot. Call `backward` several times before `step` to accumulate gradients.

    `overlap` lets blocks in host memory be updated beside the device's work, with the same result to the last bit:
    None: a step is complete when it returns. "forward": `step` returns at once, and whoever needs a block next waits for
    it. "backward": besides, a block that is computed again in backward (`activations(model, "checkpoint")`) is updated as
    soon as backward is through with it. Then the first backward without `accumulate()` around it decides: a step can no
    longer be left out, and clipping, which needs all gradients first, is refused.
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
        if clip_norm is not None and clip_norm <= 0:
            raise UsageError(f"clip_norm is {clip_norm}; it must be above 0")
        if overlap not in (None, "forward", "backward"):
            raise UsageError(f"overlap is {overlap!r}; it can be None, 'forward' or 'backward'")
        if overlap == "backward" and clip_norm is not None:
            raise UsageError(
                "the norm of all gradients is known only after backward, so blocks cannot be updated during it",
                hint="overlap='forward' works with clip_norm",
            )
        self.fitted = fitted(model)
        self.factory = factory
        self.clip_norm = clip_norm
        self.last_norm: float | None = None  # of all gradients at the last step, before clipping
        defaults, self._moments = tried(factory, options)
        super().__init__(list(params) if params is not None else list(model.parameters()), defaults)
        running = self.fitted.running
        assert running is not None
        self._running = running
        homes = self.fitted.plan.homes
        wanted = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        self._blocks = {
            name: [(path, p) for path, p in zip(group.paths, group.parameters, strict=True) if id(p) in wanted]
            for name, group in self.fitted.found.groups.items()
            if homes[name] != "device"
        }
        self._blocks = {name: found for name, found in self._blocks.items() if found}
        self._refuse_packed()
        self._places = {id(p): (name, path) for name, found in self._blocks.items() for path, p in found}
        self._groups = {
            self._places[id(p)]: index
            for index, group in enumerate(self.param_groups)
            for p in group["params"]
            if id(p) in self._places
        }
        uses = Counter(name for unit in self.fitted.found.units for name in unit.blocks)
        self._alone = {u.name: [n for n in u.blocks if uses[n] == 1] for u in self.fitted.found.units}
        self.gradients = Shelf(self.fitted, "gradients")
        self.states = Shelf(self.fitted, "optimizer state")
        self.numbers: dict[str, dict[str, dict[str, Any]]] = {}  # state that is no tensor, by block and path
        self._pending: dict[str, Tensors] = {}  # of the block that backward is at
        self._down = Copies(self.fitted.device)
        self.overlap = overlap
        self._kind = kind_of(factory)
        if self._kind is not None and defaults.get("fused"):
            for dtype in {p.dtype for found in self._blocks.values() for _, p in found}.intersection(DTYPES):
                proved(decoupled(self._kind, defaults), dtype)  # compiled and compared now, not in the middle of a step
        self._updates = Updates(self.fitted.mover, list(self.fitted.found.groups))
        self._copied: dict[str, Any] = {}  # block → the event after which its gradients are in host memory
        self._early: set[str] = set()  # blocks that were updated, or wait for it, before the step was asked for
        self._accumulating = 0
        if overlap == "backward":
            running.forget_passes()
            running.after_backward = self._after_backward
        self._reserve_working_memory()
        self._resident = self._resident_optimizer()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._collect) for found in self._blocks.values() for _, p in found
        ]

    def _refuse_packed(self) -> None:
        """A file of codes is not written again, and a step's small changes would be lost in them."""
        for name, found in self._blocks.items():
            packing = self.fitted.packings.get(name)
            for path, _ in found:
                if packing and (path in packing.weights or self.fitted.plan.homes[name] == "disk"):
                    raise UsageError(
                        f"{path} is in a block that rests as {self.fitted.rest_format}, and cannot be trained there",
                        hint="fit the model without rest_format, freeze it (requires_grad_(False)), or keep what is "
                        "trained on the device with resident=[…]",
                    )

    def _reserve_working_memory(self) -> None:
        """A step holds one block's weights, gradients and states at once, as far as they do not rest in memory."""
        largest = max((sum(p.nbytes for _, p in found) for found in self._blocks.values()), default=0)
        ledger, level = self.fitted.ledger, memory_level(self.fitted)
        needed = (2 + self._moments) * largest
        try:
            ledger.reserve(level, WORKING, needed)
        except BudgetTooSmall as exc:
            keyword = "host_reserve" if level == "host" else "reserve"
            raise BudgetTooSmall(
                f"a step of the optimizer needs {words(needed)} at level {level} for its largest block, and "
                f"{words(ledger.free(level))} are free",
                hint=f"anytorch.memory.fit(model, …, {keyword}={needed}) keeps that much free",
            ) from exc

    def _resident_optimizer(self) -> torch.optim.Optimizer | None:
        """torch's own, for the parameters that live on the device."""
        groups = [
            {**options_of(group), "params": [p for p in group["params"] if self.is_resident(p)]}
            for group in self.param_groups
        ]
        return self.factory(groups) if any(group["params"] for group in groups) else None

    def is_resident(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and id(parameter) not in self._places

    # --- gradients -------------------------------------------------------------------------------------------------

    def _collect(self, parameter: torch.Tensor) -> None:
        """backward has a gradient: it leaves the device, and goes to the shelf when its block has all of them."""
        block, path = self._places[id(parameter)]
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        if block in self._early:
            raise UsageError(
                f"{path} was updated when the last backward was through with it, and now has another gradient",
                hint="call every backward but the last of a step within `with optimizer.accumulate():`; after a backward "
                "that was broken off go back to the last checkpoint (anytorch.memory.resume_training)",
            )
        if path in self._pending.get(block, ()):
            self._shelve(block)  # an earlier backward that some parameters of the block took no part in
        pending = self._pending.setdefault(block, {})
        pending[path] = self._to_host(gradient.detach())
        if len(pending) == len(self._blocks[block]):
            self._shelve(block)

    def _to_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in host memory: at once, or under way beside what the device computes (`_arrived` waits for it)."""
        if not self._down.asynchronous:
            return gradient.to("cpu", copy=gradient.device.type == "cpu" and is_shared(gradient))
        target = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        self._down.copy_after(self._down.computed())
        with self._down.use():
            target.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._down.stream)  # its memory is not given to others before the copy is done
        return target

    def _arrived(self) -> None:
        self._down.synchronize()

    def _shelve(self, block: str) -> None:
        """Add the gradients of this backward to those of earlier ones."""
        new = self._pending.pop(block)
        if block in self.gradients:
            self._arrived()
        there = self.gradients.take(block)
        for path, gradient in new.items():
            if path in there:
                there[path].add_(gradient)
            else:
                there[path] = gradient
        self.gradients.put(block, there, before_disk=self._arrived)
        self._copied[block] = self._down.copied()

    def _gathered(self) -> list[str]:
        """Blocks with gradients that no update has taken on, in the order that backward made them.

        The queue is looked at first: an update gives its gradients up before it leaves the queue, so one that ends
        between the two looks is not taken for a block with new gradients.
        """
        queued = self._updates.names()
        return [block for block in self.gradients.blocks() if block not in queued]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward within it only adds up gradients: with overlap="backward", for all backwards of a step but the last."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._pending.clear()
        for block in self._gathered():
            self.gradients.drop(block)
        if self._resident is not None:
            self._resident.zero_grad(set_to_none)

    # --- the step --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Blocks are done one after another, each complete before the next."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._updates.failed():
            self._updates.wait()
        with torch.no_grad():
            for block in list(self._pending):  # some of their parameters took no part in this pass
                self._shelve(block)
            if self.clip_norm is not None:
                self._arrived()
            gathered = self._gathered()
            scale = self._clipping(gathered)
            if self._resident is not None:
                for group in self._resident.param_groups:
                    for parameter in group["params"]:
                        if scale is not None and parameter.grad is not None:
                            parameter.grad.mul_(scale.to(parameter.grad.device))
                for own, outer in zip(self._resident.param_groups, self.param_groups, strict=True):
                    own.update(options_of(outer))
                self._resident.step()
            self._step_blocks(gathered, scale)
        self._begin_anew()
        return loss

    def _begin_anew(self) -> None:
        """What comes now is the first pass of a step."""
        self._early.clear()
        self._running.forget_passes()

    def _step_blocks(self, gathered: Sequence[str], scale: torch.Tensor | None) -> None:
        # In the order that backward made them: the first ones have arrived while the device is still at the last ones.
        waiting = list(gathered)
        options = self._options()
        if self.overlap is not None:
            for block in [block for block in waiting if block in self.fitted.mover.host]:
                self._queue(block, scale, options)
                waiting.remove(block)
        if waiting:
            self._updates.wait()  # blocks on disk are written one at a time
        try:
            for block in waiting:
                self._update_at_home(block, scale, options)
        finally:
            if waiting:
                self.fitted.mover.forget_all()  # the ring has the old weights, also of a step that was broken off
        self.fitted.mover.fetch_ahead()

    def _after_backward(self, step: str) -> None:
        """Backward needs this step's blocks no more: those with all their gradients are updated beside the rest of it."""
        if self._accumulating:
            return
        for block in self._alone.get(step, ()):
            if block in self.gradients and block not in self._pending and block in self.fitted.mover.host:
                self._queue(block, None, self._options())
                self._early.add(block)

    def _queue(self, block: str, scale: torch.Tensor | None, options: Sequence[Mapping[str, Any]]) -> None:
        event = self._copied.get(block)
        ready = event.query if event is not None else _at_once
        self._updates.add(block, partial(self._update_at_home, block, scale, options), ready)

    def wait(self) -> None:
        """Return when all weights and states are those of the last step. Raises ModelError if one could not be updated."""
        self._updates.wait()

    def give_up(self) -> None:
        """Forget the step that is under way, failed or broken off: all weights and states are about to be new ones."""
        try:
            self.wait()
        except ModelError as exc:
            log.warning("%s: it is given up, as the weights go back to a checkpoint", exc.message)
        self.zero_grad()
        self._begin_anew()

    def _options(self) -> list[dict[str, Any]]:
        """The groups' options as they are now: a schedule may change them before a block's turn comes."""
        return [options_of(group) for group in self.param_groups]

    def _clipping(self, gathered: Sequence[str]) -> torch.Tensor | None:
        """The factor that torch.nn.utils.clip_grad_norm_ would multiply all gradients by, from the same norms."""
        if self.clip_norm is None:
            return None
        norms: dict[int, torch.Tensor] = {}
        for block in gathered:
            found = self.gradients.take(block)
            for path, parameter in self._blocks[block]:
                if path in found:
                    norms[id(parameter)] = torch.linalg.vector_norm(found[path])
        ordered = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in norms:
                    ordered.append(norms[id(parameter)])
                elif self.is_resident(parameter) and parameter.grad is not None:
                    ordered.append(torch.linalg.vector_norm(parameter.grad).cpu())
        if not ordered:
            return None
        total = torch.linalg.vector_norm(torch.stack(ordered))
        self.last_norm = float(total)
        return torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)

    def _update_at_home(self, block: str, scale: torch.Tensor | None, options: Sequence[Mapping[str, Any]]) -> None:
        """One block's step on the CPU. Gradients that another thread works with are given up by it."""
        event = self._copied.pop(block, None)
        if event is not None:
            event.synchronize()
        with torch.no_grad():
            gradients = self.gradients.take(block)
            if not self._update_natively(block, gradients, scale, options):
                self._update(block, gradients, scale, options)
        if block in self._updates:
            self.gradients.drop(block)

    def _update_natively(
        self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Sequence[Mapping[str, Any]]
    ) -> bool:
        """By our own loop, where it gives the bits of torch's. False, with nothing changed, where it does not."""
        if self._kind is None or block not in self.fitted.mover.host:
            return False
        states, pieces = self.states.take(block), self.fitted.mover.host[block]
        views = {view.name: view for view in self.fitted.images[block].views}
        updates = []
        for path, gradient in gradients.items():
            state = {key: states[name] for key in (*MOMENTS, "step") if (name := f"{path}{OF}{key}") in states}
            view = views[path]
            dtype: torch.dtype = getattr(torch, view.dtype)
            weight = [part.view(dtype) for part in parts_of(pieces, view.offset, view.nbytes)]
            update = Update(weight, gradient, state, options[self._groups[block, path]])
            if not can_do(self._kind, update):
                return False
            updates.append(update)
        step_natively(self._kind, updates, None if scale is None else float(scale), torch.get_num_threads())
        self.states.put(block, states)
        return True

    def _update(
        self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Sequence[Mapping[str, Any]]
    ) -> None:
        resting = self._running.at_home(block)
        home = self.fitted.mover.host.get(block, [])
        # Weights that lie in host memory in one piece are updated where they are; others in a copy that is written back.
        weights = {path: t if lies_in(t := resting[path], home) else t.clone() for path in gradients}
        shadows = {path: nn.Parameter(weight) for path, weight in weights.items()}
        for path, shadow in shadows.items():
            shadow.grad = gradients[path] if scale is None else gradients[path] * scale
        inner = self._inner(block, shadows, options)
        self._give_states(block, inner, shadows)
        inner.step()
        self._keep_states(block, inner, shadows)
        copies = {path: shadow.detach() for path, shadow in shadows.items() if not lies_in(shadow, home)}
        if copies:
            write_back(self.fitted, block, copies)

    def _inner(
        self, block: str, shadows: Mapping[str, nn.Parameter], options: Sequence[Mapping[str, Any]]
    ) -> torch.optim.Optimizer:
        """The optimizer over one block's weights on the CPU, with the options of the groups they belong to."""
        members: dict[int, list[nn.Parameter]] = {}
        for path, shadow in shadows.items():
            members.setdefault(self._groups[block, path], []).append(shadow)
        return self.factory([{**options[index], "params": mine} for index, mine in sorted(members.items())])

    def _give_states(self, block: str, inner: torch.optim.Optimizer, shadows: Mapping[str, nn.Parameter]) -> None:
        stored = self.states.take(block)
        for path, shadow in shadows.items():
            state = dict(self.numbers.get(block, {}).get(path, {}))
            prefix = f"{path}{OF}"
            state.update({key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)})
            if state:
                inner.state[shadow] = state

    def _keep_states(self, block: str, inner: torch.optim.Optimizer, shadows: Mapping[str, nn.Parameter]) -> None:
        tensors = self.states.take(block)
        for path, shadow in shadows.items():
            for key, value in inner.state.get(shadow, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}{OF}{key}"] = value
                else:
                    self.numbers.setdefault(block, {}).setdefault(path, {})[key] = value
        if tensors:
            self.states.put(block, tensors)

    # --- state -----------------------------------------------------------------------------------------------------

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """A parameter's optimizer state, on the CPU for one that does not live on the device."""
        self.wait()
        if id(parameter) not in self._places:
            return dict(self._resident.state.get(parameter, {})) if self._resident is not None else {}
        block, path = self._places[id(parameter)]
        prefix = f"{path}{OF}"
        found: dict[str, Any] = dict(self.numbers.get(block, {}).get(path, {}))
        for key, tensor in self.states.take(block).items():
            if key.startswith(prefix):
                found[key.removeprefix(prefix)] = tensor
        return found

    def set_resident_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Give a parameter that lives on the device its state back."""
        assert self._resident is not None
        self._resident.state[parameter] = {
            key: value.to(parameter.device, copy=True) if is_like(value, parameter) else value
            for key, value in state.items()
        }

    def state_dict_groups(self) -> list[dict[str, Any]]:
        return [options_of(group) for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizers give it. All states are brought to memory for it; `save_training` streams them instead."""
        whole = super().state_dict()
        order = [p for group in self.param_groups for p in group["params"]]
        states = {index: self.state_of(parameter) for index, parameter in enumerate(order)}
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
        order = [p for group in self.param_groups for p in group["params"]]
        self.states.clear()
        self.numbers.clear()
        self.give_states((parameter, state_dict["state"].get(index, {})) for index, parameter in enumerate(order))

    def give_states(self, states: Iterable[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Whole states of parameters, to where each of these rests now; other parameters keep theirs."""
        self.wait()
        by_block: dict[str, Tensors] = {}
        for parameter, state in states:
            if id(parameter) not in self._places:
                if state:
                    self.set_resident_state(parameter, state)
                continue
            block, path = self._places[id(parameter)]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    by_block.setdefault(block, {})[f"{path}{OF}{key}"] = value.detach().to("cpu", copy=True)
                else:
                    self.numbers.setdefault(block, {}).setdefault(path, {})[key] = value
        for block, tensors in by_block.items():
            self.states.put(block, {**self.states.take(block), **tensors})

    def close(self) -> None:
        """Give the memory and files of gradients and states back; the model stays fitted."""
        try:
            self.wait()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._running.after_backward == self._after_backward:
            self._running.after_backward = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending.clear()
        self.gradients.clear()
        self.states.clear()
        self.fitted.ledger.release(memory_level(self.fitted), WORKING)


def tried(factory: Factory, options: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """An optimizer's defaults, and how many tensors it keeps for each parameter: seen by letting it take one step."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = factory([parameter], **options)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    return optimizer.defaults, sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in kept)


def _at_once() -> bool:
    return True


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_like(value: Any, parameter: nn.Parameter) -> bool:
    """Moments have their parameter's shape and belong on its device; a step count stays where its optimizer made it."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def lies_in(tensor: torch.Tensor, pieces: list[torch.Tensor]) -> bool:
    address = tensor.data_ptr()
    return any(piece.data_ptr() <= address < piece.data_ptr() + piece.numel() for piece in pieces)


def is_shared(gradient: torch.Tensor) -> bool:
    """May something else own this memory (a view of another gradient)?"""
    return gradient._base is not None or gradient.untyped_storage().nbytes() != gradient.nbytes
