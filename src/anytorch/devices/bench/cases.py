"""The cases a device is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anytorch.devices.bench import compute, moving
from anytorch.devices.bench.workloads import DTYPES, Case
from anytorch.devices.types import Caps


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
            cases.append(_or_skipped(compute.matmul(dtype), caps))
    if "bandwidth" in workloads:
        cases += [moving.bandwidth("copy"), moving.bandwidth("triad")]
    if "launch" in workloads:
        cases += [moving.launch(wait=False), moving.launch(wait=True)]
    if "copies" in workloads:
        cases += [
            moving.copy(to_device=direction, pinned=pinned, unified=caps.unified_memory)
            for direction in (True, False)
            for pinned in (False, True)
        ]
    if "transformer" in workloads:
        # Unless asked for by name, only dtypes with hardware behind them: bf16 on a plain CPU takes 50 times longer.
        fast = [dtype for dtype in storable if dtype in caps.fast_dtypes and dtype != "float64"]
        grid = [
            compute.transformer(batch, seq, hidden, dtype)
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
