"""Choose where an encoder computes: a device for the request, then our own C++ or torch on it.

On a machine whose files show no accelerator nothing imports torch: the CPU path starts in a fraction of a second.
"""

from __future__ import annotations

from anytorch import settings
from anytorch.devices.choose import configured_request, resolve, survey
from anytorch.devices.ranking import parse
from anytorch.devices.registry import BUILT_IN, registry
from anytorch.devices.types import State
from anytorch.errors import NativeUnavailable, TorchMissing, UsageError, did_you_mean
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.weights import EncoderWeights
from anytorch.text.embed.examples import example_tokens
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import Recipe
from anytorch.values import dataclass

CPU = "cpu"
QUANTIZATIONS = ("int8", "int4", "int2", "fp4")
FEW_BITS = ("int4", "int2", "fp4")  # what these lose depends on the inputs: examples are looked at
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class EncoderDevice:
    """A device for an encoder. `torch_name` is torch's name for it; "cpu" needs no torch."""

    id: str  # "cuda:0", "cpu"
    torch_name: str
    why: str
    fell_back: bool = False


def choose_device(request: str | None) -> EncoderDevice:
    """The device a request means. "auto" and None: the configured one, else the best.

    A named device that cannot be used falls back with a DeviceFallbackWarning, as `anytorch.resolve` has it.
    """
    text = "auto" if request is None else str(request)
    from_settings = ""
    if parse(text, registry()).automatic:
        text, from_settings = configured_request()
    wanted = parse(text, registry())
    origin = f"the settings name {text!r} (source: {from_settings})" if from_settings else f"you asked for {text!r}"
    if wanted.backend == CPU:
        return EncoderDevice(CPU, CPU, origin)
    if wanted.automatic and not accelerator_seen():
        return EncoderDevice(CPU, CPU, "files show no accelerator on this machine")
    resolution = resolve(None if from_settings else text)
    chosen = resolution.chosen
    if resolution.fell_back:
        why = resolution.warning
    elif wanted.automatic:
        why = f"the best device here is {chosen.id} ({chosen.name})"
    else:
        why = origin
    return EncoderDevice(chosen.id, chosen.torch_name, why, resolution.fell_back)


def accelerator_seen() -> bool:
    """True if files show a device faster than the CPU, or a plug-in may bring one."""
    if set(registry().backends) - set(BUILT_IN):
        return True
    found = survey("never")
    if found.facts.hardware.torch is None:
        return False  # nothing could drive it
    return any(c.backend != CPU and not c.software and c.state is not State.UNUSABLE for c in found.devices)


def check_options(quantization: str | None, dtype: str, threads: int | None) -> None:
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise UsageError(
            f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}",
            hint=did_you_mean(str(quantization), QUANTIZATIONS, "leave it out for none"),
        )
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    whole = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and not (whole and 1 <= threads <= settings.MOST_THREADS):
        raise UsageError(
            f"threads={threads!r} is invalid: use a whole number from 1 to {settings.MOST_THREADS:,}",
            hint="leave it out for all cores",
        )


def build_encoder(
    on: EncoderDevice,
    recipe: Recipe,
    pooling: tuple[str, ...],
    *,
    quantization: str | None,
    dtype: str,
    threads: int | None,
    normalize: bool,
) -> tuple[Encoder, str]:
    """The encoder on a device, and why it is of its kind. `normalize`: it may do that as well, if it says so itself."""
    checkpoint = Checkpoint(recipe.encoder)

    def by_torch(*, normalize: bool) -> Encoder:
        device = resolve(on.id, strict=True).device  # TorchMissing with the command that installs it
        from anytorch.text.encoders.encoder import TorchEncoder

        texts = example_tokens(recipe) if quantization in FEW_BITS else None
        return TorchEncoder(
            recipe.spec, checkpoint, device, dtype, pooling, quantization, normalize=normalize, calibration=texts
        )

    if on.torch_name != CPU:
        return by_torch(normalize=normalize), "torch computes on this device"
    if dtype in ("float16", "bfloat16"):
        reason = f"dtype={dtype!r} was requested, and our own CPU encoder computes in float32"
    elif len(pooling) > 1:
        reason = "the model combines several poolings"
    else:
        try:
            encoder = _packed(recipe, checkpoint, pooling[0], quantization, threads)
            return encoder, "our own C++ encoder over packed tokens; torch is not imported"
        except NativeUnavailable as exc:
            reason = f"our own C++ encoder cannot be used: {exc.message}"
    try:
        return by_torch(normalize=False), f"torch on the CPU, because {reason}"
    except TorchMissing as exc:
        raise TorchMissing(f"{reason}; and {exc.message}", hint=exc.hint) from exc


def _packed(
    recipe: Recipe, checkpoint: Checkpoint, pooling: str, quantization: str | None, threads: int | None
) -> Encoder:
    from anytorch.text.packed import PackedEncoder

    weights = EncoderWeights(checkpoint, recipe.spec)
    return PackedEncoder(recipe.spec, weights, pooling=pooling, quantization=quantization, threads=threads)
