"""A checkpoint's tensors under our own names, whatever its authors called them.

    word [vocabulary, width]   position [rows, width]   type [type_rows, width]   relative [relative_buckets, heads]
    embed_norm.weight .bias    final_norm.weight .bias
    layers.<i>.{q,k,v,o}.weight [out, in] .bias [out]           layers.<i>.{q,k}_norm.weight [head_width]
    layers.<i>.{gate,up,down}.weight .bias                      layers.<i>.{attn,mlp}_norm.weight .bias

Linear weights are [out, in], as torch stores them. A name that is absent (`get` gives None) is a part the model does not
have: a bias, or a norm that is the identity. Which parts there are, and in what order they compute, is `EncoderSpec`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from anytorch.errors import ModelError
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.ranges import check_depth
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.values import dataclass


@dataclass(frozen=True)
class StoredPart:
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
        self.prefix, self.sources = find_sources(checkpoint, spec)
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
        return self.checkpoint.tensor(source.name, source.part, source.parts)

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


def find_sources(checkpoint: Checkpoint, spec: EncoderSpec) -> tuple[str, dict[str, StoredPart]]:
    """What stands before the encoder's names in the checkpoint, and our names → the checkpoint's, for those it has.

    Heads it has beside the encoder are left alone.
    """
    check_depth(spec.layers, checkpoint.names(), str(checkpoint.folder))
    layout = LAYOUTS[spec.family]
    if spec.family == "nomic_bert" and not any("attn.Wqkv" in name for name in checkpoint.names()):
        layout = NOMIC_IN_TRANSFORMERS
    word = f"{layout.top['word']}.weight"
    whole = next((name for name in checkpoint.names() if name == word or name.endswith("." + word)), None)
    if whole is None:
        raise ModelError(
            f"{checkpoint.folder}: the checkpoint has no tensor {word!r}, with or without a prefix",
            hint="config.json and the weights are of different models",
        )
    prefix = whole.removesuffix(word)  # "", "bert.", "model.", "0.auto_model.", …
    places = [("", prefix, layout.top)]
    for layer in range(spec.layers):
        places.append((f"layers.{layer}.", f"{prefix}{layout.layers}.{layer}.", layout.layer))
    found = {}
    known = shapes(spec)
    for before, there, names in places:
        for ours, theirs in names.items():
            fused = ours.split()
            for index, name in enumerate(fused):
                for part, old in KINDS[:1] if name in TABLES else KINDS:
                    mine = before + (name if name in TABLES else f"{name}.{part}")
                    if name[1:] == "_norm" and mine not in known:
                        continue  # a bias that no model of this family has: it is left over, and so refused
                    endings = (part, old) if name.endswith("_norm") else (part,)
                    stored = next((s for e in endings if (s := f"{there}{theirs}.{e}") in checkpoint), None)
                    if stored is not None:
                        found[mine] = StoredPart(stored, index, len(fused))
    return prefix, found


# --- what each family's checkpoints call our tensors -------------------------------------------------------------------

TABLES = ("word", "position", "type", "relative")  # these have a weight only, and our names for them do not say so
KINDS = (("weight", "gamma"), ("bias", "beta"))  # checkpoints converted from TensorFlow long ago say gamma and beta


class NamesOf(NamedTuple):
    """Ours → theirs: of the model, and of a layer, whose names follow `layers` and its number.

    Several of ours before one of theirs lie in it one below the other.
    """

    top: dict[str, str]
    layers: str
    layer: dict[str, str]


EMBEDDINGS = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "type": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}
BERT_MLP = {"up": "intermediate.dense", "down": "output.dense", "mlp_norm": "output.LayerNorm"}
LLAMA = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
BERT = NamesOf(
    EMBEDDINGS,
    "encoder.layer",
    {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "attn_norm": "attention.output.LayerNorm",
        **BERT_MLP,
    },
)
NOMIC_IN_TRANSFORMERS = NamesOf(
    EMBEDDINGS, "layers", {**LLAMA, "attn_norm": "post_attention_layernorm", "mlp_norm": "post_mlp_layernorm"}
)
LAYOUTS = {
    "bert": BERT,
    "roberta": BERT,
    "distilbert": NamesOf(
        EMBEDDINGS,
        "transformer.layer",
        {
            **{name: f"attention.{name}_lin" for name in "qkv"},
            "o": "attention.out_lin",
            "attn_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
    ),
    "mpnet": NamesOf(
        {**EMBEDDINGS, "relative": "encoder.relative_attention_bias"},
        "encoder.layer",
        {**{name: f"attention.attn.{name}" for name in "qkvo"}, "attn_norm": "attention.LayerNorm", **BERT_MLP},
    ),
    "modernbert": NamesOf(
        {"word": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"},
        "layers",
        {
            "q k v": "attn.Wqkv",
            "o": "attn.Wo",
            "attn_norm": "attn_norm",
            "gate up": "mlp.Wi",
            "down": "mlp.Wo",
            "mlp_norm": "mlp_norm",
        },
    ),
    "nomic_bert": NamesOf(
        {**EMBEDDINGS, "embed_norm": "emb_ln"},
        "encoder.layers",
        {
            "q k v": "attn.Wqkv",
            "o": "attn.out_proj",
            "up": "mlp.fc11",  # y = fc11(x) * act(fc12(x))
            "gate": "mlp.fc12",
            "down": "mlp.fc2",
            "attn_norm": "norm1",
            "mlp_norm": "norm2",
        },
    ),
    "qwen3": NamesOf(
        {"word": "embed_tokens", "final_norm": "norm"},
        "layers",
        {
            **LLAMA,
            **{f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
            "attn_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
        },
    ),
}
