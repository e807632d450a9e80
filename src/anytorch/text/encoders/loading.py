"""Weights from a checkpoint onto a device, one tensor at a time in the dtype that is wanted there.

At no time is there a second copy of the model: the stored bytes are mapped, one tensor is sent, converted on the device
and put in its place. The module is built without memory first (torch's meta device).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from anytorch.errors import ModelError
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.text.checkpoints.weights import EncoderWeights
from anytorch.text.encoders.layers import EncoderModule, Rotary

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Tensors inside the encoder's own name space that compute nothing: tables older versions of transformers stored.
KNOWN_EXTRAS = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|rotary_emb\..*|pooler\..*)$")
# What a checkpoint may have beside its encoder: the head it was trained with.
HEADS = re.compile(r"^(cls|lm_head|classifier|score|qa_outputs|head|decoder|vocab_\w+|pre_classifier|pooler)\.")


def load_module(
    spec: EncoderSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    after_layer: Callable[[EncoderModule, int], object] | None = None,
) -> EncoderModule:
    """The encoder with its weights, ready to run. Raises ModelError naming tensors that are missing or left over.

    `after_layer(module, number)` is called for each layer as soon as it is filled and before the next one is read:
    quantizing there keeps one layer at most unpacked.
    """
    weights = EncoderWeights(checkpoint, spec)
    refuse_leftovers(weights, checkpoint, spec)
    with torch.device("meta"):
        module = EncoderModule(spec, weights)
    module.requires_grad_(False).eval()
    places = dict(module.named_parameters())
    layer = -1
    for name, parts, rows in plan(spec, weights):
        owner = module.get_submodule(name.rpartition(".")[0])
        filled = assemble(weights, parts, places.pop(name).shape, device, torch.float32 if rows else dtype)
        for row in rows:
            filled += read(weights, row)[0].to(device=device, dtype=torch.float32)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(filled.to(dtype), requires_grad=False))
        here = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if after_layer is not None and here != layer and layer >= 0:
            after_layer(module, layer)
        layer = here
    if after_layer is not None and layer >= 0:
        after_layer(module, layer)
    assert not places, f"no weights were planned for {sorted(places)}"
    for one in module.modules():
        if isinstance(one, Rotary):
            one.fill(device)
    return module


def plan(spec: EncoderSpec, weights: EncoderWeights) -> Iterator[tuple[str, list[str], list[str]]]:
    """Our parameter, the tensors it is made of (one below the other), and tables whose row 0 is added to every row."""
    types = ["type"] if spec.type_rows else []
    yield "embedding.word.weight", ["word"], [] if spec.learned_positions else types
    if spec.learned_positions:
        yield "embedding.position.weight", ["position"], types
    if spec.relative_buckets:
        yield "relative.table.weight", ["relative"], []
    wanted = [("embedding.norm", ["embed_norm"]), ("final_norm", ["final_norm"])]
    for layer in range(spec.layers):
        theirs = f"layers.{layer}"
        for ours, names in (
            ("attention.qkv", ["q", "k", "v"]),
            ("attention.out", ["o"]),
            ("attention.q_norm", ["q_norm"]),
            ("attention.k_norm", ["k_norm"]),
            ("attention_norm", ["attn_norm"]),
            ("feed_forward.up", ["gate", "up"] if spec.gated else ["up"]),
            ("feed_forward.down", ["down"]),
            ("feed_forward_norm", ["mlp_norm"]),
        ):
            wanted.append((f"layers.{layer}.{ours}", [f"{theirs}.{name}" for name in names]))
    for ours, names in wanted:
        for part in ("weight", "bias"):
            there = [f"{name}.{part}" in weights for name in names]
            if any(there):
                if not all(there):
                    absent = names[there.index(False)]
                    raise ModelError(f"{weights.checkpoint.folder}: there is no {part} for {absent!r} beside {names}")
                yield f"{ours}.{part}", [f"{name}.{part}" for name in names], []


def assemble(
    weights: EncoderWeights, parts: list[str], shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A tensor of `shape` on the device, filled from its parts one after the other."""
    filled = torch.empty(shape, dtype=dtype, device=device)
    row = 0
    for part in parts:
        stored = read(weights, part)
        if part == "position":
            stored = stored[: shape[0]]  # some checkpoints have rows for more positions than the model may use
        # Sent as stored and converted there: half the traffic for a checkpoint in bfloat16.
        filled[row : row + stored.shape[0]].copy_(stored)
        row += stored.shape[0]
    assert row == shape[0], (parts, row, shape)
    return filled


def read(weights: EncoderWeights, name: str) -> Tensor:
    """The tensor as it is stored, in memory or over the mapped file. Not to be written."""
    source = weights.sources[name]
    stored = weights.dtype(name)
    if stored not in TORCH_DTYPES:
        raise ModelError(
            f"{weights.checkpoint.folder}: tensor {source.name!r} has dtype {stored}; an encoder's weights are floating "
            f"point: {', '.join(TORCH_DTYPES)}",
            hint="use the unquantized checkpoint and let `quantization=` do it here",
        )
    shape = weights.checkpoint.shape(source.name)
    if source.parts > 1:
        shape = (shape[0] // source.parts, *shape[1:])
    raw = weights.checkpoint.raw(source.name, source.part, source.parts)
    if not raw.nbytes:
        found = torch.empty(shape, dtype=TORCH_DTYPES[stored])
    else:
        # torch warns about every buffer it may not write to; seen through ctypes the same bytes are only bytes.
        view = (ctypes.c_uint8 * raw.nbytes).from_address(raw.ctypes.data)
        view.owner = raw  # type: ignore[attr-defined]  # torch keeps the view, and the view the memory
        found = torch.frombuffer(view, dtype=TORCH_DTYPES[stored]).reshape(shape)
    return found


def refuse_leftovers(weights: EncoderWeights, checkpoint: Checkpoint, spec: EncoderSpec) -> None:
    """Raise ModelError for encoder tensors that the spec does not use: an extra layer, a variant."""
    used = {source.name for source in weights.sources.values()}
    left = []
    for name in checkpoint.names():
        inner = name.removeprefix(weights.prefix)
        known = name in used or not name.startswith(weights.prefix) or KNOWN_EXTRAS.search(inner) or HEADS.match(inner)
        if not known:
            left.append(name)
    if left:
        shown = ", ".join(sorted(left)[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise ModelError(
            f"{checkpoint.folder}: the checkpoint has {len(left)} tensors that a {spec.family} with {spec.layers} "
            f"layers (config.json) does not use: {shown}",
            hint="config.json and the weights are of different models, or it is a variant that is not supported",
        )
