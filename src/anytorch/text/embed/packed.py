"""Our C++ encoder behind the engine's protocol. Imported only when used, because it loads or builds the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.weights import EncoderWeights
from anytorch.text.embed.recipe import Recipe
from anytorch.text.packed import FORMATS, POOLINGS, PackedEncoder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Its own words for what sentence-transformers calls otherwise.
NAMES = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_length"}


def can_quantize(quantization: str | None) -> bool:
    return quantization in FORMATS


class Packed:
    """`protocol.Encoder` over a PackedEncoder: packed tokens, so that a batch costs the sum of its lengths."""

    padded = False

    def __init__(
        self, recipe: Recipe, checkpoint: Checkpoint, pooling: str, quantization: str | None, threads: int | None
    ) -> None:
        weights = EncoderWeights(checkpoint, recipe.spec)
        named = pooling if pooling in POOLINGS else NAMES[pooling]
        self.encoder = PackedEncoder(recipe.spec, weights, pooling=named, quantization=quantization, threads=threads)
        self.width = recipe.spec.width

    def run(self, ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return self.encoder.run(ids, starts)

    def describe(self) -> dict[str, Any]:
        encoder = self.encoder
        return {
            "device": "cpu",
            "dtype": "float32",
            "kernels": f"C++ for {encoder.level}, packed weights, no padding",
            "quantization": encoder.quantization,
            "threads": encoder.threads,
            "linear_nbytes": encoder.linear_nbytes,
        }

    def close(self) -> None:
        self.encoder.close()
