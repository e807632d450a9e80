"""An engine's encoder: on one device or several, in fewer bits when memory runs out, and the batches to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from anytorch.devices.choose import warn_fallback
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import OutOfMemory, UsageError
from anytorch.measured.verdict import Question
from anytorch.text.embed.encoder_device import CPU, build_encoder, choose_device
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import Recipe
from anytorch.text.embed.runner import LARGEST, SMALLEST, Budget

CPU_TOKENS, DEVICE_TOKENS = 4096, 65536  # where the search for the best batch starts
BATCH_CHUNKS = 4  # chunks of an encoder that cuts its batches itself, which is then a window, too
SMALLER = {None: "int8", "int8": "int4"}  # what is tried when memory runs out and quantizing is allowed


class EncoderBuilder:
    """What the encoder is made from. `quantization` is what the newest one is in: memory may have asked for fewer bits."""

    def __init__(
        self,
        recipe: Recipe,
        pooling: tuple[str, ...],
        *,
        device: str | None,
        devices: Sequence[str] | str | None,
        allow_quantize: bool,
        **options: Any,
    ) -> None:
        """`options`: dtype, threads and normalize, as `build_encoder` takes them."""
        self._recipe, self._pooling, self._options = recipe, pooling, options
        self._several, self._allow_quantize = devices, allow_quantize
        self.quantization: str | None = None
        if devices is None:
            self.devices = [choose_device(device)]
        else:
            from anytorch.text.embed.pool_devices import choose_devices

            self.devices = choose_devices(devices)
        self.device = self.devices[0]
        if len(self.devices) > 1:
            self.device = replace(self.device, id=", ".join(one.id for one in self.devices))
        self.why = ""  # the encoder is of its kind
        self.note: Callable[[str], None] = lambda words: None  # told when it is made smaller

    @property
    def on_cpu(self) -> bool:
        return all(one.torch_name == CPU for one in self.devices)

    def build(self, quantization: str | None) -> Encoder:
        """Build the encoder. Raises OutOfMemory if the model does not fit and may or can not be quantized further."""
        while True:
            try:
                return self._built(quantization)
            except OutOfMemory:
                smaller = self._smaller(quantization)
                if smaller is None:
                    raise
                quantization = smaller

    def build_smaller(self, old: Encoder) -> tuple[Encoder, bool]:
        """The next smaller encoder when memory ran out for a single text, and True; the old one is closed for it first.

        Where a smaller one is not allowed: the old one and False. Where it does not fit, either: one like the old, which
        did, and False. Raises OutOfMemory when not even that fits any more.
        """
        before = self.quantization
        smaller = self._smaller(before)
        if smaller is None:
            return old, False
        old.close()  # two models do not fit where memory ran out with one
        try:
            return self.build(smaller), True
        except OutOfMemory as exc:
            self.note(f"no smaller encoder fits: {exc.message}")
            return self._built(before), False

    def budget(self, encoder: Encoder, asked: int | str) -> Budget:
        if isinstance(asked, int):
            return Budget(asked, fixed=True)
        chunk = getattr(encoder, "chunk_tokens", None)
        if not self.on_cpu and chunk:  # it cuts its batches itself: a batch only has to be a few of its chunks
            return Budget(BATCH_CHUNKS * chunk, asked=self._question(chunk), search=False)
        if not self.on_cpu:
            return Budget(DEVICE_TOKENS, asked=self._question(), smallest=DEVICE_TOKENS // 16)
        # A batch is shared out among the threads: each needs enough to be busy for a while.
        threads = encoder.describe().get("threads") or 1
        return Budget(max(CPU_TOKENS, 1024 * threads), asked=self._question(), smallest=512 * threads)

    def _built(self, quantization: str | None) -> Encoder:
        """An encoder in this quantization, which is then the builder's. Raises OutOfMemory where it does not fit."""
        model = (self._recipe, self._pooling)
        try:
            if self._several is None:
                encoder, why = build_encoder(self.device, *model, quantization=quantization, **self._options)
            else:
                from anytorch.text.embed.pool_devices import build_encoders

                encoder, why = build_encoders(
                    self._several, self.devices, *model, quantization=quantization, **self._options
                )
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            raise OutOfMemory(
                f"the model does not fit in the memory of {self.device.id}: {exc}",
                hint="use quantization='int8' (or allow_quantize=True), a smaller model, or device='cpu'",
            ) from exc
        self.quantization, self.why = quantization, why
        return encoder

    def _smaller(self, quantization: str | None) -> str | None:
        """The next format of fewer bits, which is told; None where there is none, or it is not allowed."""
        smaller = SMALLER.get(quantization) if self._allow_quantize else None
        if smaller is not None:
            message = f"memory ran out on {self.device.id}: using quantization={smaller!r} (allow_quantize=True)"
            self.note(message)
            warn_fallback(message)
        return smaller

    def _question(self, chunk: int = 0) -> Question:
        """What the best batch depends on: the model's shape, the device, how it computes."""
        spec = self._recipe.spec
        return Question.of(
            "tokens per batch",
            f"{spec.family} encoder of {spec.layers} layers of {spec.width}",
            self.device.id,
            chunk=chunk,
            spec=repr(spec),
            devices=repr(self.devices),
            how=repr((self.quantization, self._options["dtype"], self._options["threads"], self._pooling, self.why)),
        )


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
