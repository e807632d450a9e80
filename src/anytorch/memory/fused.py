"""Adam and AdamW over weights in host memory by our own C++ loop, where it gives torch's bits; torch's own elsewhere.

A step of the optimizer on the host is limited by memory bandwidth and divisions. torch's fused kernel takes one tensor at a
time with all of torch's threads; ours takes all tensors of a block at once with as many threads as it is told, beside
whatever else the process computes, and scales the gradients (clipping) on the way. It is used only after it has given the
same bits as torch's kernel in this process: once for each kind (Adam, AdamW) and dtype, on random numbers, with one set of
options and without clipping. Other options and clipped gradients are compared by tests/memory/test_fused.py, not here.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anytorch import logs, native
from anytorch.errors import NativeUnavailable

log = logs.logger(__name__)
SOURCE = Path(__file__).parent / "code" / "adam.cpp"
DTYPES = (torch.float32, torch.bfloat16)
WHOLE = 32  # torch's vectors are at most so many elements; what is left after them it computes in another way
PROVED = 4096 * WHOLE
MOMENTS = ("exp_avg", "exp_avg_sq")
BUILD = ("-ffp-contract=off",)  # every fused multiply-add is written out
PLAIN = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


class Span(ctypes.Structure):
    """AdamSpan of adam.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "gradient", "mean", "square")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("bfloat16", "decoupled")),
        *((name, ctypes.c_float) for name in ("decay", "mean_rate", "square_keep", "square_rate", "step_size")),
        *((name, ctypes.c_float) for name in ("correction", "epsilon", "scale")),
        ("scaled", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Update:
    """One parameter's step: its tensors are changed in place, the step count too. The weight may lie in several places."""

    weight: Sequence[torch.Tensor]
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]


def kind_of(factory: Any) -> str | None:
    """ "adam" or "adamw" for the two optimizers we can stand in for; a subclass may compute something else."""
    return {torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}.get(factory)


def can_do(kind: str | None, update: Update) -> bool:
    """True if our kernel gives the same bits as torch's fused one for this step."""
    options, tensors = update.options, (*update.weight, update.gradient, *(update.state.get(k) for k in MOMENTS))
    if kind is None or not options.get("fused") or any(options.get(key) != value for key, value in PLAIN.items()):
        return False
    if not isinstance(options["lr"], float) or not 0.5 < options["betas"][0] <= 1.0 or "step" not in update.state:
        return False
    dtype = update.gradient.dtype
    if dtype not in DTYPES or not all(
        t is not None and t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    ):
        return False
    if update.weight[-1].numel() < update.gradient.numel() % WHOLE:
        return False  # the last elements, which torch computes, lie in two places
    return proved(decoupled(kind, options), dtype)


def decoupled(kind: str, options: Mapping[str, Any]) -> bool:
    return bool(kind == "adamw" or options.get("decoupled_weight_decay"))


def step(kind: str, updates: Sequence[Update], scale: float | None, threads: int) -> None:
    """Do the steps of several parameters, all of which `can_do` agreed to. A MemoryError has changed nothing."""
    library = _library()
    assert library is not None
    parts = []
    for update in updates:
        update.state["step"].add_(1)
        parts += _spans(update, decoupled(kind, update.options), scale)
    if library.anytorch_adam((Span * len(parts))(*parts), len(parts), max(1, threads)):
        for update in updates:
            update.state["step"].sub_(1)
        raise MemoryError("out of memory for the optimizer's step; no weight was changed")
    for update in updates:
        if update.gradient.numel() % WHOLE:
            _rest(kind, update, scale)


def _spans(update: Update, is_decoupled: bool, scale: float | None) -> list[Span]:
    options, count = update.options, float(update.state["step"])
    lr, (beta1, beta2), weight_decay = options["lr"], options["betas"], options["weight_decay"]
    decay = weight_decay
    if is_decoupled:
        decay = 1 - lr * weight_decay if weight_decay else 1.0
    # In double precision, then rounded once: as torch does.
    spread = Span(
        bfloat16=update.gradient.dtype == torch.bfloat16,
        decoupled=is_decoupled,
        decay=decay,
        mean_rate=1 - beta1,
        square_keep=beta2,
        square_rate=1 - beta2,
        step_size=-(lr / (1 - beta1**count)),
        correction=math.sqrt(1 - beta2**count),
        epsilon=options["eps"],
        scale=1.0 if scale is None else scale,
        scaled=scale is not None,
    )
    spans, at = [], 0
    left = update.gradient.numel() // WHOLE * WHOLE
    for part in update.weight:
        span = Span.from_buffer_copy(spread)
        span.weight = part.data_ptr()
        span.count = min(part.numel(), left)
        offset = at * part.element_size()
        span.gradient = update.gradient.data_ptr() + offset
        span.mean, span.square = (update.state[key].data_ptr() + offset for key in MOMENTS)
        at, left = at + span.count, left - span.count
        spans.append(span)
    return spans


def _rest(kind: str, update: Update, scale: float | None) -> None:
    """The last few elements of an odd-sized tensor, by torch's own kernel: it computes them in another order."""
    count = update.gradient.numel() % WHOLE
    weight, gradient, mean, square = (
        t.view(-1)[-count:] for t in (update.weight[-1], update.gradient, *(update.state[key] for key in MOMENTS))
    )
    if scale is not None:
        gradient = gradient * scale
    function = torch._fused_adamw_ if decoupled(kind, update.options) else torch._fused_adam_
    options = {key: update.options[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options |= dict(zip(("beta1", "beta2"), update.options["betas"], strict=True))
    function([weight], [gradient], [mean], [square], [], [update.state["step"]], **options)


# --- is it the same? -----------------------------------------------------------------------------------------------

_lock = threading.Lock()
_proofs: dict[tuple[bool, torch.dtype], bool] = {}


def proved(is_decoupled: bool, dtype: torch.dtype) -> bool:
    """True if our loop gave the same bits as torch's kernel, tried once per process and kind on random numbers."""
    with _lock:
        key = (is_decoupled, dtype)
        if key not in _proofs:
            _proofs[key] = _library() is not None and _agrees(is_decoupled, dtype)
            if not _proofs[key]:
                log.info("torch's own kernel does the optimizer's steps for %s", dtype)
        return _proofs[key]


def _agrees(is_decoupled: bool, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> torch.Tensor:
        return (torch.randn(PROVED + 5, generator=generator) * scale).to(dtype)

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "fused": True, **PLAIN}
    kind = "adamw" if is_decoupled else "adam"
    factory = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    theirs = torch.nn.Parameter(random(1.0))
    ours = theirs.detach().clone()
    optimizer = factory([theirs], lr=1e-3, weight_decay=0.01, fused=True)
    state = {"step": torch.zeros(()), **{key: torch.zeros_like(ours) for key in MOMENTS}}
    for scale in (1.0, 1e-4, 10.0):
        theirs.grad = random(scale)
        optimizer.step()
        step(kind, [Update([ours], theirs.grad, state, options)], None, 1)
    kept = optimizer.state[theirs]
    return torch.equal(ours, theirs.detach()) and all(torch.equal(state[key], kept[key]) for key in MOMENTS)


_loaded: list[ctypes.CDLL | None] = []


def _library() -> ctypes.CDLL | None:
    if not _loaded:
        try:
            library = native.load("adam", [SOURCE], flags=BUILD)
            # H: int32_t anytorch_adam(const AdamSpan* spans, int64_t count, int32_t threads)
            library.anytorch_adam.argtypes = [ctypes.POINTER(Span), ctypes.c_int64, ctypes.c_int32]
            library.anytorch_adam.restype = ctypes.c_int32
            _loaded.append(library)
        except NativeUnavailable as exc:
            log.info("torch does the optimizer's steps on the host: %s", exc)
            _loaded.append(None)
    return _loaded[0]
