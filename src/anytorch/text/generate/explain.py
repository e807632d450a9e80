"""Turn the facts of `describe` into words. Pure."""

from __future__ import annotations

from typing import Any

from anytorch.counts import counted
from anytorch.memory.sizes import words


def explained(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['model']}: {facts['family']}, {facts['parameters'] / 1e6:,.0f} million parameters, "
        f"{counted(facts['layers'], 'layer')}, up to {facts['max_length'] or 'any number of'} tokens; "
        + ("answers chat messages" if facts["chat"] else "continues a text; it has no chat template"),
        f"computes on {facts['device']} ({facts['device_why']}) in {facts['dtype']}"
        + (f", weights in {facts['quantization']}" if facts["quantization"] else ""),
        f"weights: {facts['placed']}",
        *(f"  {line}" for note in facts["notes"] for line in note.splitlines()),
        f"every token reads {words(facts['weight_nbytes_per_token'])} of weights; "
        f"{words(facts['cache_nbytes_per_token'])} of keys and values are kept per token",
    ]
    rate = facts["bandwidth_gb_per_s"]
    if rate:
        most = rate * 1e9 / max(1, facts["weight_nbytes_per_token"])
        lines.append(
            f"the device reads {rate:,.0f} GB/s ({facts['bandwidth_source']}): at most {most:,.0f} tokens/s for one request"
        )
    return "\n".join(lines)
