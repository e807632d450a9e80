"""What is run: the list of cases for a device, and the check every one of them must pass before the clock starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from anytorch.devices.bench.timing import quickest
from anytorch.devices.exercise import difference
from anytorch.devices.types import Caps
from anytorch.errors import UsageError, WrongAnswer, did_you_mean

if TYPE_CHECKING:
    import torch

WORKLOADS = ("matmul", "bandwidth", "launch", "copies", "transformer")
DTYPES = ("float32", "float16", "bfloat16", "float64")
ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
ALIASES |= {"double": "float64", "fp64": "float64"}

# Largest difference from the fp64 answer, relative to its largest value. Wide enough for the rounding of sums over a
# few thousand products in that dtype; a broken kernel is off by far more.
TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
REDUCED_TOLERANCE = 5e-3  # of float32 when the user has allowed tf32 or bf16 inside float32 products


class Skip(Exception):
    """Raised for a case that does not apply to this device; the text says why."""


@dataclass(frozen=True)
class Bench:
    """The device a case is prepared for."""

    device: torch.device
    caps: Caps
    synchronize: Callable[[], None]
    free: int | None  # bytes
    cache_nbytes: int | None  # the device's last-level cache, when known
    hurried: bool  # less than a second or two for everything: smaller set-ups

    def room_for(self, nbytes: float) -> bool:
        """The bytes a case may use; most of the memory is left to other users of the device."""
        return self.free is None or nbytes <= self.free / 4


@dataclass(frozen=True)
class Prepared:
    """A case with its tensors in place. `answer` and `reference` give the same few numbers, by device and by fp64."""

    run: Callable[[], object]
    answer: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    case: str
    flop: float = 0.0
    nbytes: float = 0.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    workload: str
    case: str
    dtype: str
    unit: str  # "TFLOP/s", "GB/s", "µs"
    prepare: Callable[[Bench], Prepared]
    flop: float | None = None  # known beforehand only where the size is given
    skip: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


def check(prepared: Prepared, dtype: str) -> tuple[float, float]:
    """Compare with the fp64 reference; (error, tolerance). Raises WrongAnswer, also for NaN and a wrong shape."""
    got, want = prepared.answer().detach().cpu().double(), prepared.reference().double()
    tolerance = tolerance_of(dtype)
    if got.shape != want.shape:
        raise WrongAnswer(f"{prepared.case}: the answer has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = difference(got, want)
    if not error <= tolerance:  # also catches NaN
        raise WrongAnswer(
            f"{prepared.case}: off by {error:.1e} of the largest value, {tolerance:.0e} is allowed; not timed",
            hint="do not trust this device; run `anytorch test`",
        )
    return error, tolerance


def tolerance_of(dtype: str) -> float:
    import torch

    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        return REDUCED_TOLERANCE
    return TOLERANCES[dtype]


# --- understanding the request ----------------------------------------------------------------------------------------


def workload_names(names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return WORKLOADS
    for name in names:
        if name not in WORKLOADS:
            raise UsageError(
                f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}", hint=did_you_mean(name, WORKLOADS)
            )
    return tuple(names)


def dtype_names(names: Sequence[str] | str | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = []
    for name in [names] if isinstance(names, str) else names:
        word = str(name).strip().lower().removeprefix("torch.")
        word = ALIASES.get(word, word)
        if word not in DTYPES:
            raise UsageError(
                f"unknown dtype {name!r}; the benchmark knows {', '.join(DTYPES)}",
                hint=did_you_mean(word, [*DTYPES, *ALIASES]),
            )
        found.append(word)
    return tuple(dict.fromkeys(found))


def sizes(name: str, values: Sequence[int]) -> tuple[int, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}: {value!r} is invalid; use whole numbers above 0")
    if not values:
        raise UsageError(f"{name} is empty", hint="give at least one number")
    return tuple(values)


# --- the cases: products sized for the device, a transformer block, and moving data -----------------------------------

ENOUGH_S = 2e-3  # a product that takes this long is large enough to show the device's rate
SMALLEST, SMALLEST_FAST, LARGEST_HURRIED, LARGEST = 128, 512, 2048, 8192
CHECKED = 64  # rows and columns of a product that are compared with fp64, spread over all of it


# --- matrix product ---------------------------------------------------------------------------------------------------


def matmul(dtype: str) -> Case:
    return Case("matmul", dtype, dtype, "TFLOP/s", lambda bench: _prepare_matmul(bench, dtype))


def _prepare_matmul(bench: Bench, dtype: str) -> Prepared:
    import torch

    kind = getattr(torch, dtype)
    largest = LARGEST_HURRIED if bench.hurried else LARGEST
    # A busy machine makes a small product look slow: where the dtype is fast, do not even ask about small ones.
    n = SMALLEST_FAST if dtype in bench.caps.fast_dtypes else SMALLEST
    while True:
        a = host_matrix(n, 0).to(kind).to(bench.device)
        b = host_matrix(n, 1).to(kind).to(bench.device)
        once_s = quickest(partial(torch.matmul, a, b), bench.synchronize)
        if once_s >= ENOUGH_S or n >= largest or not bench.room_for(3 * (2 * n) ** 2 * a.element_size()):
            break
        n *= 2
    return Prepared(
        run=lambda: torch.matmul(a, b),
        answer=lambda: spread(torch.matmul(a, b).cpu(), n),
        reference=lambda: matmul_reference(n, kind),
        case=f"{dtype} {n}×{n}",
        flop=2.0 * n**3,
        parameters={"n": n, "matmul_precision": torch.get_float32_matmul_precision()},
    )


@lru_cache(maxsize=2)
def host_matrix(n: int, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, n, generator=generator).sub_(0.5)


def spread(product: torch.Tensor, n: int) -> torch.Tensor:
    """CHECKED rows and columns of a product, the first and the last among them; all of a small one."""
    import torch

    at = torch.linspace(0, n - 1, min(n, CHECKED)).long()
    return product[at][:, at]


def matmul_reference(n: int, kind: torch.dtype) -> torch.Tensor:
    """The same rows and columns, from the same rounded inputs, in fp64 on the CPU."""
    import torch

    at = torch.linspace(0, n - 1, min(n, CHECKED)).long()
    return host_matrix(n, 0)[at].to(kind).double() @ host_matrix(n, 1)[:, at].to(kind).double()


# --- transformer block ------------------------------------------------------------------------------------------------


def transformer(batch: int, seq: int, hidden: int, dtype: str) -> Case:
    flop = block_flop(batch, seq, hidden)
    parameters = {"batch": batch, "seq": seq, "hidden": hidden, "heads": heads_of(hidden)}
    case = f"{dtype} batch {batch} × seq {seq} × hidden {hidden}"

    def prepare(bench: Bench) -> Prepared:
        import torch

        kind = getattr(torch, dtype)
        weights = {name: value.to(kind).to(bench.device) for name, value in block_weights(hidden).items()}
        x = block_input(batch, seq, hidden).to(kind).to(bench.device)

        def run() -> torch.Tensor:
            return block(x, weights)

        def answer() -> torch.Tensor:
            return run().cpu()[checked_elements(batch)]

        return Prepared(run, answer, lambda: block_reference(batch, seq, hidden), case, flop, parameters=parameters)

    return Case("transformer", case, dtype, "TFLOP/s", prepare, flop=flop, parameters=parameters)


def heads_of(hidden: int) -> int:
    """Heads of 64, as most models have; one head where that does not divide."""
    return hidden // 64 if hidden % 64 == 0 else 1


def block_flop(batch: int, seq: int, hidden: int) -> float:
    """Projections (q, k, v, out, and an MLP four times as wide) and the two products of attention."""
    return 2.0 * batch * seq * 12 * hidden**2 + 4.0 * batch * seq**2 * hidden


def block(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pre-norm attention and MLP with residuals, forward only."""
    import torch
    from torch.nn import functional

    batch, seq, hidden = x.shape
    heads = heads_of(hidden)
    y = functional.layer_norm(x, (hidden,))
    q, k, v = functional.linear(y, weights["qkv"]).view(batch, seq, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v)  # (batch, heads, seq, hidden / heads)
    x = x + functional.linear(y.transpose(1, 2).reshape(batch, seq, hidden), weights["out"])
    y = functional.gelu(functional.linear(functional.layer_norm(x, (hidden,)), weights["up"]))
    return torch.add(x, functional.linear(y, weights["down"]))


@lru_cache(maxsize=2)
def block_weights(hidden: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(hidden)
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden)}
    shapes["down"] = (hidden, 4 * hidden)
    return {name: torch.randn(*shape, generator=generator) / math.sqrt(shape[1]) for name, shape in shapes.items()}


@lru_cache(maxsize=4)
def block_input(batch: int, seq: int, hidden: int) -> torch.Tensor:
    import torch

    return torch.randn(batch, seq, hidden, generator=torch.Generator().manual_seed(7))


def checked_elements(batch: int) -> list[int]:
    """The first and the last of the batch: they do not depend on the others, and fp64 on a CPU is slow."""
    return sorted({0, batch - 1})


@lru_cache(maxsize=32)
def block_reference(batch: int, seq: int, hidden: int) -> Any:
    weights = {name: value.double() for name, value in block_weights(hidden).items()}
    return block(block_input(batch, seq, hidden)[checked_elements(batch)].double(), weights)


# --- memory on the device, copies between it and the host, and the cost of asking at all ------------------------------

MIB = 2**20
LEAST_NBYTES, MOST_NBYTES = 64 * MIB, 1024 * MIB  # of one buffer
CACHES = 4  # a buffer is at least this many times the last cache
TRIAD_FACTOR = 0.5
TINY = 256
SAMPLED = 65_536  # elements of a large buffer that are compared


def bandwidth(kind: str) -> Case:
    """A "copy" is b → a; "triad" is a = b + s·c, the classic that also computes."""
    return Case("bandwidth", kind, "float32", "GB/s", lambda bench: _prepare_bandwidth(bench, kind))


def buffer_nbytes(bench: Bench) -> int:
    """Much larger than the cache, much smaller than the memory."""
    wanted = min(MOST_NBYTES, max(LEAST_NBYTES, CACHES * (bench.cache_nbytes or 0)))
    while wanted > MIB and not bench.room_for(4 * wanted):
        wanted //= 2
    return wanted


def _prepare_bandwidth(bench: Bench, kind: str) -> Prepared:
    import torch

    count = buffer_nbytes(bench) // 4
    host_b = ramp(count, 1.0)
    b = host_b.to(bench.device)
    a = torch.zeros(count, device=bench.device)
    label = f"{kind} of {count * 4 // MIB} MiB"
    parameters = {"kind": kind, "buffer_nbytes": count * 4}
    if kind == "copy":
        return Prepared(
            run=lambda: a.copy_(b),
            answer=lambda: sample(a.copy_(b)),
            reference=lambda: sample(host_b).double(),
            case=label,
            nbytes=2.0 * count * 4,
            parameters=parameters,
        )
    host_c = ramp(count, -3.0)
    c = host_c.to(bench.device)

    def triad() -> torch.Tensor:
        return torch.add(b, c, alpha=TRIAD_FACTOR, out=a)

    return Prepared(
        run=triad,
        answer=lambda: sample(triad()),
        reference=lambda: sample(host_b).double() + TRIAD_FACTOR * sample(host_c).double(),
        case=label,
        nbytes=3.0 * count * 4,
        parameters=parameters,
    )


def ramp(count: int, scale: float) -> torch.Tensor:
    """Values that differ everywhere and are cheap to make."""
    import torch

    return torch.arange(count, dtype=torch.float32).mul_(scale / count)


def sample(buffer: torch.Tensor) -> torch.Tensor:
    """Evenly spaced elements of a flat buffer, with the first and the last, on the host."""
    import torch

    host = buffer.cpu()
    return host[torch.linspace(0, len(host) - 1, min(len(host), SAMPLED), dtype=torch.float64).long()]


def launch(*, wait: bool) -> Case:
    """The cost of one tiny operation: queued one after another, or waited for each time."""
    kind = "and wait" if wait else "queued"

    def prepare(bench: Bench) -> Prepared:
        host = ramp(TINY, 1.0)
        x, y = host.to(bench.device), (host + 1).to(bench.device)

        def once() -> torch.Tensor:
            return x + y

        def waited() -> None:
            once()
            bench.synchronize()

        return Prepared(
            run=waited if wait else once,
            answer=lambda: once().cpu(),
            reference=lambda: host.double() + (host + 1).double(),
            case=f"add of {TINY}, {kind}",
            parameters={"kind": kind, "elements": TINY},
        )

    return Case("launch", f"add of {TINY}, {kind}", "float32", "µs", prepare)


def copy(*, to_device: bool, pinned: bool, unified: bool) -> Case:
    direction = "host to device" if to_device else "device to host"
    memory = "pinned" if pinned else "pageable"
    label = f"{direction}, {memory}"
    skip = "this device shares the host's memory: there is no copy to measure" if unified else ""

    def prepare(bench: Bench) -> Prepared:
        import torch

        nbytes = (16 if bench.hurried else 64) * MIB
        values = ramp(nbytes // 4, 1.0)
        host = torch.zeros(nbytes // 4)
        if pinned:
            try:
                host = host.pin_memory()
            except (RuntimeError, NotImplementedError, AssertionError) as exc:
                raise Skip(f"pinned memory does not work here: {str(exc).splitlines()[0][:160]}") from exc
        there = torch.zeros(nbytes // 4, device=bench.device)
        source, target = (host, there) if to_device else (there, host)
        source.copy_(values)
        bench.synchronize()

        def run() -> torch.Tensor:
            return target.copy_(source, non_blocking=pinned)

        def answer() -> torch.Tensor:
            run()
            bench.synchronize()  # a pinned copy returns before it is done
            return sample(target)

        return Prepared(
            run,
            answer,
            lambda: sample(values).double(),
            f"{label}, {nbytes // MIB} MiB",
            nbytes=float(nbytes),
            parameters={"to_device": to_device, "pinned": pinned, "nbytes": nbytes},
        )

    parameters = {"to_device": to_device, "pinned": pinned}
    return Case("copies", label, "float32", "GB/s", prepare, skip=skip, parameters=parameters)


# --- the list --------------------------------------------------------------------------------------------------------


def list_cases(
    caps: Caps,
    *,
    workloads: Sequence[str],
    dtypes: Sequence[str] | None,
    batch_sizes: Sequence[int],
    seq_lengths: Sequence[int],
    hidden_sizes: Sequence[int],
) -> list[Case]:
    """Every case for a device with these capabilities: first what is quick and says most."""
    cases: list[Case] = []
    storable = [dtype for dtype in DTYPES if dtype in caps.dtypes]
    for dtype in dtypes or storable:
        if "matmul" in workloads:
            cases.append(_or_skipped(matmul(dtype), caps))
    if "bandwidth" in workloads:
        cases += [bandwidth("copy"), bandwidth("triad")]
    if "launch" in workloads:
        cases += [launch(wait=False), launch(wait=True)]
    if "copies" in workloads:
        cases += [
            copy(to_device=direction, pinned=pinned, unified=caps.unified_memory)
            for direction in (True, False)
            for pinned in (False, True)
        ]
    if "transformer" in workloads:
        # Unless asked for by name, only dtypes with hardware behind them: bf16 on a plain CPU takes 50 times longer.
        fast = [dtype for dtype in storable if dtype in caps.fast_dtypes and dtype != "float64"]
        grid = [
            transformer(batch, seq, hidden, dtype)
            for dtype in dtypes or fast or storable[:1]
            for batch in batch_sizes
            for seq in seq_lengths
            for hidden in hidden_sizes
        ]
        cases += [_or_skipped(case, caps) for case in sorted(grid, key=lambda case: case.flop or 0.0)]
    return cases


def _or_skipped(case: Case, caps: Caps) -> Case:
    if case.dtype in caps.dtypes:
        return case
    return replace(case, skip=f"this device cannot compute in {case.dtype}; it can in {', '.join(caps.dtypes)}")
