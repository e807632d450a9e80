"""One contender of `embed_cpu.py`, in a process of its own: load, first vector, time the texts, answer in JSON.

python embed_cpu_child.py NAME JOB.json STARTED     the job names model, converted models, texts, cores; STARTED is the clock

Run by the Python that has the contender's packages, which need not have anytorch. Nothing is imported before the
contender's own imports, because process start to first vector is one of the figures.
"""

from __future__ import annotations

import sys
import time

if __name__ == "__main__":
    import json  # the standard library's; a millisecond
    import os

    with open(sys.argv[2]) as file:  # noqa: PTH123  (pathlib would be another import on the clock)
        JOB = json.load(file)
    os.sched_setaffinity(0, JOB["cores"])  # helper threads of any library share these cores, too
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[variable] = str(len(JOB["cores"]))
    os.environ.update(TOKENIZERS_PARALLELISM="true", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    os.environ.update(ANYTORCH_THREADS=str(len(JOB["cores"])), DO_NOT_TRACK="1", INFINITY_ANONYMOUS_USAGE_STATS="0")

from collections.abc import Callable, Sequence
from typing import Any

Encode = Callable[[Sequence[str]], Any]  # texts → float32[n, 384]
WINDOW = 256
BATCH = 32  # sentence-transformers' default, for those that leave batching to the caller


# --- us ------------------------------------------------------------------------------------------------------------


def anytorch(job: dict[str, Any], quantization: str | None = None) -> Encode:
    from anytorch.text.embed import ArrowEngine

    return ArrowEngine(job["model"], device="cpu", quantization=quantization).encode


def anytorch_processes(job: dict[str, Any], quantization: str | None = None) -> Encode:
    """A process for each core instead of a thread; what `devices="all"` decides between."""
    from anytorch.text.embed import ArrowEngine

    return ArrowEngine(job["model"], devices=["cpu"] * len(job["cores"]), quantization=quantization).encode


# --- sentence-transformers and the engine built on it --------------------------------------------------------------


def sentence_transformers(job: dict[str, Any]) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(len(job["cores"]))
    return SentenceTransformer(job["model"], device="cpu").encode


def sentence_transformers_onnx(job: dict[str, Any], file: str = "model.onnx") -> Encode:
    import onnxruntime
    from sentence_transformers import SentenceTransformer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(job["cores"])
    options.log_severity_level = 3
    chosen = {"file_name": f"onnx/{file}", "session_options": options, "provider": "CPUExecutionProvider"}
    folder = f"{job['work']}/backends/onnx"
    return SentenceTransformer(folder, backend="onnx", device="cpu", model_kwargs=chosen).encode


def quantized_onnx(job: dict[str, Any]) -> str:
    """The int8 model that was exported for this machine: its name says for which instructions."""
    folder = f"{job['work']}/backends/onnx/onnx"
    (name,) = [name for name in os.listdir(folder) if "int8" in name and name.endswith(".onnx")]  # noqa: PTH208
    return name


def sentence_transformers_openvino(job: dict[str, Any]) -> Encode:
    from sentence_transformers import SentenceTransformer

    chosen = {"ov_config": {"INFERENCE_NUM_THREADS": len(job["cores"])}}
    folder = f"{job['work']}/backends/openvino"
    return SentenceTransformer(folder, backend="openvino", device="cpu", model_kwargs=chosen).encode


def infinity(job: dict[str, Any]) -> Encode:
    import asyncio

    import numpy
    import torch
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    torch.set_num_threads(len(job["cores"]))
    arguments = EngineArgs(
        model_name_or_path=job["model"],
        engine="torch",
        device="cpu",
        dtype="float32",
        model_warmup=False,
        bettertransformer=False,  # gone from transformers; with it, infinity does not start
    )
    engine = AsyncEmbeddingEngine.from_args(arguments)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.astart())

    def encode(texts: Sequence[str]) -> Any:
        vectors, _ = loop.run_until_complete(engine.embed(sentences=list(texts)))
        return numpy.stack(vectors)

    return encode


# --- runtimes that compute a padded batch: the caller tokenises, sorts, pools --------------------------------------


def by_batches(tokenizer_file: str, forward: Callable[[Any, Any], Any]) -> Encode:
    """The usual careful loop round a runtime: sorted by tokens, batches of 32 padded to their longest, mean pooling."""
    import numpy
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.no_padding()
    tokenizer.enable_truncation(WINDOW)

    def encode(texts: Sequence[str]) -> Any:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        vectors: Any = None
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            longest = len(ids[chosen[0]])
            tokens = numpy.zeros((len(chosen), longest), numpy.int64)
            mask = numpy.zeros((len(chosen), longest), numpy.int64)
            for row, index in enumerate(chosen):
                tokens[row, : len(ids[index])] = ids[index]
                mask[row, : len(ids[index])] = 1
            hidden = forward(tokens, mask)
            weights = mask[..., None].astype(numpy.float32)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
            pooled /= numpy.linalg.norm(pooled, axis=1, keepdims=True)
            if vectors is None:
                vectors = numpy.empty((len(ids), pooled.shape[1]), numpy.float32)
            vectors[chosen] = pooled
        return vectors

    return encode


def onnxruntime(job: dict[str, Any], kind: str = "fp32") -> Encode:
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = len(job["cores"])
    options.log_severity_level = 3
    folder = f"{job['work']}/onnx/{kind}"
    session = runtime.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])

    def forward(tokens: Any, mask: Any) -> Any:
        names = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": tokens * 0}
        return session.run(None, {slot.name: names[slot.name] for slot in session.get_inputs()})[0]

    return by_batches(f"{folder}/tokenizer.json", forward)


def openvino(job: dict[str, Any], precision: str | None = "f32", graph: str = "onnx/fp32/model.onnx") -> Encode:
    """`precision` None: its own choice, which is bfloat16 on CPUs that have it."""
    import openvino as ov

    core = ov.Core()
    chosen: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(job["cores"]), "NUM_STREAMS": 1}
    if precision is not None:
        chosen["INFERENCE_PRECISION_HINT"] = precision
    compiled = core.compile_model(f"{job['work']}/{graph}", "CPU", chosen)
    request = compiled.create_infer_request()

    def forward(tokens: Any, mask: Any) -> Any:
        answer = request.infer({"input_ids": tokens, "attention_mask": mask, "token_type_ids": tokens * 0})
        return answer[compiled.output(0)]

    return by_batches(f"{job['work']}/onnx/fp32/tokenizer.json", forward)


def ctranslate2(job: dict[str, Any], kind: str = "float32") -> Encode:
    import ctranslate2 as runtime
    import numpy

    folder = f"{job['work']}/ctranslate2/{kind}"
    encoder = runtime.Encoder(folder, device="cpu", compute_type=kind, intra_threads=len(job["cores"]), inter_threads=1)

    def forward(tokens: Any, mask: Any) -> Any:
        lengths = mask.sum(1).tolist()  # it takes lists without padding and pads them itself
        rows = [row[:length] for row, length in zip(tokens.tolist(), lengths)]  # noqa: B905
        return numpy.asarray(encoder.forward_batch(rows).last_hidden_state)

    return by_batches(f"{folder}/tokenizer.json", forward)


def fastembed(job: dict[str, Any], kind: str = "fp32") -> Encode:
    import numpy
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="local/minilm",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(url="http://127.0.0.1/unused"),
        dim=384,
        model_file="model.onnx",
    )
    folder = f"{job['work']}/onnx/{kind}"
    encoder = TextEmbedding("local/minilm", threads=len(job["cores"]), specific_model_path=folder)
    return lambda texts: numpy.stack(list(encoder.embed(list(texts))))


# --- the machine's own limit ---------------------------------------------------------------------------------------


def gemm_peak(job: dict[str, Any]) -> float:
    """The best float32 GFLOP/s of a large product on these cores, by the BLAS of torch (oneMKL/oneDNN) or NumPy."""
    try:
        import torch

        torch.set_num_threads(len(job["cores"]))
        left, right = torch.randn(1536, 1536), torch.randn(1536, 1536)
        product: Callable[[], Any] = lambda: left @ right  # noqa: E731
    except ModuleNotFoundError:
        import numpy

        values = numpy.random.default_rng(0).standard_normal((2, 1536, 1536), numpy.float32)
        product = lambda: values[0] @ values[1]  # noqa: E731
    best, until = float("inf"), time.monotonic() + 2.0
    product()
    while time.monotonic() < until:
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return 2 * 1536**3 / best / 1e9


CONTENDERS: dict[str, tuple[str, Callable[[dict[str, Any]], Encode]]] = {  # name → which Python, how it is loaded
    "anytorch fp32": ("own", anytorch),
    "anytorch int8": ("own", lambda job: anytorch(job, "int8")),
    "anytorch fp32, processes": ("own", anytorch_processes),
    "sentence-transformers": ("main", sentence_transformers),
    "sentence-transformers onnx": ("backends", sentence_transformers_onnx),
    "sentence-transformers onnx int8": ("backends", lambda job: sentence_transformers_onnx(job, quantized_onnx(job))),
    "sentence-transformers openvino": ("backends", sentence_transformers_openvino),
    "onnxruntime fp32": ("main", onnxruntime),
    "onnxruntime fused": ("main", lambda job: onnxruntime(job, "fused")),
    "onnxruntime int8": ("main", lambda job: onnxruntime(job, "int8")),
    "openvino fp32": ("main", openvino),
    "openvino default": ("main", lambda job: openvino(job, None)),
    "openvino int8": ("main", lambda job: openvino(job, None, "openvino/model.xml")),
    "ctranslate2 fp32": ("main", ctranslate2),
    "ctranslate2 int8": ("main", lambda job: ctranslate2(job, "int8")),
    "fastembed": ("main", fastembed),
    "fastembed int8": ("main", lambda job: fastembed(job, "int8")),
    "infinity": ("infinity", infinity),
}


def peak_rss_mb() -> float:
    """The most memory this process and its children, if it has any, ever had in place: the sum of their peaks."""
    peaks = []
    for process in ["self", *children()]:
        with open(f"/proc/{process}/status") as status:  # noqa: PTH123
            peaks += [int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")]
    return sum(peaks)


def cpu_s() -> float:
    """CPU time, user + system, of this process and of those it started, which may still be running."""
    used = os.times()
    total = used.user + used.system + used.children_user + used.children_system
    for process in children():
        with open(f"/proc/{process}/stat") as stat:  # noqa: PTH123
            fields = stat.read().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def children() -> list[str]:
    """A process is listed with the thread that started it."""
    found: list[str] = []
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        try:
            with open(f"/proc/self/task/{thread}/children") as listed:  # noqa: PTH123
                found += listed.read().split()
        except OSError:  # the thread has ended meanwhile
            continue
    return found


def run(name: str, job: dict[str, Any]) -> dict[str, Any]:
    encode = CONTENDERS[name][1](job)
    encode(["The first vector."])
    found: dict[str, Any] = {"cold_s": time.monotonic() - float(sys.argv[3]), "cold_cpu_s": cpu_s()}
    import numpy

    texts = json.loads(open(job["texts"]).read())  # noqa: SIM115, PTH123
    for kind in ("sentences", "passages"):
        encode(texts[kind][: max(4, len(texts[kind]) // 8)])  # threads started, arenas grown, shapes met
    for kind in ("sentences", "passages"):
        before, begin = cpu_s(), time.perf_counter()
        vectors = numpy.asarray(encode(texts[kind]), numpy.float32)
        found[kind] = {"wall_s": time.perf_counter() - begin, "cpu_s": cpu_s() - before, "count": len(texts[kind])}
        numpy.save(f"{job['vectors']}-{kind}.npy", vectors)
    found["peak_rss_mb"] = peak_rss_mb()
    if job["together"]:
        mixed = [*texts["sentences"][:60], *texts["passages"][:4]]
        together = numpy.asarray(encode(mixed), numpy.float64)
        alone = numpy.concatenate([numpy.asarray(encode([text]), numpy.float64) for text in mixed])
        norms = numpy.linalg.norm(together, axis=1) * numpy.linalg.norm(alone, axis=1)
        found["alone_cosine_min"] = float(((together * alone).sum(1) / norms).min())
        found["alone_identical"] = bool((together == alone).all())
    return found


if __name__ == "__main__":
    answer = {"gemm_gflops": gemm_peak(JOB)} if sys.argv[1] == "gemm" else run(sys.argv[1], JOB)
    with open(JOB["answer"], "w") as file:  # noqa: PTH123
        json.dump(answer, file)
    os._exit(0)  # some libraries' threads outlive the interpreter; the answer is written
