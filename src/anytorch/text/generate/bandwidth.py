"""A device's memory bandwidth and the bytes of weights one token reads, which limit the speed of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anytorch import large_pages, logs
from anytorch.cache import Store
from anytorch.devices.bench.timing import quickest
from anytorch.devices.locate import require
from anytorch.devices.memory import memory, synchronize
from anytorch.devices.precision import capabilities
from anytorch.errors import CacheError
from anytorch.quant.linear import QuantLinear

log = logs.logger(__name__)

NBYTES = 256 << 20  # of the buffer that is read: larger than any cache, and small enough to have
PATIENCE_S = 0.5
CACHE = "bandwidth"


@dataclass(frozen=True)
class Bandwidth:
    gb_per_s: float
    source: str  # "stated by the device", "measured"


def bandwidth_of(device: torch.device) -> Bandwidth | None:
    """The bandwidth the device states, else the measured one (cached). None if there is no memory to measure with."""
    backend, index = require(device)
    stated = capabilities(backend.name, index).peak_gb_per_s
    if stated:
        return Bandwidth(stated, "stated by the device")
    key = f"{device} torch {torch.__version__} threads {torch.get_num_threads()}"
    store = Store(CACHE)
    try:
        known = store.get(key)
        if isinstance(known, (int, float)) and known > 0:
            return Bandwidth(float(known), "measured")
    except CacheError as exc:
        log.warning("%s", exc.message)
    free = memory(device).free
    if free is not None and free < 4 * NBYTES:
        return None
    measured = measure_read(device)
    try:
        store.put(key, measured)
    except CacheError as exc:
        log.warning("%s", exc.message)
    return Bandwidth(measured, "measured")


def measure_read(device: torch.device) -> float:
    """GB/s of adding up a buffer: it is read once and nothing is written, as with weights."""
    buffer = torch.empty(NBYTES // 4, device=device)
    if device.type == "cpu":
        large_pages.ask(buffer.data_ptr(), NBYTES)  # as weights are: small ones would be a limit of their own
    buffer.fill_(1)
    seconds = quickest(buffer.sum, lambda: synchronize(device), patience_s=PATIENCE_S)
    return NBYTES / seconds / 1e9


def weight_nbytes_per_token(model: nn.Module) -> int:
    """Bytes of weights that one token of one request reads.

    All of them, except tables that are only looked up (embeddings, unless the output layer shares theirs) and the
    experts that a token does not go through.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output_of: Any = getattr(model, "get_output_embeddings", None)  # every language model of transformers has it
    output = output_of() if callable(output_of) else None
    multiplied = {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set()
    config = getattr(model, "config", None)
    share = expert_share(config)
    total = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up and id(parameter) not in multiplied:
            continue
        total += parameter.numel() * parameter.element_size() * (share if ".experts." in name else 1.0)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            total += module.nbytes * (share if ".experts." in name else 1.0)
    return round(total)


def expert_share(config: Any) -> float:
    """The part of a mixture's experts that a token goes through; 1 for a model without any."""
    used = getattr(config, "num_experts_per_tok", None)
    there = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return used / there if used and there else 1.0
