"""What a kernel with indices says of one that is out of range: the first in a small buffer that the host reads later.

A shader cannot raise. It writes where it was (`site`, a number the host gave the launch), which index tensor, the size that
the index exceeds and the index itself, and goes on as if the index were not there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORMAT = "<4Iq8x"  # as `Fault` below, padded to whole 16 bytes
NBYTES = struct.calcsize(FORMAT)


class Fault(NamedTuple):
    """One index out of range: `site` is the number of the op, `which` that of the index tensor, `value` the index itself."""

    seen: int
    site: int
    which: int
    size: int
    value: int


def fault_of(data: bytes) -> Fault | None:
    """The report in the bytes of a fault buffer; None when nothing was out of range."""
    fault = Fault(*struct.unpack(FORMAT, data))
    return fault if fault.seen else None


def reporting(binding: int) -> str:
    """Declares the buffer at `binding` and `report(which, size, index)`. The kernel has a parameter `site`.

    The first thread to exchange the word writes the rest; all others see from a plain load that they need not try.
    """
    return (
        "struct Fault { seen: atomic<u32>, site: u32, which: u32, size: u32, low: u32, high: u32 }\n"
        f"@group(0) @binding({binding}) var<storage, read_write> fault: Fault;\n"
        "fn report(which: u32, size: u32, index: vec2<u32>) {\n"
        "  if (atomicLoad(&fault.seen) != 0u || atomicExchange(&fault.seen, 1u) != 0u) { return; }\n"
        "  fault.site = p.site; fault.which = which; fault.size = size; fault.low = index.x; fault.high = index.y;\n}\n"
    )
