"""Memory comes back with the last view, stays flat, and its end is torch's own error; the device works on after faults."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from tests.webgpu.agree import close


def test_memory_is_free_when_the_last_view_dies(torch: Any) -> None:
    gc.collect()
    before = torch.webgpu.memory_allocated()
    x = torch.empty(1 << 18, device="webgpu")
    assert torch.webgpu.memory_allocated() - before == 1 << 20
    row = x.view(512, 512)[3]
    del x
    gc.collect()
    assert torch.webgpu.memory_allocated() - before == 1 << 20
    del row
    gc.collect()
    assert torch.webgpu.memory_allocated() == before


def test_ten_thousand_tensors_leave_reserved_memory_flat(torch: Any) -> None:
    def churn(rounds: int) -> None:
        for i in range(rounds):
            x = torch.empty(64 + i % 7 * 300, device="webgpu")
            y = x.view(-1)[1:]
            del x, y

    churn(100)
    before = torch.webgpu.memory_reserved()
    churn(10_000)
    assert torch.webgpu.memory_reserved() == before


def test_empty_cache_and_peak(torch: Any) -> None:
    torch.webgpu.empty_cache()
    torch.webgpu.reset_peak_memory_stats()
    base = torch.webgpu.memory_reserved()
    x = torch.empty(1 << 20, device="webgpu")
    assert torch.webgpu.memory_reserved() - base == 4 << 20
    del x
    gc.collect()
    torch.webgpu.empty_cache()
    assert torch.webgpu.memory_reserved() == base
    assert torch.webgpu.max_memory_reserved() - base == 4 << 20


@pytest.mark.long
def test_out_of_memory_is_torchs_own_and_the_device_works_on(run_script: Any, torch: Any) -> None:
    said = run_script(
        """
        import torch, anytorch.webgpu
        held = [torch.ones(1 << 20, device="webgpu") for _ in range(3)]
        try:
            held += [torch.empty(1 << 20, device="webgpu") for _ in range(20)]
            message = "no error"
        except torch.OutOfMemoryError as exc:
            message = str(exc)
        del held[1:]
        again = torch.ones(1 << 20, device="webgpu") + held[0]
        answer(message=message, value=again[-1].item(), reserved=torch.webgpu.memory_reserved())
        """,
        {"ANYTORCH_WEBGPU_MEMORY": "20MiB", "ANYTORCH_WEBGPU_FALLBACK": "silent"},
        warm=True,
    )
    assert "ANYTORCH_WEBGPU_MEMORY" in said["message"] and said["value"] == 2.0
    assert said["reserved"] <= 20 << 20


def test_one_tensor_larger_than_the_device_allows(torch: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="largest buffer"):
        torch.empty(1 << 44, dtype=torch.uint8, device="webgpu")
    assert torch.ones(1, device="webgpu").item() == 1.0


def test_a_broken_shader_raises_and_the_process_lives(torch: Any) -> None:
    from anytorch.gpu.native import ShaderError
    from anytorch.webgpu.pointwise import Rule, run

    x = torch.ones(4, device="webgpu")
    with pytest.raises(ShaderError, match="does not compile"):
        run(
            Rule("{0} + no_such_function()"),
            torch.ops.aten.neg.default,
            (x,),
            call=lambda: torch.empty(4, device="meta"),
        )
    close(x + 1, torch.full((4,), 2.0))
