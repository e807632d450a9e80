"""A checkpoint's tensors under our own names, whatever its authors called them.

    word [vocabulary, width]   position [rows, width]   type [type_rows, width]   relative [relative_buckets, heads]
    embed_norm.weight .bias    final_norm.weight .bias
    layers.<i>.{q,k,v,o}.weight [out, in] .bias [out]           layers.<i>.{q,k}_norm.weight [head_width]
    layers.<i>.{gate,up,down}.weight .bias                      layers.<i>.{attn,mlp}_norm.weight .bias

Linear weights are [out, in], as torch stores them. A name that is absent (`get` gives None) is a part the model does not
have: a bias, or a norm that is the identity. Which parts there are, and in what order they compute, is `EncoderSpec`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch.errors import ModelError
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.values import dataclass


@dataclass(frozen=True)
class Source:
    """Where one of our tensors is in a checkpoint: a tensor, or part `part` of `parts` along its first axis."""

    name: str
    part: int = 0
    parts: int = 1


class EncoderWeights(Mapping[str, "npt.NDArray[Any]"]):
    """The tensors of one encoder, read when they are asked for, in the dtype they are stored in (bfloat16 as float32).

    Making it checks that every tensor the spec needs is there with the right shape, so that a wrong checkpoint is
    refused before anything is built. `Mapping`: `weights["word"]`, `weights.get("layers.0.q.bias")`.
    """

    def __init__(self, checkpoint: Checkpoint, spec: EncoderSpec) -> None:
        self.checkpoint = checkpoint
        self.sources = find_sources(checkpoint, spec)
        expected = shapes(spec)
        for name, shape in expected.items():
            if name not in self.sources:
                if is_optional(name):
                    continue
                raise ModelError(
                    f"{checkpoint.folder}: the checkpoint has no tensor for {name!r} of a {spec.family} model",
                    hint="config.json and the weights are of different models, or the weights are incomplete",
                )
            found = self.shape(name)
            if found != shape and not (name == "position" and found[1:] == shape[1:] and found[0] >= shape[0]):
                raise ModelError(
                    f"{checkpoint.folder}: tensor {self.sources[name].name!r} gives {name!r} the shape {list(found)}; "
                    f"config.json asks for {list(shape)}",
                    hint="config.json and the weights are of different models",
                )

    def shape(self, name: str) -> tuple[int, ...]:
        source = self.sources[name]
        whole = self.checkpoint.shape(source.name)
        if source.parts == 1:
            return whole
        if not whole or whole[0] % source.parts:
            raise ModelError(
                f"{self.checkpoint.folder}: tensor {source.name!r} of shape {list(whole)} cannot be cut into "
                f"{source.parts} equal parts",
                hint="config.json and the weights are of different models",
            )
        return (whole[0] // source.parts, *whole[1:])

    def dtype(self, name: str) -> str:
        return self.checkpoint.dtype(self.sources[name].name)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        source = self.sources[name]
        whole = self.checkpoint.tensor(source.name)
        rows = whole.shape[0] // source.parts
        return whole[source.part * rows : (source.part + 1) * rows] if source.parts > 1 else whole

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as aligned, contiguous float32; not copied when it is that already."""
        return np.require(self[name], np.float32, ["C", "A"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def is_optional(name: str) -> bool:
    """True if a checkpoint may lack this tensor: biases, and ModernBERT's first norm, which is the identity."""
    return name.endswith(".bias") or name == "layers.0.attn_norm.weight"


def shapes(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a model of this spec can have."""
    width, inner = spec.width, spec.inner
    queries, keys = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
    found: dict[str, tuple[int, ...]] = {"word": (spec.vocabulary, width)}
    if spec.learned_positions:
        found["position"] = (spec.max_positions + spec.position_offset, width)
    if spec.type_rows:
        found["type"] = (spec.type_rows, width)
    if spec.relative_buckets:
        found["relative"] = (spec.relative_buckets, spec.heads)
    norms = [name for name, there in (("embed_norm", spec.embed_norm), ("final_norm", spec.final_norm)) if there]
    for layer in range(spec.layers):
        linears = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
        linears |= {"up": (inner, width), "down": (width, inner)}
        if spec.gated:
            linears["gate"] = (inner, width)
        for name, (rows, columns) in linears.items():
            found[f"layers.{layer}.{name}.weight"] = (rows, columns)
            found[f"layers.{layer}.{name}.bias"] = (rows,)
        if spec.qk_norm:
            found |= {f"layers.{layer}.{name}_norm.weight": (spec.head_width,) for name in "qk"}
        norms += [f"layers.{layer}.attn_norm", f"layers.{layer}.mlp_norm"]
    for norm in norms:
        found[f"{norm}.weight"] = (width,)
        if not spec.rms_norm:
            found[f"{norm}.bias"] = (width,)
    return found


def find_sources(checkpoint: Checkpoint, spec: EncoderSpec) -> dict[str, Source]:
    """Our names → the checkpoint's, for those it has. Heads it has beside the encoder are left alone."""
    top, layer_names = LAYOUTS[spec.family](checkpoint)
    prefix = _prefix(checkpoint, top["word"][0].name)
    wanted: dict[str, list[Source]] = dict(top)
    for layer in range(spec.layers):
        for ours, theirs in layer_names.items():
            wanted[f"layers.{layer}.{ours}"] = [Source(s.name.format(layer), s.part, s.parts) for s in theirs]
    found = {}
    for ours, alternatives in wanted.items():
        for source in alternatives:
            if prefix + source.name in checkpoint:
                found[ours] = Source(prefix + source.name, source.part, source.parts)
                break
    return found


def _prefix(checkpoint: Checkpoint, word: str) -> str:
    """What stands before the encoder's own names: nothing, "bert.", "model.", "0.auto_model.", …"""
    for name in checkpoint.names():
        if name == word or name.endswith("." + word):
            return name[: -len(word)]
    raise ModelError(
        f"{checkpoint.folder}: the checkpoint has no tensor {word!r}, with or without a prefix",
        hint="config.json and the weights are of different models",
    )


Layout = tuple[dict[str, list[Source]], dict[str, list[Source]]]


def _linear(ours: str, theirs: str) -> dict[str, list[Source]]:
    return {f"{ours}.{part}": [Source(f"{theirs}.{part}")] for part in ("weight", "bias")}


def _parts(theirs: str, *ours: str) -> dict[str, list[Source]]:
    """One tensor of theirs that is several of ours, one below the other."""
    return {
        f"{name}.{part}": [Source(f"{theirs}.{part}", index, len(ours))]
        for index, name in enumerate(ours)
        for part in ("weight", "bias")
    }


def _norm(ours: str, theirs: str) -> dict[str, list[Source]]:
    # Checkpoints converted from TensorFlow long ago say gamma and beta.
    return {
        f"{ours}.weight": [Source(f"{theirs}.weight"), Source(f"{theirs}.gamma")],
        f"{ours}.bias": [Source(f"{theirs}.bias"), Source(f"{theirs}.beta")],
    }


def _embeddings() -> dict[str, list[Source]]:
    return {
        "word": [Source("embeddings.word_embeddings.weight")],
        "position": [Source("embeddings.position_embeddings.weight")],
        "type": [Source("embeddings.token_type_embeddings.weight")],
        **_norm("embed_norm", "embeddings.LayerNorm"),
    }


def _bert(checkpoint: Checkpoint) -> Layout:
    layer = "encoder.layer.{}"
    return _embeddings(), {
        **_linear("q", f"{layer}.attention.self.query"),
        **_linear("k", f"{layer}.attention.self.key"),
        **_linear("v", f"{layer}.attention.self.value"),
        **_linear("o", f"{layer}.attention.output.dense"),
        **_norm("attn_norm", f"{layer}.attention.output.LayerNorm"),
        **_linear("up", f"{layer}.intermediate.dense"),
        **_linear("down", f"{layer}.output.dense"),
        **_norm("mlp_norm", f"{layer}.output.LayerNorm"),
    }


def _distilbert(checkpoint: Checkpoint) -> Layout:
    layer = "transformer.layer.{}"
    return _embeddings(), {
        **_linear("q", f"{layer}.attention.q_lin"),
        **_linear("k", f"{layer}.attention.k_lin"),
        **_linear("v", f"{layer}.attention.v_lin"),
        **_linear("o", f"{layer}.attention.out_lin"),
        **_norm("attn_norm", f"{layer}.sa_layer_norm"),
        **_linear("up", f"{layer}.ffn.lin1"),
        **_linear("down", f"{layer}.ffn.lin2"),
        **_norm("mlp_norm", f"{layer}.output_layer_norm"),
    }


def _mpnet(checkpoint: Checkpoint) -> Layout:
    layer = "encoder.layer.{}"
    return {**_embeddings(), "relative": [Source("encoder.relative_attention_bias.weight")]}, {
        **_linear("q", f"{layer}.attention.attn.q"),
        **_linear("k", f"{layer}.attention.attn.k"),
        **_linear("v", f"{layer}.attention.attn.v"),
        **_linear("o", f"{layer}.attention.attn.o"),
        **_norm("attn_norm", f"{layer}.attention.LayerNorm"),
        **_linear("up", f"{layer}.intermediate.dense"),
        **_linear("down", f"{layer}.output.dense"),
        **_norm("mlp_norm", f"{layer}.output.LayerNorm"),
    }


def _modernbert(checkpoint: Checkpoint) -> Layout:
    layer = "layers.{}"
    top = {
        "word": [Source("embeddings.tok_embeddings.weight")],
        **_norm("embed_norm", "embeddings.norm"),
        **_norm("final_norm", "final_norm"),
    }
    return top, {
        **_parts(f"{layer}.attn.Wqkv", "q", "k", "v"),
        **_linear("o", f"{layer}.attn.Wo"),
        **_norm("attn_norm", f"{layer}.attn_norm"),
        **_parts(f"{layer}.mlp.Wi", "gate", "up"),
        **_linear("down", f"{layer}.mlp.Wo"),
        **_norm("mlp_norm", f"{layer}.mlp_norm"),
    }


def _nomic_bert(checkpoint: Checkpoint) -> Layout:
    if not any("attn.Wqkv" in name for name in checkpoint.names()):  # as transformers names them
        layer = "layers.{}"
        return _embeddings(), {
            **{k: v for n in "qkvo" for k, v in _linear(n, f"{layer}.self_attn.{n}_proj").items()},
            **{k: v for n in ("gate", "up", "down") for k, v in _linear(n, f"{layer}.mlp.{n}_proj").items()},
            **_norm("attn_norm", f"{layer}.post_attention_layernorm"),
            **_norm("mlp_norm", f"{layer}.post_mlp_layernorm"),
        }
    layer = "encoder.layers.{}"
    return {**_embeddings(), **_norm("embed_norm", "emb_ln")}, {
        **_parts(f"{layer}.attn.Wqkv", "q", "k", "v"),
        **_linear("o", f"{layer}.attn.out_proj"),
        **_linear("up", f"{layer}.mlp.fc11"),  # y = fc11(x) * act(fc12(x))
        **_linear("gate", f"{layer}.mlp.fc12"),
        **_linear("down", f"{layer}.mlp.fc2"),
        **_norm("attn_norm", f"{layer}.norm1"),
        **_norm("mlp_norm", f"{layer}.norm2"),
    }


def _qwen3(checkpoint: Checkpoint) -> Layout:
    layer = "layers.{}"
    top = {"word": [Source("embed_tokens.weight")], **_norm("final_norm", "norm")}
    return top, {
        **{k: v for n in "qkvo" for k, v in _linear(n, f"{layer}.self_attn.{n}_proj").items()},
        **{k: v for n in ("gate", "up", "down") for k, v in _linear(n, f"{layer}.mlp.{n}_proj").items()},
        **{f"{n}_norm.weight": [Source(f"{layer}.self_attn.{n}_norm.weight")] for n in "qk"},
        **_norm("attn_norm", f"{layer}.input_layernorm"),
        **_norm("mlp_norm", f"{layer}.post_attention_layernorm"),
    }


LAYOUTS: dict[str, Callable[[Checkpoint], Layout]] = {
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "modernbert": _modernbert,
    "nomic_bert": _nomic_bert,
    "qwen3": _qwen3,
}
