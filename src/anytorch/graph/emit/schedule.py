"""How a kernel is cut for a device: the length of a tile along every axis, and what a compiler is told. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Schedule:
    """`blocks` says how much of an axis a tile has, 1 for an axis that is left out. For Triton these are elements, powers of
    two, and a reduced axis whose block covers it is not looped over; for C++ they are values held in registers at a time,
    each a whole vector along the axes in `vectors`. `chunks` are the C++ kernel's work items, in tiles. `parts` is Triton's:
    how many programs share a tile's first loop; the last of them to be done joins what they found."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    vectors: frozenset[str] = frozenset()
    chunks: Mapping[str, int] = field(default_factory=dict)
    spread: str = ""  # C++: a vector axis whose sums lie in memory, so that the reduced axis can be the outer loop
    warps: int = 4
    stages: int = 3
    parts: int = 1
    early: bool = False  # Triton: launched before the kernel before it is done, which it waits for itself
    padded: bool = False  # Triton: a row times a matrix goes through the matrix unit, as sixteen rows that are alike
    lanes: int = 0  # WGSL: threads of a worker; it walks along the axes in `spread`, or has a block of them
    slices: int = 1  # WGSL: groups of lanes that each take a part of the terms of all columns of a block

    def block(self, axis: str) -> int:
        return self.blocks.get(axis, 1)

    @property
    def name(self) -> str:
        """The same for the same schedule: choices are remembered by it."""
        cuts = " ".join(f"{axis}={block}" for axis, block in sorted(self.blocks.items()))
        if self.lanes:
            along = [f"along={self.spread}"] if self.spread else []
            slices = [f"slices={self.slices}"] if self.slices > 1 else []
            return " ".join([f"lanes={self.lanes}", *along, *cuts.split(), *slices])
        if self.vectors:
            chunks = " ".join(f"{axis}:{chunk}" for axis, chunk in sorted(self.chunks.items()))
            spread = f" sums of {self.spread} in memory" if self.spread else ""
            return f"{cuts} lanes={','.join(sorted(self.vectors))} {chunks}{spread}".strip()
        shared = f" parts={self.parts}" if self.parts > 1 else ""
        padded = " padded" if self.padded else ""
        return f"{cuts}{shared}{padded} warps={self.warps} stages={self.stages}"
