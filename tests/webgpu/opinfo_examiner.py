"""What the operator suite's workers do (`opinfo`): run an entry's samples on the device and on the CPU, and compare.

    python -m tests.webgpu.opinfo_examiner

answers tasks, a JSON object per line on standard input and one on standard output.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
SAMPLES = 6
LOOKED_AT = 60  # samples a generator is asked for before SAMPLES of them are picked, evenly spread

# rtol, atol. The half types' are PyTorch's own (torch.testing); float32's are wider, since the CPU's own kernels differ.
TOLERANCE = {
    "float32": (2e-4, 2e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float64": (1e-6, 1e-7),
    "complex64": (2e-4, 2e-5),
    "complex128": (1e-6, 1e-7),
}


# Beyond PyTorch's tolerance for half types, and farther from the exact result than the CPU: compared by ours of old, with
# the reason.
WIDER = {"float16": (6e-3, 8e-3), "bfloat16": (4e-2, 7e-2)}
LISTED: dict[tuple[str, str], str] = {
    ("acos", "float16"): "its gradient is rounded to the half type between steps: one unit in the last place",
    **dict.fromkeys(
        (("nn.functional.linear_cross_entropy.chunked_none", half) for half in WIDER),
        "a small loss is the difference of large logits, which are rounded to the half type",
    ),
}


@dataclass
class Verdict:
    op: str
    dtype: str
    status: str  # "agree", "wrong", "error", "not comparable"
    reason: str = ""
    samples: int = 0
    compared: int = 0
    gradients: int = 0
    kind_only: int = 0  # samples of which only shape and dtype could be compared: random, or whatever was in memory
    as_near: int = 0  # results beyond the tolerance, but as near to the exact ones as the CPU's
    fallbacks: list[str] = field(default_factory=list)
    seconds: float = 0.0


class NotComparable(Exception):
    """The CPU cannot, or no dense device could."""


class Wrong(Exception):
    pass


def entry_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


class Examiner:
    """One process's op_db and device."""

    def __init__(self) -> None:
        import torch
        from torch.testing._internal.common_methods_invocations import op_db

        import anytorch.webgpu  # noqa: F401  (registers the device)
        from anytorch.gpu.runtime import open_runtime

        # PyTorch's tests forbid their process to set cuDNN's flags; other tests of this process may.
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
        torch.set_num_threads(1)
        torch.manual_seed(0)
        open_runtime()
        self.torch = torch
        self.device = torch.device("webgpu", 0)
        self.entries = {entry_name(op): op for op in op_db}
        self.kind_only = self.as_near = 0  # of the entry being examined
        self.entry = ""

    def tasks(self) -> list[tuple[str, str]]:
        found = []
        for name, op in self.entries.items():
            supported = op.supported_dtypes("cpu")
            found += [(name, dtype) for dtype in DTYPES if getattr(self.torch, dtype) in supported]
        return found

    def examine(self, name: str, dtype_name: str, every: bool = False) -> Verdict:
        torch = self.torch
        op, dtype = self.entries[name], getattr(torch, dtype_name)
        self.entry = name
        verdict = Verdict(name, dtype_name, "not comparable")
        torch.webgpu.reset_fallback_stats()
        started = time.monotonic()
        floating = dtype.is_floating_point and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        try:
            samples = self.samples(op, dtype, floating, every)
        except Exception as exc:  # noqa: BLE001  (a generator that cannot make its samples here says nothing about us)
            verdict.reason = f"no samples: {brief(exc)}"
            return verdict
        verdict.samples = len(samples)
        troubles: list[str] = []
        skipped: list[str] = []
        self.kind_only = self.as_near = 0
        for number, (label, sample, function) in enumerate(samples):
            try:
                verdict.gradients += self.compare(op, function, sample, dtype_name, floating)
                verdict.compared += 1
            except NotComparable as exc:
                skipped.append(str(exc))
            except Wrong as exc:
                troubles.append(f"wrong: {label} {number}: {exc}")
            except Exception as exc:  # noqa: BLE001  (any error is the verdict)
                troubles.append(f"error: {label} {number}: {brief(exc)}")
        if troubles:
            # A wrong answer is worse than an error: it is what is reported.
            troubles.sort(key=lambda line: not line.startswith("wrong"))
            verdict.status, _, verdict.reason = troubles[0].partition(": ")
            if every:
                verdict.reason = "\n    ".join(troubles)
        elif verdict.compared:
            verdict.status = "agree"
        else:
            verdict.reason = skipped[0] if skipped else "no samples"
        verdict.kind_only, verdict.as_near = self.kind_only, self.as_near
        verdict.fallbacks = sorted(torch.webgpu.fallback_stats())
        verdict.seconds = round(time.monotonic() - started, 2)
        return verdict

    def samples(self, op: Any, dtype: Any, floating: bool, every: bool) -> list[tuple[str, Any, Any]]:
        torch = self.torch
        torch.manual_seed(0)
        made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=floating), LOOKED_AT))
        if not every and len(made) > SAMPLES:
            made = [made[i * (len(made) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]
        found = [("sample", sample, op.op) for sample in made]
        if made and isinstance(made[0].input, torch.Tensor) and made[0].input.layout is torch.strided:
            if op.name not in UNINITIALISED:
                found.append(("non-contiguous sample", made[0].noncontiguous(), op.op))
            if op.inplace_variant is not None and op.supports_inplace_autograd is not None:
                found.append(("in-place sample", made[0], _in_place(op.inplace_variant)))
        return found

    def compare(self, op: Any, function: Any, sample: Any, dtype: str, floating: bool) -> int:
        """Raises unless the device agrees; returns how many gradients were compared."""
        torch = self.torch
        host = self.placed(sample, "cpu")
        first = self.call(function, host, 0, NotComparable)
        again = self.call(function, self.placed(sample, "cpu"), 1, NotComparable)
        same = _equal(torch, first, again)
        ours = self.placed(sample, self.device, stay=op.name in ARGUMENTS_STAY)
        result = self.call(function, ours, 0, None)
        if op.name in UNINITIALISED or op.name in RANDOM or _drops(op, sample) or not same:
            # Random, or whatever was in memory: its kind is all there is to compare.
            self.check(first, result, values=False, where="result")
            self.kind_only += 1
            return 0
        if op.name in STATISTICS:
            rounded = [b.to(a.dtype) for a, b in zip(first[1:], result[1:], strict=True)]
            result = (result[0], *rounded)
        if op.name in TIES and not sample.kwargs.get("stable"):
            self.check(first, result, values=False, where="result")
            if op.name == "argsort":
                self.kind_only += 1
                return 0
            if isinstance(first, tuple):
                first, result = (first[0],), (result[0],)
            floating = (
                floating and dtype == "float32"
            )  # a gradient goes to the element named; half ones are often equal
        try:
            self.check(first, result, values=True, where="result")
        except Wrong:
            if not self.as_exact(function, sample, first, result):
                raise
            self.as_near += 1
        if not floating:
            return 0
        return self.gradients(host, first, ours, result, function, sample)

    def call(self, function: Any, sample: Any, seed: int, refusal: type[Exception] | None) -> Any:
        torch = self.torch
        torch.manual_seed(seed)
        try:
            result = function(sample.input, *sample.args, **sample.kwargs)
        except Exception as exc:
            if refusal is None:
                raise
            raise refusal(f"the CPU says: {brief(exc)}") from exc
        for value in self.flat(result):
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                raise NotComparable("a sparse result")
        return result

    def placed(self, sample: Any, device: Any, dtype: Any = None, stay: bool = False) -> Any:
        """A copy of a sample with its tensors on `device`, as leaves of autograd; with `stay`, only the input is moved."""
        torch = self.torch

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    raise NotComparable("a sparse sample")
                plain = value.detach()
                if dtype is not None and plain.is_floating_point():
                    plain = plain.to(dtype)
                moved = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype) if _dense(plain) else None
                moved = plain.clone() if moved is None else moved.copy_(plain)
                if torch.device(device).type != "cpu":
                    moved = moved.to(device)
                return moved.requires_grad_(value.requires_grad)
            if isinstance(value, torch.device) and value.type == "cpu":
                return torch.device(device)
            if value == "cpu" and isinstance(value, str):
                return str(device)
            if (
                dtype is not None
                and value in (torch.float16, torch.bfloat16, torch.float32)
                and isinstance(value, torch.dtype)
            ):
                return dtype
            return value

        def walk(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                items = [walk(item) for item in value]
                if isinstance(value, torch.Size):
                    return value
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            if isinstance(value, dict):
                return {key: walk(item) for key, item in value.items()}
            return move(value)

        from torch.testing._internal.opinfo.core import SampleInput

        if stay:
            return SampleInput(walk(sample.input), args=tuple(sample.args), kwargs=dict(sample.kwargs))
        return SampleInput(walk(sample.input), args=walk(tuple(sample.args)), kwargs=walk(dict(sample.kwargs)))

    def flat(self, value: Any) -> list[Any]:
        from torch.utils._pytree import tree_flatten

        return list(tree_flatten(value)[0])

    def check(self, expected: Any, found: Any, *, values: bool, where: str) -> None:
        torch = self.torch
        wanted, have = self.flat(expected), self.flat(found)
        if len(wanted) != len(have):
            raise Wrong(f"{where}: {len(have)} values instead of {len(wanted)}")
        for i, (a, b) in enumerate(zip(wanted, have, strict=True)):
            if not isinstance(a, torch.Tensor):
                if values and not (a == b or (a != a and b != b) or _close(a, b)):
                    raise Wrong(f"{where} {i}: {b!r} instead of {a!r}")
                continue
            if not isinstance(b, torch.Tensor):
                raise Wrong(f"{where} {i}: {type(b).__name__} instead of a tensor")
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Wrong(f"{where} {i}: {b.dtype} {list(b.shape)} instead of {a.dtype} {list(a.shape)}")
            if values:
                self.close(a.detach(), b.detach().cpu(), f"{where} {i}")

    def close(self, a: Any, b: Any, where: str) -> None:
        name = str(a.dtype)[6:]
        rtol, atol = (WIDER if (self.entry, name) in LISTED else TOLERANCE).get(name, (0.0, 0.0))
        try:
            self.torch.testing.assert_close(b.resolve_conj(), a.resolve_conj(), rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as exc:
            raise Wrong(f"{where}: {brief(exc)}") from exc

    def as_exact(self, function: Any, sample: Any, first: Any, result: Any) -> bool:
        """Are we as near to the exact result (in float64) as the CPU is?"""
        torch = self.torch
        try:
            exact = self.call(function, self.placed(sample, "cpu", torch.float64), 0, NotComparable)
        except NotComparable:
            return False
        # With ties only the first of (values, indices) is left to compare.
        for truth, cpu, ours in zip(self.flat(exact), self.flat(first), self.flat(result), strict=False):
            if not isinstance(truth, torch.Tensor):
                continue
            if ours.dtype is not cpu.dtype or ours.shape != cpu.shape:
                return False
            if not truth.is_floating_point():
                if not torch.equal(ours.detach().cpu(), cpu.detach()):
                    return False
            elif not _as_near(truth.detach(), cpu.detach(), ours.detach()):
                return False
        return True

    def gradients(self, host: Any, first: Any, ours: Any, result: Any, function: Any, sample: Any) -> int:
        torch = self.torch

        def leaves(placed: Any) -> list[Any]:
            flat = self.flat((placed.input, placed.args, placed.kwargs))
            return [v for v in flat if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf]

        def outputs(value: Any) -> list[Any]:
            return [v for v in self.flat(value) if isinstance(v, torch.Tensor) and v.requires_grad]

        wanted, have = outputs(first), outputs(result)
        if len(wanted) != len(have):
            raise Wrong(f"{len(have)} of the results require grad instead of {len(wanted)}")
        if not wanted or not leaves(host):
            return 0
        generator = torch.Generator().manual_seed(7)

        def cotangent(like: Any) -> Any:
            return torch.randn(like.shape, dtype=torch.float64, generator=generator).to(like.dtype)

        weights = [cotangent(v) for v in wanted]
        try:
            expected = torch.autograd.grad(wanted, leaves(host), weights, allow_unused=True)
        except RuntimeError as exc:
            raise NotComparable(f"the CPU's backward says: {brief(exc)}") from exc
        found = torch.autograd.grad(have, leaves(ours), [w.to(self.device) for w in weights], allow_unused=True)
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if (a is None) != (b is None):
                raise Wrong(
                    f"gradient {i}: {'none' if b is None else 'one'} where the CPU has {'none' if a is None else 'one'}"
                )
            if a is None:
                continue
            try:
                self.close(a, b.detach().cpu(), f"gradient {i}")
            except Wrong:
                if not self.gradient_as_exact(function, sample, weights, i, a, b):
                    raise
                self.as_near += 1
        return len(expected)

    def gradient_as_exact(self, function: Any, sample: Any, weights: Sequence[Any], i: int, a: Any, b: Any) -> bool:
        torch = self.torch
        try:
            placed = self.placed(sample, "cpu", torch.float64)
            outs = [
                v
                for v in self.flat(self.call(function, placed, 0, NotComparable))
                if isinstance(v, torch.Tensor) and v.requires_grad
            ]
            flat = self.flat((placed.input, placed.args, placed.kwargs))
            leaves = [v for v in flat if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf]
            exact = torch.autograd.grad(
                outs, leaves, [w.to(o.dtype) for w, o in zip(weights, outs, strict=True)], allow_unused=True
            )
        except (NotComparable, RuntimeError):
            return False
        return exact[i] is not None and _as_near(exact[i], a.detach(), b.detach())


def _as_near(truth: Any, cpu: Any, ours: Any) -> bool:
    """Is our largest error no more than twice the CPU's? Both against the exact result; infinities and NaN agree exactly.

    For results of a half type that are sums of larger terms: there the CPU itself is units away, each time elsewhere.
    """
    import torch

    truth, cpu, ours = truth.double(), cpu.double(), ours.cpu().double()
    if truth.shape != ours.shape or not torch.equal(truth.isfinite(), ours.isfinite()):
        return False
    if truth.numel() == 0:
        return True
    error, allowed = (ours - truth).abs().nan_to_num().max(), (cpu - truth).abs().nan_to_num().max()
    rounding = 1e-6 * truth.abs().nan_to_num().max()
    return bool(error <= 2 * allowed + rounding)


# Their values are whatever was in memory.
UNINITIALISED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
}  # fmt: skip


# Random with a seed of the entry's own, so that the CPU gives one answer; a device has a generator of its own. (Other random
# ops are found by their two answers to two seeds.)
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform", "pca_lowrank",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu", "rand_like", "randint", "randint_like", "randn", "randn_like", "svd_lowrank",
}  # fmt: skip

# Which of equal elements is named is nobody's promise; the values are.
TIES = {"argsort", "kthvalue", "median", "mode", "msort", "nanmedian", "sort", "topk", "cummax", "cummin"}

# The saved mean and deviation of half-precision norms: float32 here as on CUDA; the CPU alone rounds them to the input's
# dtype (torch._refs.native_layer_norm and torch._decomp.native_batch_norm_helper say so). Compared after rounding.
STATISTICS = {
    "native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
}  # fmt: skip

# Their other tensors must be on the CPU, whatever device the input is on.
ARGUMENTS_STAY = {"tensor_split"}


def _drops(op: Any, sample: Any) -> bool:
    """Does this sample of an attention op drop elements at random?"""
    if op.name == "nn.functional.multi_head_attention_forward":
        return bool(sample.args[9] > 0.0 and sample.kwargs.get("training", True))
    return bool(sample.kwargs.get("dropout_p", 0.0) > 0.0)


def _in_place(variant: Any) -> Any:
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        # A leaf that requires grad may not be written; a copy may.
        return variant(value.clone(), *args, **kwargs)

    return call


def _dense(tensor: Any) -> bool:
    import torch

    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _equal(torch: Any, first: Any, again: Any) -> bool:
    from torch.utils._pytree import tree_flatten

    for a, b in zip(tree_flatten(first)[0], tree_flatten(again)[0], strict=True):
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape:
                return False
            if (
                not torch.allclose(a.detach(), b.detach(), equal_nan=True)
                if a.dtype is not torch.bool
                else not torch.equal(a, b)
            ):
                return False
    return True


def _close(a: Any, b: Any) -> bool:
    import math

    return (
        isinstance(a, (int, float)) and isinstance(b, (int, float)) and math.isclose(a, b, rel_tol=2e-4, abs_tol=2e-5)
    )


def brief(exc: BaseException) -> str:
    words = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {words[:300]}" if not isinstance(exc, AssertionError) else words[:300]


def work() -> None:
    """Answer tasks, a JSON object per line on standard input and one on standard output, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever torch prints is not an answer
    import warnings

    warnings.simplefilter("ignore")
    examiner = Examiner()
    answers.write(json.dumps({"ready": examiner.tasks()}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        verdict = examiner.examine(task["op"], task["dtype"], task.get("every", False))
        answers.write(json.dumps(asdict(verdict)) + "\n")


if __name__ == "__main__":
    work()
