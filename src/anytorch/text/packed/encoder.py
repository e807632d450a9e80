"""PackedEncoder: token ids in, vectors out, computed by our C++ on the CPU. No torch."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch import native, settings
from anytorch.errors import InputError, ModelError, OutOfMemory, UsageError
from anytorch.text.checkpoints.checkpoint import Floats, Ints, check_still_whole, mapped_from
from anytorch.text.checkpoints.ranges import check_spec
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.text.checkpoints.weights import shapes
from anytorch.text.packed import binding
from anytorch.text.packed.binding import pointer
from anytorch.text.packed.calibration import Inputs, Product, calibrated, sample_tokens, smooth_bytes, smooth_groups

POOLINGS = {"cls": 0, "mean": 1, "max": 2, "last": 3, "weighted_mean": 4, "mean_sqrt_length": 5}
POOLINGS |= {"lasttoken": 3, "weightedmean": 4, "mean_sqrt_len_tokens": 5}  # as sentence-transformers names them
FORMATS = tuple(binding.FORMATS)

# Tokens that one thread takes through the network at once, and rows that a matrix product works on at once: the first
# bounds the memory, the second keeps a block's activations in the second-level cache. Measured in bench/packed_encoder.py.
BUDGET = 512
BLOCK = 96


class PackedEncoder(AbstractContextManager["PackedEncoder"]):
    """A text encoder over packed tokens.

    `weights` maps the names of `checkpoints.weights` to arrays (float32, float16, …; [out, in] for linear layers).
    They are read and packed one after the other, so that the peak is never the whole model twice; the word embeddings
    stay where they are (a large table in a mapped file is shared between processes).

    `run` is thread-safe (calls take turns), works on `threads` threads and gives a text the same bits alone and in any
    batch. Raises NativeUnavailable where our C++ cannot be built: take the torch path then. Raises ModelError for
    weights that do not fit the spec.

    >>> encoder = PackedEncoder(spec, weights, pooling="mean")
    >>> encoder.run(ids, starts)          # ids int32[total]; starts int32[n + 1], the place where each text begins
    """

    padded = False  # a batch costs the sum of its lengths

    def __init__(
        self,
        spec: EncoderSpec,
        weights: Mapping[str, npt.NDArray[Any]],
        *,
        pooling: str = "mean",
        normalize: bool = False,
        quantization: str | None = None,
        threads: int | None = None,
        level: str | None = None,
        budget: int = BUDGET,
        block: int = BLOCK,
        calibration: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> None:
        if pooling not in POOLINGS:
            raise UsageError(f"unknown pooling {pooling!r}; poolings: {', '.join(POOLINGS)}")
        if quantization not in FORMATS:
            raise UsageError(
                f"unknown quantization {quantization!r}; the CPU encoder has {', '.join(map(str, FORMATS))}"
            )
        if threads is not None and not 1 <= threads <= settings.MOST_THREADS:
            raise UsageError(f"threads={threads!r} is invalid: use a whole number from 1 to {settings.MOST_THREADS:,}")
        kv_heads, head_width = spec.kv_heads or spec.heads, spec.head_width or spec.width // spec.heads
        self.spec = spec = replace(spec, kv_heads=kv_heads, head_width=head_width)
        self.width = spec.width
        self.pooling = pooling
        self.normalize = normalize
        self.quantization = quantization
        self.threads = threads or settings.get("threads") or available_cores()
        self.level = native.level(level).name
        self._handle: int | None = None
        self._using = threading.Lock()  # who runs; closing waits for it, since it gives the memory back
        check_spec(spec, "the encoder's spec")
        shape = binding.shape_of(spec, budget, block)
        self._library = binding.open_library(self.level)
        if not self._library.encoder_shape_is_valid(ctypes.byref(shape)):
            raise ModelError(f"an encoder of this shape cannot be computed: {spec}", hint="the model is damaged")
        self._handle = self._library.encoder_new(ctypes.byref(shape), self.threads)
        if not self._handle:
            raise OutOfMemory("cannot make the encoder: no memory or no more threads")
        # 8-bit activations are twice as fast where the processor multiplies bytes, and need calibrating to be as good.
        self.activation_bits = 32 if quantization is None else 16
        if quantization == "int8" and self._library.encoder_has_bytes():
            self.activation_bits = 8
        self._load(_Reader(weights, spec), calibration)

    # --- use -----------------------------------------------------------------------------------------------------

    def run(self, ids: npt.ArrayLike, starts: npt.ArrayLike) -> Floats:
        """The pooled vector of each text, float32[n, width]. A text of no tokens gives zeros."""
        packed, begins = self._inputs(ids, starts)
        out = np.empty((len(begins) - 1, self.spec.width), np.float32)
        self._run(packed, begins, out, None)
        return out

    def tokens(self, ids: npt.ArrayLike, starts: npt.ArrayLike) -> Floats:
        """The last layer's vector of each token, float32[total, width]."""
        packed, begins = self._inputs(ids, starts)
        out = np.empty((len(packed), self.spec.width), np.float32)
        self._run(packed, begins, None, out)
        return out

    @property
    def linear_nbytes(self) -> int:
        """Resident bytes of the linear layers: packed weights, scales and biases."""
        with self._using:
            return int(self._library.encoder_linear_nbytes(self._open()))

    def profile(self, on: bool = True) -> dict[str, float]:
        """CPU seconds of each part since the last call, over all threads; counting goes on only if `on`."""
        seconds = np.zeros(len(binding.PARTS))
        with self._using:
            self._library.encoder_profile(self._open(), on, pointer(seconds))
        return dict(zip(binding.PARTS, seconds.tolist(), strict=True))

    def describe(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "dtype": "float32",
            "kernels": f"C++ for {self.level}, packed weights, no padding",
            "quantization": self.quantization,
            "threads": self.threads,
            "linear_nbytes": self.linear_nbytes,
        }

    def close(self) -> None:
        """Free the memory as soon as a run in another thread has ended."""
        with self._using:
            handle, self._handle = self._handle, None
            if handle:
                self._library.encoder_free(handle)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        if self._handle is None:
            raise UsageError("this encoder was closed")
        return self._handle

    def _inputs(self, ids: npt.ArrayLike, starts: npt.ArrayLike) -> tuple[Ints, Ints]:
        packed, begins = _int32(ids, "ids"), _int32(starts, "starts")
        if len(begins) < 1 or begins[0] != 0 or begins[-1] != len(packed):
            raise InputError(
                f"starts must begin with 0 and end with {len(packed)}, the number of tokens; "
                f"found {begins[:1].tolist()} … {begins[-1:].tolist()}"
            )
        return packed, begins

    def _run(self, ids: Ints, starts: Ints, pooled: Floats | None, tokens: Floats | None) -> None:
        where = ctypes.c_int(-1)
        with self._using:
            if self._mapped:
                check_still_whole(self._words)
            answer = self._library.encoder_run(
                self._open(),
                pointer(ids),
                pointer(starts),
                len(starts) - 1,
                POOLINGS[self.pooling],
                self.normalize,
                pointer(pooled),
                pointer(tokens),
                ctypes.byref(where),
            )
        at = where.value
        if answer == binding.BAD_TOKEN:
            raise InputError(
                f"token {at} is {ids[at]}, which is not in the vocabulary of {self.spec.vocabulary}",
                hint="tokenize with the model's own tokenizer",
            )
        if answer == binding.TOO_LONG:
            raise InputError(
                f"text {at} has {starts[at + 1] - starts[at]} tokens; the model takes {self.spec.max_positions}",
                hint="truncate it, or cut it into pieces",
            )
        if answer == binding.BAD_STARTS:
            raise InputError(f"starts must not decrease; starts[{at}] does")
        if answer != binding.OK:
            raise OutOfMemory(f"no memory for {len(ids)} tokens", hint="run fewer, or shorter, texts at a time")

    def _load(self, weights: _Reader, calibration: tuple[npt.ArrayLike, npt.ArrayLike] | None) -> None:
        spec, library, handle = self.spec, self._library, self._open()
        self._words = weights.need("word")  # kept: the C++ reads it in place
        self._mapped = mapped_from(self._words) is not None
        library.encoder_set_words(handle, pointer(self._words))
        added = _added_rows(spec, weights)
        if added is not None:
            _made(library.encoder_set_added(handle, pointer(added), len(added)))
        self._norm(weights, "embed_norm", 0, binding.EMBED_NORM, spec.embed_norm)
        self._norm(weights, "final_norm", 0, binding.FINAL_NORM, spec.final_norm)
        if spec.relative_buckets:
            biases, zero = distance_biases(weights.need("relative"), spec.max_positions, spec.relative_distance)
            _made(library.encoder_set_relative(handle, pointer(biases), biases.shape[1], zero))
        products = _products(spec)
        calibrate: Callable[..., dict[int, Inputs]] | None = None
        if self.activation_bits == 8 or self.quantization in ("int4", "int2", "fp4"):
            ids, starts = self._inputs(*(calibration or sample_tokens(spec)))
            calibrate = partial(calibrated, library, handle, ids, starts)
            calibrate(-1, ())
        for layer in range(spec.layers):
            theta = spec.rotary_thetas[layer] if spec.rotary_thetas else 0.0
            _made(library.encoder_set_attention(handle, layer, theta, spec.window(layer)))
            self._norm(weights, f"layers.{layer}.attn_norm", layer, binding.ATTN_NORM, not spec.pre_norm or layer > 0)
            self._norm(weights, f"layers.{layer}.mlp_norm", layer, binding.MLP_NORM, True)
            if spec.qk_norm:
                for name, which in (("q", binding.Q_NORM), ("k", binding.K_NORM)):
                    weight = weights.need(f"layers.{layer}.{name}_norm.weight")
                    _made(library.encoder_set_norm(handle, layer, which, pointer(weight), None))
            inputs = None
            if calibrate is not None:
                for product in products:
                    self._linear(weights, layer, product, None)
                inputs = calibrate(layer, products)
            for product in products:
                seen = None if inputs is None else inputs[product.which]
                self._linear(weights, layer, product, self.quantization, seen)

    def _norm(self, weights: _Reader, name: str, layer: int, which: int, needed: bool) -> None:
        """Set a norm. One that may be absent, and is, is the identity."""
        weight = weights.find(f"{name}.weight")
        if weight is None:
            if needed:
                raise ModelError(f"the weights have no {name}.weight, which a {self.spec.family} model needs")
            return
        bias = weights.find(f"{name}.bias")
        _made(self._library.encoder_set_norm(self._open(), layer, which, pointer(weight), pointer(bias)))

    def _linear(
        self, weights: _Reader, layer: int, product: Product, quantization: str | None, seen: Inputs | None = None
    ) -> None:
        """Pack one product's matrices, one below the other, and let go of each before the next is read."""
        library, handle = self._library, self._open()
        place = (handle, layer, product.which)
        inputs = product.inputs
        format_ = binding.FORMATS[quantization]
        eight = seen is not None and self.activation_bits == 8
        _made(library.encoder_linear_new(*place, product.outputs, inputs, product.gated, format_, eight))
        if seen is not None:
            parts = (weights.need(f"layers.{layer}.{name}.weight") for name, _ in product.parts)
            heavy = np.max([np.abs(part).max(0) for part in parts], axis=0)
            less = smooth_bytes(seen, heavy) if eight else smooth_groups(seen)
            importance = seen.square * less**2
            _made(library.encoder_linear_smooth(*place, pointer(less), pointer(importance)))
        first = 0
        for name, rows in product.parts:
            weight = weights.need(f"layers.{layer}.{name}.weight")
            bias = weights.find(f"layers.{layer}.{name}.bias")
            _made(library.encoder_linear_rows(*place, pointer(weight), pointer(bias), rows, first))
            first += rows
        library.encoder_linear_done(*place)


def _products(spec: EncoderSpec) -> tuple[Product, ...]:
    queries, keys = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
    up = (("up", spec.inner), ("gate", spec.inner)) if spec.gated else (("up", spec.inner),)
    return (
        Product(binding.QKV, (("q", queries), ("k", keys), ("v", keys)), spec.width),
        Product(binding.OUT, (("o", spec.width),), queries),
        Product(binding.UP, up, spec.width, gated=spec.gated),
        Product(binding.DOWN, (("down", spec.width),), spec.inner),
    )


class _Reader:
    """Tensors as float32, each checked against the shape it must have."""

    def __init__(self, weights: Mapping[str, npt.NDArray[Any]], spec: EncoderSpec) -> None:
        self._weights, self._shapes = weights, shapes(spec)

    def need(self, name: str) -> Floats:
        found = self.find(name)
        if found is None:
            raise ModelError(f"the weights have no {name!r}, of shape {list(self._shapes[name])}")
        return found

    def find(self, name: str) -> Floats | None:
        array, shape = self._weights.get(name), self._shapes.get(name)
        if array is None or shape is None:
            return None
        more = name == "position" and array.shape[1:] == shape[1:] and array.shape[0] > shape[0]
        if array.shape != shape and not more:
            raise ModelError(f"the weight {name!r} has the shape {list(array.shape)}; it must be {list(shape)}")
        return np.require(array, np.float32, ["C", "A"])


def _added_rows(spec: EncoderSpec, weights: _Reader) -> Floats | None:
    """What is added to a word's vector: a row per position, or one row for all when only the token type is added."""
    kind = weights.need("type")[:1] if spec.type_rows else None
    if not spec.learned_positions:
        return kind
    positions = weights.need("position")
    return positions if kind is None else positions + kind


def _int32(values: npt.ArrayLike, name: str) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(f"{name} must be one row of whole numbers; got {array.dtype} of shape {list(array.shape)}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise InputError(f"{name} has numbers beyond 32 bits")
    return np.require(array, np.int32, ["C", "A"])


def _made(answer: int) -> None:
    if answer == binding.BAD_PART:
        raise ModelError("a weight does not fit the encoder's shape", hint="config.json and the weights disagree")
    if answer != binding.OK:
        raise OutOfMemory("no memory for the packed weights", hint="use a smaller model, or quantize it")


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- MPNet's attention bias: buckets of distances, near ones apart and far ones together -------------------------------

SLACK = 64  # floats after the last distance: the C++ reads whole vectors


def bucket(distance: npt.NDArray[np.int64], buckets: int, greatest: int) -> npt.NDArray[np.int64]:
    """The bucket of each distance j - i. Half of them for either direction; of these half exact, half logarithmic."""
    half = buckets // 2
    n = -distance
    side = (n < 0).astype(np.int64) * half
    n = np.abs(n)
    exact = half // 2
    with np.errstate(divide="ignore"):
        # In float32, like the reference: at the edges of a bucket the rounding decides.
        ratio = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact)) / math.log(greatest / exact)
    far = exact + (ratio.astype(np.float32) * (half - exact)).astype(np.int64)
    return side + np.where(n < exact, n, np.minimum(far, half - 1))


def distance_biases(table: Floats, positions: int, greatest: int) -> tuple[Floats, int]:
    """[heads, …] biases by distance from -(positions - 1) on, and the column of distance 0."""
    distances = np.arange(-(positions - 1), positions)
    rows = bucket(distances, table.shape[0], greatest)
    biases = np.zeros((table.shape[1], len(distances) + SLACK), np.float32)
    biases[:, : len(distances)] = table[rows].T
    return biases, positions - 1
