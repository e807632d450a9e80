"""Turn the facts of `ArrowEngine.describe()` into words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anytorch.counts import counted

# Of an encoder's own description, what the first lines tell already.
TOLD = ("device", "device_name", "dtype", "kernels", "quantization", "why", "quantization_why")


def explained(facts: Mapping[str, Any]) -> str:
    """Lines about the model, device, kernels and quantization, and why each was chosen."""
    encoder, batch, stats = facts["encoder"], facts["batch"], facts["stats"]
    steps = f", then {', '.join(facts['steps'])}" if facts["steps"] else ""
    lines = [
        f"model: {facts['model']} ({facts['family']}, {counted(facts['layers'], 'layer')})",
        f"vectors: {facts['dim']} dimensions, {facts['pooling']} pooling{steps}; "
        f"texts are cut at {facts['max_length']} tokens",
        f"device: {facts['device']}, because {facts['device_why']}",
        f"encoder: {facts['encoder_why']}",
        f"kernels: {encoder.get('kernels', 'unknown')}; dtype {encoder.get('dtype', 'float32')}{_why(encoder, 'why')}",
        f"quantization: {facts['quantization'] or 'none'}{_why(encoder, 'quantization_why')}",
        f"batches: {batch['tokens']} tokens ({batch['source']}); {facts['tokenizer']} tokenizer",
    ]
    lines += [f"{name}: {value}" for name, value in encoder.items() if name not in TOLD and value not in (None, "")]
    lines += [f"note: {note}" for note in facts["notes"]]
    if stats["truncated"]:
        lines.append(f"note: truncated so far: {stats['truncated']:,} of {counted(stats['texts'], 'text')}")
    return "\n".join(lines)


def _why(encoder: Mapping[str, Any], name: str) -> str:
    return f"; {encoder[name]}" if encoder.get(name) else ""
