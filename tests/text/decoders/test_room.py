"""Keys and values that do not fit: what is needed, what there is, and what would fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anytorch.devices.types import MemoryUse
from anytorch.errors import OutOfMemory
from anytorch.text.decoders import Decoder, RecordedSteps, room
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.host import HostKernel

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2**31 - 1,
}  # fmt: skip
EACH = 2 * 2 * 16 * 4  # bytes of a position
WAYS: dict[str, Any] = {
    "HostKernel": lambda decoder, rows, positions: HostKernel(decoder, rows, positions),
    "RecordedSteps": RecordedSteps,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_absurd_length_is_refused_before_it_is_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(read_spec(CONFIG, "here")).requires_grad_(False)
    monkeypatch.setattr(room, "memory", lambda device: MemoryUse(free=3 * 1000 * EACH + 5))
    with pytest.raises(OutOfMemory) as caught:
        WAYS[way](decoder, 3, 2**31 - 1)
    assert caught.value.message.startswith(
        "keys and values of 3 rows of 2,147,483,647 positions need 1.5 TiB; 750 KiB are"
    )
    assert caught.value.message.endswith("free on cpu, which is room for 1,000 positions of each")
    assert caught.value.hint == "use max_seq_length=1000 or less, or fewer rows"
    WAYS[way](decoder, 3, 1000)  # what is said to fit does
    with pytest.raises(OutOfMemory, match="room for 1,000 positions"):
        WAYS[way](decoder, 3, 1001)


def test_where_nothing_fits_no_length_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(read_spec(CONFIG, "here")).requires_grad_(False)
    monkeypatch.setattr(room, "memory", lambda device: MemoryUse(free=EACH - 1))
    with pytest.raises(OutOfMemory, match="room for 0 positions") as caught:
        RecordedSteps(decoder, 1, 64)
    assert caught.value.hint == "use fewer rows, or another device"


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (
            MemoryUse(allocated=30, reserved=70, free=160),
            "200 bytes are free on cuda:0, which is room for 25 positions",
        ),
        (MemoryUse(), None),
    ],
)
def test_a_gpu_is_tried_first_and_what_it_keeps_for_itself_counts(
    use: MemoryUse, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "memory", lambda device: use)
    device = torch.device("cuda", 0)
    with room.room_for(10_000, 1, 1250, device, lambda nbytes: nbytes // 8):
        pass  # it had room, whatever was said to be free
    with (
        pytest.raises(OutOfMemory, match="keys and values of 1 row of 1,250 positions need") as caught,
        room.room_for(10_000, 1, 1250, device, lambda nbytes: nbytes // 8),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.message.endswith(told or "need 9.77 KiB")
    with pytest.raises(ValueError, match="something else"), room.room_for(1, 1, 1, device, int):
        raise ValueError("something else")
