"""What an attention kernel is: its form, its operands, its parameters."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 16  # of the head's dimension per pass through workgroup memory
LANES = 4  # neighbouring threads that share a key, for "split": no subgroup is smaller
AT_ONCE = 4  # queries whose outputs are folded over a workgroup at a time
LOWEST = "-3.0e38"  # stands for minus infinity, which cannot be written

# After the places of the operands.
PARAMETERS = (
    "queries: u32",
    "keys: u32",
    "heads: u32",
    "shared_by: u32",  # query heads per key head
    "blocks: u32",  # of queries
    "row: u32",  # workgroups per row of the launch grid
    "total: u32",  # workgroups or threads
    "scale: f32",
    "parts: u32",  # into which the keys are split
    *[f"{name}_{part}: u32" for name in ("q", "k", "v", "out") for part in ("batch", "head", "place")],
    *[f"mask_{part}: u32" for part in ("batch", "head", "query", "key")],
)


@dataclass(frozen=True)
class Attention:
    form: str
    dtype: str
    dimension: int  # of a head; a multiple of 4
    causal: bool = False
    mask: str = ""  # dtype of a mask that is added to the scores, or bool: which keys are seen
    queries: int = 64  # per workgroup, for "tile" and "split"
    keys: int = 64
    sums: bool = True  # write the sums' logarithms: only backward wants them
    subgroups: bool = False
    stacked: int = 1  # matrices of queries that a subgroup has, for matrix cores

    @property
    def threads(self) -> int:
        if self.form == "tile":
            return self.queries * self.keys // 16
        return {"short": 256, "split": 128, "join": 128, "row": 64}[self.form]

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the buffers, in order."""
        if self.form == "join":
            return ("parts", "out", *(["sums"] if self.sums else []))
        read = ("q", "k", "v", *(["mask"] if self.mask else []))
        return (*read, "parts") if self.form == "split" else (*read, "out", *(["sums"] if self.sums else []))

    @property
    def writable(self) -> int:
        return sum(1 << i for i, name in enumerate(self.operands) if self.writes(name))

    def writes(self, name: str) -> bool:
        return name in ("out", "sums") or (name == "parts" and self.form == "split")

    @property
    def value_keys(self) -> int:
        """Keys whose values are in workgroup memory at a time."""
        return max(4, min(self.keys, 2048 // self.dimension))

    @property
    def shared_bytes(self) -> int:
        if self.form in ("row", "join"):
            return 0 if self.form == "row" else 24 * self.threads
        if self.form == "split":
            vectors = self.queries * self.dimension // 4 + min(self.queries, AT_ONCE) * self.threads
            return 16 * vectors + 4 * (self.queries * self.keys + 2 * self.threads)
        if self.form == "short":
            return 16 * (self.dimension // 4 + 256) + 4 * 512
        across = self.keys // 4
        vectors = (self.queries + self.keys) * (CHUNK // 4 + 1) + self.queries * (self.keys // 4 + 1)
        return 16 * (vectors + self.queries * across // 4 + self.value_keys * self.dimension // 4)


def main(kernel: Attention, argument: str) -> str:
    return (
        f"@compute @workgroup_size({kernel.threads}) fn main(@builtin(workgroup_id) group: vec3<u32>, "
        f"@builtin(local_invocation_index) t: u32) {{\n  let linear = {argument};\n"
    )
