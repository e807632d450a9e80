"""An engine's encoder: on one device or several, in fewer bits when memory runs out, and the batches to begin with."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from anytorch.devices.choose import callers_level
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import DeviceFallbackWarning, OutOfMemory, UsageError
from anytorch.text.embed.budget import LARGEST, SMALLEST, Budget
from anytorch.text.embed.place import CPU, Place, build_encoder, choose_place
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import Recipe

CPU_TOKENS, DEVICE_TOKENS = 4096, 65536  # where the search for the best batch starts
BATCH_CHUNKS = 4  # chunks of an encoder that cuts its batches itself, which is then a window, too
SMALLER = {None: "int8", "int8": "int4"}  # what is tried when memory runs out and quantizing is allowed


class Building:
    """What the encoder is made from. `quantization` is what it is in now: it may have been made again in fewer bits."""

    def __init__(
        self,
        recipe: Recipe,
        pooling: tuple[str, ...],
        *,
        device: str | None,
        devices: Sequence[str] | str | None,
        quantization: str | None,
        dtype: str,
        threads: int | None,
        allow_quantize: bool,
        normalize: bool,
    ) -> None:
        """`normalize`: the encoder may do that as well, if it says so itself."""
        self._recipe, self._pooling = recipe, pooling
        self._devices, self._dtype, self._threads = devices, dtype, threads
        self._allow_quantize, self.normalize = allow_quantize, normalize
        self.quantization = quantization
        self.places = self._choose(device)
        self.place = self.places[0]
        if len(self.places) > 1:
            self.place = replace(self.place, id=", ".join(place.id for place in self.places))
        self.why = ""  # the encoder is of its kind
        self.note: Callable[[str], None] = lambda words: None  # told when it is made smaller

    @property
    def on_cpu(self) -> bool:
        return all(place.torch_name == CPU for place in self.places)

    def build(self) -> Encoder:
        """Build the encoder. Raises OutOfMemory if the model does not fit and may or can not be quantized further."""
        while True:
            try:
                encoder, self.why = self._built()
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                if not self._may_be_smaller:
                    raise OutOfMemory(
                        f"the model does not fit in the memory of {self.place.id}: {exc}",
                        hint="use quantization='int8' (or allow_quantize=True), a smaller model, or device='cpu'",
                    ) from exc
                self._make_smaller()
            else:
                return encoder

    def build_smaller(self) -> Encoder | None:
        """The next smaller encoder when memory ran out for a single text; None when that is not allowed."""
        if not self._may_be_smaller:
            return None
        self._make_smaller()
        return self.build()

    def budget(self, encoder: Encoder, asked: int | str) -> Budget:
        if isinstance(asked, int):
            return Budget(asked, fixed=True)
        chunk = getattr(encoder, "chunk_tokens", None)
        if not self.on_cpu and chunk:  # it cuts its batches itself: a batch only has to be a few of its chunks
            return Budget(BATCH_CHUNKS * chunk, key=f"{chunk}-{self._key()}", search=False)
        if not self.on_cpu:
            return Budget(DEVICE_TOKENS, key=self._key(), smallest=DEVICE_TOKENS // 16)
        # A batch is shared out among the threads: each needs enough to be busy for a while.
        threads = encoder.describe().get("threads") or 1
        return Budget(max(CPU_TOKENS, 1024 * threads), key=self._key(), smallest=512 * threads)

    def _choose(self, device: str | None) -> list[Place]:
        if self._devices is None:
            return [choose_place(device)]
        from anytorch.text.embed.pool_devices import choose_places

        return choose_places(self._devices)

    def _built(self) -> tuple[Encoder, str]:
        options: dict[str, Any] = {"quantization": self.quantization, "dtype": self._dtype, "threads": self._threads}
        options["normalize"] = self.normalize
        if self._devices is None:
            return build_encoder(self.place, self._recipe, self._pooling, **options)
        from anytorch.text.embed.pool_devices import build_encoders

        return build_encoders(self._devices, self.places, self._recipe, self._pooling, **options)

    @property
    def _may_be_smaller(self) -> bool:
        return self._allow_quantize and self.quantization in SMALLER

    def _make_smaller(self) -> None:
        smaller = SMALLER[self.quantization]
        message = f"memory ran out on {self.place.id}: using quantization={smaller!r} (allow_quantize=True)"
        self.quantization = smaller
        self.note(message)
        warnings.warn(DeviceFallbackWarning(message), stacklevel=callers_level())

    def _key(self) -> str:
        """What the best batch depends on: the model's shape, the device, how it computes."""
        facts = (self._recipe.spec, self.places, self.quantization, self._dtype, self._threads, self._pooling)
        from_device = self.why
        return hashlib.sha256(repr((facts, from_device)).encode()).hexdigest()[:24]


def check_tokens(asked: int | str) -> None:
    """Raise UsageError for an invalid `batch_tokens`."""
    if asked == "auto":
        return
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= LARGEST:
        raise UsageError(
            f"batch_tokens={asked!r}: use 'auto' or a number of tokens up to {LARGEST}", hint=f"such as {4 * SMALLEST}"
        )


def check_length(asked: int | None, recipe: Recipe) -> int:
    """The maximum length in tokens: the requested one, or the model's own. Raises UsageError if it is invalid."""
    if asked is None:
        return recipe.max_length
    most = recipe.spec.max_positions
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= most:
        raise UsageError(
            f"max_length={asked!r}: the model has {most} positions",
            hint=f"use a whole number of tokens up to {most}; the model's own limit is {recipe.max_length}",
        )
    return asked
