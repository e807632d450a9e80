"""llama.cpp as a contender of decode_cpu.py: a model of ours written as GGUF, and its own built library called by ctypes.

    npm pack @node-llama-cpp/linux-x64 && tar xzf node-llama-cpp-linux-x64-*.tgz     → package/bins/linux-x64
    pip install gguf

Of its structures passed by value only the size matters here, and that it is at most 512 bytes: all defaults stay, and
threads are set by a function.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anytorch.text.decoders import Decoder

KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(decoder: Decoder, precision: str, path: Path) -> int:
    """Write a Qwen3 decoder with a tied head as GGUF; gives the bytes of weights that a token reads."""
    import gguf

    spec = decoder.spec
    assert spec.family == "qwen3" and spec.tied, "what this writer knows"
    kind = gguf.GGMLQuantizationType[KINDS[precision]]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.width)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.inner)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_width)
    writer.add_value_length(spec.head_width)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rotary.theta)
    writer.add_vocab_size(spec.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    nbytes = 0

    def add(name: str, tensor: torch.Tensor) -> None:
        nonlocal nbytes
        values = tensor.detach().float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(name, values)
            return
        packed = gguf.quantize(values, kind)
        nbytes += packed.nbytes
        writer.add_tensor(name, packed, raw_dtype=kind)

    body = decoder.model
    add("token_embd.weight", body.embed_tokens.weight)
    add("output_norm.weight", body.norm.weight)
    for number, layer in enumerate(body.layers):
        for ours, theirs in NAMES.items():
            add(f"blk.{number}.{theirs}.weight", layer.get_submodule(ours).weight)
    part = path.with_suffix(".part")
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)
    return nbytes


class _Parameters(ctypes.Structure):  # llama_model_params and llama_context_params, and room to spare
    _fields_ = (("words", ctypes.c_uint32 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


def libraries(folder: Path, cpu: str | None) -> tuple[Any, str]:
    """llama.cpp's library in a folder, with the CPU's back end that it takes by itself, or the named one ("haswell")."""
    _base, ggml, llama = (
        ctypes.CDLL(str(next(folder.glob(name))), mode=ctypes.RTLD_GLOBAL)
        for name in ("libggml-base*.so", "libggml.*so", "libllama.*so")
    )
    if cpu is None:
        ggml.ggml_backend_load_all_from_path(str(folder).encode())
    else:
        ggml.ggml_backend_load.restype = ctypes.c_void_p
        if not ggml.ggml_backend_load(str(folder / f"libggml-cpu-{cpu}.so").encode()):
            raise SystemExit(f"{folder} has no back end for {cpu}")
    pointer = ctypes.c_void_p
    for name, result, given in (
        ("llama_model_default_params", _Parameters, []),
        ("llama_context_default_params", _Parameters, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Parameters]),
        ("llama_init_from_model", pointer, [pointer, _Parameters]),
        ("llama_set_n_threads", None, [pointer, ctypes.c_int32, ctypes.c_int32]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        ("llama_batch_get_one", _Batch, [pointer, ctypes.c_int32]),
        ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
        ("llama_free", None, [pointer]),
        ("llama_model_free", None, [pointer]),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = result, given
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda _level, _text, _data: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    llama.quiet = quiet  # it must live as long
    return llama, next(folder.glob("libllama.*so")).name


class Llama:
    """A GGUF file decoded by llama.cpp; its default context is 512 tokens."""

    def __init__(self, llama: Any, path: Path, threads: int) -> None:
        self.llama = llama
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.context = llama.llama_init_from_model(self.model, llama.llama_context_default_params())
        llama.llama_set_n_threads(self.context, threads, threads)

    def logits(self, ids: list[int], vocabulary: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Of the last of some more tokens."""
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(ctypes.addressof(tokens), len(ids))):
            raise SystemExit("llama_decode failed")
        found = self.llama.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(found, (vocabulary,))

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def close(self) -> None:
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)
