"""Parts of prompts that the tests of the nodes share."""

from __future__ import annotations

from typing import Any

import torch

PHOTO = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
CONV = {"in_channels": 3, "out_channels": 3, "kernel_size": 3, "stride": 1, "padding": 1, "use_bias": True}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def show(link: list[Any]) -> dict[str, Any]:
    return node("AnytorchTensorInfo", tensor=link)


def photo() -> torch.Tensor:
    return torch.rand(1, 30, 41, 3, generator=torch.Generator().manual_seed(0))
