"""A compiled graph beside the one it was made from: whichever takes less time as it is called, launches and all.

Regions are chosen one by one. What lies between them is called by Python, where eager torch's own modules and its autograd
are C++ in part: a small model of which nothing is fused would be slower compiled than not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from anytorch import logs, settings
from anytorch.devices.oom import is_out_of_memory
from anytorch.devices.stopwatch import stopwatch_of
from anytorch.graph.clock import unobserved

log = logs.logger(__name__)

OWN = ("aten", "prim", "prims", "quantized", "anytorch")  # whose ops do nothing but compute
ROUNDS, CALLS = 5, 3  # of each, in turns
LONG_S = (
    0.02  # a call that takes longer is timed by itself: the clock is exact enough, and the first call waits for this
)
GAIN = 0.99  # of eager torch's time: what is no faster is not worth its memory


def faster_of(
    module: GraphModule, ours: Callable[..., Any], records: Callable[[], bool] = lambda: False
) -> Callable[..., Any]:
    """`ours` beside the module it was compiled from; or `ours` alone where one call must stay one call.

    Other processes wait in a collective, and each would compare as often as its own clock says; what a stranger's op does
    besides computing, nobody knows.
    """
    strange = next((name for name in _namespaces(module) if name not in OWN), None)
    if strange is not None:
        log.info(
            "compiled and eager are not compared: the graph calls an op of %s, which is called once for each call",
            strange,
        )
        return ours
    return Faster(module.forward, ours, records)


def _namespaces(module: GraphModule) -> Iterator[str]:
    """Of the registered ops that it calls, and that its branches and loops call."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload):
                yield node.target.namespace
            elif isinstance(node.target, torch._ops.OpOverloadPacket):
                yield node.target._qualified_op_name.split("::")[0]


class Faster:
    """Calls `ours` once, times both on copies of what it was called with, and is the faster one from then on.

    `records`: are commands being recorded, to be replayed without the host? Then it is `ours`, whichever is faster called.
    """

    def __init__(
        self, plain: Callable[..., Any], ours: Callable[..., Any], records: Callable[[], bool] = lambda: False
    ) -> None:
        self._plain, self._ours, self._records = plain, ours, records
        self._chosen: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._records():
            return self._ours(*inputs)
        if self._chosen is not None:
            return self._chosen(*inputs)
        before = _versions(inputs)
        made = self._ours(*inputs)
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        if len(devices) != 1 or _is_being_recorded(*devices):
            return made  # another call may be one that can be repeated
        changed = [first is None or first != second for first, second in zip(before, _versions(inputs), strict=True)]
        try:
            self._chosen = self._measured(inputs, changed, *devices)
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            log.info("compiled and eager were not compared: no memory for a second run")
            self._chosen = self._ours
        return made

    def _measured(self, inputs: Sequence[Any], changed: Sequence[bool], device: torch.device) -> Callable[..., Any]:
        seconds = stopwatch_of(device).seconds
        limit = time.perf_counter() + float(settings.get("measure_s"))
        sides = {"eager torch": self._plain, "kernel graphs": self._ours}
        least = dict.fromkeys(sides, float("inf"))
        kept: dict[str, Any] = {"devices": []}
        if device.type != "cpu":
            kept = {"devices": [device.index or 0], "device_type": device.type}
        with unobserved(), torch.random.fork_rng(**kept):
            for run in sides.values():  # what is compiled at the first call is compiled now
                _step(run, inputs, changed)
            for number in range(ROUNDS):
                for name, run in sides.items():
                    calls = 1 if number == 0 or least[name] > LONG_S else CALLS
                    took = seconds(lambda run=run: _step(run, inputs, changed), calls)  # type: ignore[misc]
                    least[name] = min(least[name], took)
                if number and time.perf_counter() > limit:
                    break
        chosen = "kernel graphs" if least["kernel graphs"] < GAIN * least["eager torch"] else "eager torch"
        log.info("%s: %s", chosen, ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in least.items()))
        return sides[chosen]


def _versions(inputs: Sequence[Any]) -> list[int | None]:
    """How often each has been written to; None where torch does not count that (tensors made in inference mode)."""
    return [
        (None if value.is_inference() else value._version) if isinstance(value, torch.Tensor) else 0 for value in inputs
    ]


def _is_being_recorded(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    return bool(getattr(module, "is_current_stream_capturing", lambda: False)())


def _step(run: Callable[..., Any], inputs: Sequence[Any], changed: Sequence[bool]) -> None:
    """One call, and its gradients where some are asked for, on leaves of its own: nobody's `.grad` and no hook is touched,
    and what the graph writes to is a copy."""
    leaves = []
    for value, written in zip(inputs, changed, strict=True):
        if not isinstance(value, torch.Tensor):
            leaves.append(value)
            continue
        leaf = value.detach().clone() if written else value.detach()
        leaves.append(leaf.requires_grad_(value.requires_grad))
    made = run(*leaves)
    if not torch.is_grad_enabled():
        return
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    results = [one for one in _tensors(made) if one.requires_grad]
    if wanted and results:
        torch.autograd.grad(results, wanted, [torch.ones_like(one) for one in results], allow_unused=True)


def _tensors(made: Any) -> list[torch.Tensor]:
    return [one for one in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(one, torch.Tensor)]
