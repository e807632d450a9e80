"""Turn one sentence-transformers folder into what each peer of `embed_cpu.py` reads. Run by it, in the peers' own Python.

python bench/embed_cpu_prepare.py STEP MODEL_FOLDER OUTPUT_FOLDER

Every step writes a folder of its own and can be repeated. The answers are compared with sentence-transformers' later, so a
bad conversion shows as a bad cosine, not as a good time.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

WINDOW = 256  # tokens: the model's own max_seq_length, for every contender


def tokenizer_files(model: Path, output: Path) -> None:
    """What fastembed reads beside the graph; its window is that of tokenizer_config.json."""
    for name in ("tokenizer.json", "config.json", "special_tokens_map.json"):
        shutil.copy(model / name, output / name)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (output / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": WINDOW}))


def onnx(model: Path, output: Path) -> None:
    """fp32 by torch's exporter; the fused graph and dynamic int8 by onnxruntime's own tools."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(str(model), attn_implementation="eager").eval()
    heads, hidden = bert.config.num_attention_heads, bert.config.hidden_size

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            answer = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return answer.last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    for folder in ("fp32", "fused", "int8"):
        (output / folder).mkdir(parents=True, exist_ok=True)
        tokenizer_files(model, output / folder)
    sample = torch.randint(1000, 2000, (2, 16))
    torch.onnx.export(
        LastHiddenState(),
        (sample, torch.ones_like(sample), torch.zeros_like(sample)),
        str(output / "fp32" / "model.onnx"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in [*names, "last_hidden_state"]},
        opset_version=17,
        dynamo=False,
    )
    source = str(output / "fp32" / "model.onnx")
    fused = optimizer.optimize_model(source, model_type="bert", num_heads=heads, hidden_size=hidden, opt_level=1)
    print("fused:", fused.get_fused_operator_statistics())
    fused.save_model_to_file(str(output / "fused" / "model.onnx"))
    quantize_dynamic(source, str(output / "int8" / "model.onnx"), weight_type=QuantType.QInt8)


def ctranslate2(model: Path, output: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    for kind in ("float32", "int8"):
        TransformersConverter(str(model)).convert(str(output / kind), quantization=kind, force=True)
        shutil.copy(model / "tokenizer.json", output / kind / "tokenizer.json")


def backends(model: Path, output: Path) -> None:
    """sentence-transformers' own export, with the tools it names for it."""
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    for backend in ("onnx", "openvino"):
        shutil.rmtree(output / backend, ignore_errors=True)
        encoder = SentenceTransformer(str(model), backend=backend, device="cpu")
        encoder.save_pretrained(str(output / backend))
        if backend == "onnx":
            export_dynamic_quantized_onnx_model(encoder, instruction_set(), str(output / backend))


def instruction_set() -> str:
    """What sentence-transformers calls the best kind of int8 model for this machine."""
    flags = Path("/proc/cpuinfo").read_text()
    if "asimd" in flags:
        return "arm64"
    return "avx512_vnni" if "avx512_vnni" in flags else "avx512" if "avx512f" in flags else "avx2"


def openvino(model: Path, output: Path) -> None:
    """int8 by NNCF, calibrated with sentences that are not timed: OpenVINO's own way for transformers."""
    import nncf
    import numpy
    import openvino as ov
    from corpus import sentences
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(WINDOW)

    def sample(text: str) -> dict[str, Any]:
        ids = numpy.array([tokenizer.encode(text).ids], numpy.int64)
        return {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}

    graph = ov.Core().read_model(str(output.parent / "onnx" / "fp32" / "model.onnx"))
    texts = sentences(2300)[2000:]
    packed = nncf.quantize(
        graph, nncf.Dataset(texts, sample), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts)
    )
    output.mkdir(parents=True, exist_ok=True)
    ov.save_model(packed, str(output / "model.xml"))


STEPS = {"onnx": onnx, "openvino": openvino, "ctranslate2": ctranslate2, "backends": backends}

if __name__ == "__main__":
    step, model, output = sys.argv[1:]
    Path(output).mkdir(parents=True, exist_ok=True)
    STEPS[step](Path(model), Path(output))
