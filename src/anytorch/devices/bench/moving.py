"""The workloads that move: memory on the device, copies between it and the host, and the cost of asking at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.devices.bench.workloads import Bench, Case, Prepared, Skip

if TYPE_CHECKING:
    import torch

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
