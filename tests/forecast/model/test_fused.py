"""The blocks for inference: what they keep in memory while windows pass through them part by part."""

from __future__ import annotations

import torch

from anytorch.forecast.model.fused import FusedBlock, through_blocks
from anytorch.forecast.model.layers import TransformerBlock


def peak_of(blocks: list[FusedBlock], x: torch.Tensor, limit_rows: int) -> int:
    """The most bytes that torch's allocator had given out at once, beyond those from before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        through_blocks(blocks, x, limit_rows)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@torch.inference_mode()
def test_a_block_does_not_keep_the_parts_of_the_one_before() -> None:
    """Beside x, the second block has what the first one made, once. The parts it was joined from would be that again."""
    torch.manual_seed(0)
    blocks = [FusedBlock.of(TransformerBlock(64, 2, 256).eval()) for _ in range(3)]
    x = torch.randn(8, 64, 64)
    whole = through_blocks(blocks, x, 8 * 64)
    torch.testing.assert_close(through_blocks(blocks, x, 4 * 64), whole, rtol=1e-5, atol=1e-5)
    through_blocks(blocks, x, 4 * 64)
    assert peak_of(blocks, x, 4 * 64) - peak_of(blocks[:1], x, 4 * 64) < 1.5 * x.nbytes
