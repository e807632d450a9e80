"""The measured parts of docs/benchmarks.md and README.md, written from bench/results/: no number is copied by hand.

    python docs/tools/benchmark_tables.py           write them
    python docs/tools/benchmark_tables.py --check   exit status 1 if a page is not what the files say (a test does this, too)

A part stands between `<!-- results: NAME -->` and `<!-- end of NAME -->`; `PARTS` has the function that writes it. Standard
library only, but for the tables of kernel graphs, whose own script writes them and imports torch.
"""

# ruff: noqa: E501  (a row of a table is a line)

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cuda_programs_table  # noqa: F401  registers its part
import kernel_tables  # registers its parts
import modes_tables
from results_files import PARTS, RESULTS, ROOT, features, few, origin, part, percent, read, table, times

sys.path[0] = str(ROOT / "bench")
import embed_cpu_report  # noqa: E402
import serve_report  # noqa: E402

sys.path.pop(0)

# All tables of the first three are written from files; of the others one paragraph each.
LEADING = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md", ROOT / "docs" / "guide" / "modes.md")
CUDA_PROGRAMS = ROOT / "docs" / "guide" / "run-cuda-programs.md"
PAGES = (
    *LEADING,
    CUDA_PROGRAMS,
    ROOT / "docs" / "concepts" / "lite.md",
    *(ROOT / "docs" / "guide" / f"{name}.md" for name in ("quantize", "finetune")),
    *(ROOT / "docs" / "concepts" / f"{name}.md" for name in ("cpu-encoder", "kronos")),
    *(ROOT / "docs" / "migrating" / f"{name}.md" for name in ("ai-os-diffusion", "kronos", "peers")),
)


# --- the overview ----------------------------------------------------------------------------------------------------------


@part("info")
def info() -> str:
    found = read("info-startup")
    rows = []
    for name, row in found["cpu_ms"].items():
        ratio = found["times_less"].get(name)
        if name == "bare interpreter":
            rows.append(["a bare `python -c pass`", f"{row['median_ms']:.0f} ms", ""])
            continue
        goal = f" (goal: at most {found['targets']['most_cpu_ms']:.0f})" if ratio is None else ""
        rows.append([f"`{name}`", f"{row['median_ms']:,.0f} ms{goal}", "1" if ratio is None else f"{ratio:.0f}"])
    cpu = features(found["machine"])
    repeats = found["cpu_ms"]["anytorch info"]["repeats"]
    return (
        table(["", "CPU time", "times ours"], rows)
        + f"\n\n{cpu}, Python {found['machine']['python']}, medians of {repeats}; {origin('info-startup')}; "
        "`bench/results/info-startup.json`. The goal is meant for such a core: one at half the speed takes twice as long, and so do the others."
    )


@part("webgpu-first-answer")
def webgpu_first_answer() -> str:
    found = read("webgpu-first-answer")
    rows = [
        [name, f"{few(run['wall_s'])} s", f"{few(run['cpu_s'])} s", run["adapter"]]
        for name, run in found["runs"].items()
    ]
    goal = f"first answer (goal with the machine to itself: at most {found['most_s']:.0f} s)"
    return (
        table(["", goal, "CPU time of it all", "adapter"], rows)
        + f"\n\n{features(found['machine'])}, {found['machine']['cores']} cores with a load of {few(found['load_average'], 2)} from other work; "
        f"{origin('webgpu-first-answer')}; `bench/results/webgpu-first-answer.json`."
    )


# --- lite ----------------------------------------------------------------------------------------------------------------


def lite_time(us: float | None, digits: int) -> str:
    if us is None:
        return "–"
    return f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us:,.0f} µs" if us >= 100 else f"{us:.{digits}f} µs"


@part("lite-cpu")
def lite_cpu() -> str:
    rows = []
    for case, row in read("lite-cpu").items():
        if not isinstance(row, dict) or "torch_over_lite" not in row:
            continue
        name = re.sub(r" (\d+)x(\d+)$", r" \1 × \2", case)
        taken = [lite_time(row.get(f"{who}_us"), 2) for who in ("lite", "torch", "numpy")]
        rows.append([name, *taken, f"{row['torch_over_lite']:.2f}"])
    return table(["", "lite", "torch", "NumPy", "torch ÷ lite"], rows)


@part("lite-gpu")
def lite_gpu() -> str:
    rows = [
        [case, *(lite_time(row[f"{who}_us"], 1) for who in ("gpu", "host", "torch")), f"{row['torch_over_gpu']:.2f}"]
        for case, row in read("lite-gpu-h200").items()
        if isinstance(row, dict) and "torch_over_gpu" in row
    ]
    return table(["", "lite, GPU", "lite, host", "torch, CUDA", "torch ÷ lite"], rows)


# --- packed layers ---------------------------------------------------------------------------------------------------------

PACKED = {
    "int8": "int8",
    "int8-dynamic": "int8-dynamic",
    "int4": "int4-asym-g64",
    "int2": "int2-asym-g32",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nf4": "nf4-g64",
}
PEERS = {  # as the table and as the file calls them, and the format that they compute
    "torchao int8": ("torchao Int8WeightOnly", "int8"),
    "torchao int8 dynamic": ("torchao Int8DynamicActivation", "int8-dynamic"),
    "bitsandbytes nf4": ("bitsandbytes nf4", "nf4-g64"),
}


@part("quant-cpu")
def quant_cpu() -> str:
    layers: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}
    for row in read("quant-cpu")["results"]:
        layers.setdefault((tuple(row["shape"]), row["m"]), {})[row["format"]] = row
    rows = []
    for ((height, width), count), formats in layers.items():
        ours = [formats[name]["chosen"]["memory"]["x"] for name in PACKED.values()]
        peers = [formats[name]["nn_linear_s"] / formats[name]["times_s"][peer] for peer, name in PEERS.values()]
        rows.append([f"{height} × {width}", f"{count}", *(f"{ratio:.2f}" for ratio in (*ours, *peers))])
    return table(["weight", "rows", *PACKED, *PEERS], rows)


@part("quant-cold")
def quant_cold() -> str:
    layers: dict[tuple[int, int], dict[str, Any]] = {}
    for row in read("quant-h200-cold")["results"]:
        layers.setdefault(tuple(row["shape"]), {})[row["format"]] = row

    def shown(row: dict[str, Any], kernel: dict[str, Any]) -> str:
        return f"{row['nn_linear_s'] / kernel['s']:.2f} ({row['nn_linear_eager_s'] / kernel['eager_s']:.2f})"

    columns = {"int8": "int8", "int4": "int4-asym-g64", "int4-g16": "int4-asym-g16", "nvfp4": "nvfp4"}
    rows = []
    for (height, width), formats in layers.items():
        best = {
            name: min(
                (kernel for key, kernel in formats[form]["kernels"].items() if key.startswith("triton")),
                key=lambda one: one["s"],
            )
            for name, form in columns.items()
        }
        int4 = formats["int4-asym-g64"]
        rows.append(
            [
                f"{height} × {width}",
                *(shown(formats[columns[name]], one) for name, one in best.items()),
                shown(int4, int4["kernels"]["torch int4pack"]),
            ]
        )
    return table(["weight", *columns, "torch's int4pack"], rows)


@part("cpu-encoder-levels")
def cpu_encoder_levels() -> str:
    names = {"avx512vnni": "AVX-512 with VNNI", "avx512": "held to AVX-512 without VNNI", "avx2": "held to AVX2"}
    formats = ("float32", "int8", "int4", "fp4", "int2")
    levels = read("packed-encoder-levels")["levels"]

    def rates(row: dict[str, Any]) -> str:
        return f"{row['sentences']['texts_per_cpu_s']:.0f}, {row['passages']['texts_per_cpu_s']:.1f}"

    rows = [[name, *(rates(levels[level]["formats"][kind]) for kind in formats)] for level, name in names.items()]
    return table(["sentences, passages", *formats], rows)


# --- fine-tuning ---------------------------------------------------------------------------------------------------------------


@part("finetune-example")
def finetune_example() -> str:
    rows = []
    for one in read("finetune-forecast")["fine-tuned"]["scores"]:
        verdict = "better" if one["low"] > 0 else "worse" if one["high"] < 0 else "no difference shown"
        better = [f"{100 * one[name]:.1f}%" for name in ("skill", "low", "high")]
        rows.append(
            [
                one["column"],
                one["measure"],
                one["baseline"],
                f"{one['model']:.3f}",
                f"{one['other']:.3f}",
                better[0],
                f"{better[1]} to {better[2]}",
                verdict,
            ]
        )
    return table(["column", "measure", "against", "model", "other", "better by", "95 % interval", ""], rows)


@part("kronos-approximations")
def kronos_approximations() -> str:
    found = read("forecast-h200-first")
    rows = []
    for row in found["rows"]:
        if row["horizon"] != 120 or "other_ways" not in row:
            continue
        ways = row["other_ways"]
        plain, ours = row["plain"]["wall_s"], row["ours"]["wall_s"]
        rows.append(
            [
                f"{row['model']} × {row['samples']}",
                f"{plain:.2f} s",
                f"{ours:.3f} s ({row['ratio_wall']:.1f}×)",
                *(f"{ways[way]['wall_s']:.3f} s" for way in ("evict", "bfloat16")),
            ]
        )
    return table(
        [
            f"model, samples, {found['lookback']} + 120",
            "published loop",
            "exact",
            '`rolling="evict"`',
            '`dtype="bfloat16"`',
        ],
        rows,
    )


# --- devices ---------------------------------------------------------------------------------------------------------------


def benchmark_rows(device: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{row['workload']}, {row['case']}": row for row in device["rows"] if row["status"] == "ok"}


@part("backends")
def backends() -> str:
    found = read("h200-benchmark")
    report = found.get("report", found)  # a file of before 19 November is the report alone
    devices = {device["backend"]: device for device in report["devices"]}
    card, host = devices["cuda"], devices["cpu"]
    rows = []

    def best(device: dict[str, Any], workload: str, dtype: str) -> dict[str, Any]:
        found = [row for row in device["rows"] if row["status"] == "ok" and row["workload"] == workload]
        return max((row for row in found if row["dtype"] == dtype), key=lambda row: row["rate"])

    single = best(host, "matmul", "float32")["rate"]
    for dtype in ("float32", "bfloat16"):
        here, there = best(card, "matmul", dtype), best(host, "matmul", dtype)
        rows.append(
            [f"matmul {dtype} (each at its best size)", f"{few(here['rate'])} TFLOP/s", f"{few(there['rate'])} TFLOP/s",
             times(here["rate"] / there["rate"]), times(here["rate"] / single), percent(here["share"])]
        )  # fmt: skip
    here, there = (benchmark_rows(device) for device in (card, host))
    for name in here:
        if not name.startswith("transformer") or name not in there:
            continue
        ours, theirs = here[name], there[name]
        plain = there.get(name.replace("bfloat16", "float32").replace("float16", "float32"), theirs)
        rows.append(
            [name.replace(",", "", 1), f"{few(ours['rate'])} TFLOP/s", f"{few(theirs['rate'])} TFLOP/s",
             times(ours["rate"] / theirs["rate"]), times(ours["rate"] / plain["rate"]), percent(ours["share"])]
        )  # fmt: skip
    driver = ", ".join(f"{vendor} {version}" for vendor, version in report["driver"].items())
    return (
        table(
            ["workload", card["name"], "its host's CPU", "ratio", "to the CPU's float32", "share of the stated limit"],
            rows,
        )
        + f"\n\ntorch {report['torch']}, driver {driver}, {str(report['date'])[:10]}, {report['duration_s']:.0f} s per device; "
        "`bench/results/h200-benchmark.json`."
    )


# --- webgpu ----------------------------------------------------------------------------------------------------------------

WEBGPU = (
    ("matmul float32, 1024 / 2048", "webgpu-h200-interleaved", ("float32 1024", "float32 2048")),
    ("matmul float32, 4096 / 8192", "webgpu-h200-interleaved", ("float32 4096", "float32 8192")),
    ("matmul float16, 1024 / 2048", "webgpu-h200-interleaved", ("float16 1024", "float16 2048")),
    ("matmul float16, 4096 / 8192", "webgpu-h200-interleaved", ("float16 4096", "float16 8192")),
    ("copy, 256 MiB", "webgpu-h200-interleaved", ("copy_ 256 MiB",)),
    ("add, 256 MiB", "webgpu-h200-interleaved", ("add kernel 256 MiB",)),
    ("upload / readback, 64 MiB (pageable)", "webgpu-h200-interleaved", ("upload 64 MiB", "readback 64 MiB")),
    ("softmax 16384 × 1024", "webgpu-h200-interleaved", ("softmax 16384x1024",)),
    ("layer norm 16384 × 1024", "webgpu-h200-interleaved", ("layer norm 16384x1024",)),
    ("*** GELU (erf) 16384 × 1024", "webgpu-h200-launcher", ("gelu 16384x1024",)),
    ("sum of rows 16384 × 1024", "webgpu-h200-interleaved", ("sum of rows 16384x1024",)),
    ("attention float32, 16 heads, 2048², 64 / 128", "webgpu-h200-interleaved",
     ("prefill float32 1x16/16x2048x2048x64", "prefill float32 1x16/8x2048x2048x128")),
    ("attention float16, the same", "webgpu-h200-interleaved",
     ("prefill float16 1x16/16x2048x2048x64", "prefill float16 1x16/8x2048x2048x128")),
    ("decode attention float32, 2048 keys", "webgpu-h200-interleaved", ("decode float32 1x16/8x1x2048x128",)),
    ("linear 1 × 1024 × 151,936, float32 / float16", "webgpu-h200-interleaved",
     ("float32 1x1024x151936", "float16 1x1024x151936")),
    ("** MiniLM-shaped encoder, 64 × 128, float32", "webgpu-h200-small-ops", ("MiniLM shape float32 64x128",)),
    ("** the same in float16", "webgpu-h200-small-ops", ("MiniLM shape float16 64x128",)),
    ("** Qwen3-0.6B-shaped decode step, float32, eager", "webgpu-h200-small-ops", ("Qwen3-0.6B shape float32",)),
    ("** the same, recorded, against CUDA eager", "webgpu-h200-small-ops",
     ("Qwen3-0.6B shape float32, replayed (CUDA: eager)",)),
    ("** the same in float16, eager", "webgpu-h200-small-ops", ("Qwen3-0.6B shape float16",)),
    ("** the same in float16, recorded, against CUDA eager", "webgpu-h200-small-ops",
     ("Qwen3-0.6B shape float16, replayed (CUDA: eager)",)),
    ("**** ResNet-50-shaped CNN, 16 images, float32 (spread 53 %)", "webgpu-h200-launcher-again", ("ResNet-50 shape float32 16",)),
    ("*** one small `a + b`, host time, without / with gradients", "webgpu-h200-launcher",
     ("a + b, 64x64, no grad", "a + b, 64x64, with autograd")),
    ("**** the same, half an hour later", "webgpu-h200-launcher-again",
     ("a + b, 64x64, no grad", "a + b, 64x64, with autograd")),
    ("**** `.item()` of one number", "webgpu-h200-launcher-again", ("item()",)),
)  # fmt: skip


@part("webgpu")
def webgpu() -> str:
    rows = []
    for title, file, names in WEBGPU:
        by_name = {row["name"]: row for row in read(file)["rows"]}
        found = [by_name[name] for name in names]
        errors = [row["error"] for row in found if row.get("error")]
        rows.append(
            [title, f"{' / '.join(few(row['webgpu']) for row in found)} {found[0]['unit']}",
             " / ".join(few(row["cuda"]) for row in found), " / ".join(percent(row["share"]) for row in found),
             f"≤ {max(errors):.0e}" if errors else ""]
        )  # fmt: skip
    return table(["work", "webgpu", "CUDA", "share", "error against the reference"], rows)


@part("webgpu-peers")
def webgpu_peers() -> str:
    best = read("webgpu-peers")["best"]
    titles = {
        "mlp, recorded": "two-layer perceptron, recorded here and TinyJit there",
        "mlp": "the same, eager on both sides",
        "matmul": "matmul 256, eager",
        "add": "one small addition at a time, eager",
    }
    rows = [
        [title, f"{few(best['tinygrad'][name]['wall_us'])} µs", f"{few(best['anytorch'][name]['wall_us'])} µs",
         times(best["tinygrad"][name]["wall_us"] / best["anytorch"][name]["wall_us"])]
        for name, title in titles.items()
    ]  # fmt: skip
    return table(["work", "tinygrad 0.14 WEBGPU (Dawn)", "anytorch", "times"], rows)


def tinyjit() -> float:
    best = read("webgpu-peers")["best"]
    return float(best["tinygrad"]["mlp, recorded"]["wall_us"] / best["anytorch"]["mlp, recorded"]["wall_us"])


# --- embeddings ------------------------------------------------------------------------------------------------------------


def embed_gpu_rows() -> list[dict[str, Any]]:
    """Model, kind, file and row of every measured case; the newest file that has it counts."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in ("embed-h200-first", "embed-h200"):
        for model, report in read(file)["models"].items():
            for kind, row in report["kinds"].items():
                if "anytorch" in row:
                    found[model, kind] = {"model": model, "kind": kind, "file": file, **row}
    return list(found.values())


def unfair(rows: list[dict[str, Any]]) -> str:
    """What the older runs did not do alike, for a headline that has a ratio of one."""
    older = any("median_peer" not in row for row in rows)
    return (
        ". **Not measured fairly:** the other side had a part of the texts, less warm-up and two batch sizes; `bench/embed_gpu.py` has been"
        " mended since and has not run again"
        if older
        else ""
    )


TITLES = {"minilm": "MiniLM", "bert-base": "BERT-base", "short": "sentences", "long": "passages"}


@part("embed-gpu")
def embed_gpu() -> str:
    rows = []
    for row in embed_gpu_rows():
        ours = row["anytorch"]
        # Newer runs give both sides equally many timed passes over the same texts, and compare medians.
        peer = row.get("median_peer", row["best_peer"])
        size = row.get("peer_batch_size")
        rows.append(
            [f"{TITLES[row['model']]}, {TITLES[row['kind']]}", f"{few(peer)} /s", f"{few(ours['rate'])} /s", times(ours["rate"] / peer),
             f"{few(row['device_limit'])} /s", percent(ours["share_of_limit"]), f"{row['worst_cosine']:.6f}",
             ", ".join(str(value) for value in dict.fromkeys(size.values())) if size else "",
             f"`{row['file']}.json`, {origin(row['file'])}"]
        )  # fmt: skip
    head = [
        "model, texts",
        "sentence-transformers",
        "anytorch",
        "times",
        "GPU alone",
        "share of the slower limit",
        "worst cosine",
    ]
    return table([*head, "its batch size", "file"], rows)


@part("embed-cpu")
def embed_cpu_table() -> str:
    return embed_cpu_report.markdown(read("embed-cpu"))


@part("embed-cpu-avx2")
def embed_cpu_avx2() -> str:
    """Of the file for a CPU without AVX-512: ours, and the best of the others."""
    found = read("embed-cpu-avx2")
    rows = []
    for cores, given in found["cores"].items():
        good = {name: row for name, row in given["rows"].items() if "error" not in row and row["sentences"]["ratio"]}
        peers = {
            name: row
            for name, row in good.items()
            if not name.startswith("anytorch") and name != "sentence-transformers"
        }
        best = max(peers, key=lambda name: peers[name]["sentences"]["ratio"])
        for name in ("anytorch fp32", "anytorch int8", best):
            ratios = [f"{good[name][kind]['ratio']:.2f}" for kind in ("sentences", "passages")]
            rows.append([cores, f"{name}{' (the best of the others)' * (name == best)}", *ratios])
        rows += [[cores, name, "failed", ""] for name, row in given["rows"].items() if "error" in row]
    return (
        table(["cores", "every library held to AVX2", "sentences/s, × sentence-transformers", "passages/s, ×"], rows)
        + f"\n\n{origin('embed-cpu-avx2')}; `bench/results/embed-cpu-avx2.json`."
    )


# --- the service -----------------------------------------------------------------------------------------------------------


@part("serve")
def serve() -> str:
    return serve_report.serving(read("serve-cpu")).strip()


@part("serve-load")
def serve_load() -> str:
    return serve_report.bad_day(read("serve-load")).strip()


# --- tiers -----------------------------------------------------------------------------------------------------------------


@part("tiers-h200")
def tiers_h200() -> str:
    found = read("tiers-h200")
    ours, peer = found["ours_host"], found["accelerate_cpu_offload"]
    mine, theirs = median(ours["times_s"]), median(peer["times_s"])
    disk = found["disk"]
    rows = [
        ["weights in host memory, 8 tokens per pass",
         f"{few(mine)} s, {few(ours['gb_per_s'])} GB/s, {percent(ours['share_of_pinned'])} of a pinned copy"],
        ["accelerate `cpu_offload`, same pass", f"{few(theirs)} s, {few(peer['gb_per_s'])} GB/s: {times(theirs / mine)} times as long"],
        *(
            [f"beside everything resident, {int(tokens):,} tokens", f"{few(row['ratio'])} times its time"]
            for tokens, row in found["hidden_behind_compute"].items()
        ),
        ["weights on disk, 1 GB of host memory allowed",
         f"{few(median(disk['times_s']))} s, {few(disk['gb_per_s'])} GB/s, {percent(disk['share_of_direct_read'])} of what direct reads reached"],
        ["**accelerate wins:** its `disk_offload`, same pass",
         f"**{few(median(disk['accelerate_disk_offload']['times_s']))} s**: the 16 GB were in the page cache of a host with 128 GB; ours never uses it"],
        ["most device memory ever used", f"{ours['device_peak'] / 1e9:.3f} GB of {ours['ledger']['device']['capacity'] / 1e9:.3f} GB allowed"],
    ]  # fmt: skip
    return table(["", ""], rows) + f"\n\n{origin('tiers-h200')}; `bench/results/tiers-h200.json`."


@part("tiers-cpu")
def tiers_cpu() -> str:
    found = read("tiers-cpu")
    names = {
        "ours": "anytorch", "ours-leaves": 'anytorch, `blocks="leaves"`', "ram": "everything in RAM",
        "accelerate-dat": "accelerate `disk_offload` (.dat)", "accelerate-safetensors": "accelerate, safetensors",
    }  # fmt: skip
    rows = []
    for key, title in names.items():
        short, long = (found["tokens"][tokens]["contenders"][key] for tokens in ("8", "256"))
        rows.append(
            [title, f"{few(short['min_s'])}, {few(short['median_s'])}", times(short["times_ours_paired_median"]),
             f"{few(long['min_s'])}, {few(long['median_s'])}", times(long["times_ours_paired_median"]),
             f"{short['peak_above_baseline'] / 1e6:,.0f} MB"]
        )  # fmt: skip
    head = [
        "seconds, least and median",
        "8 tokens",
        "times ours (paired)",
        "256 tokens",
        "times ours",
        "memory above the start",
    ]
    return table(head, rows) + f"\n\n{origin('tiers-cpu')}; `bench/results/tiers-cpu.json`."


def offload(tokens: str, key: str, file: str = "tiers-cpu") -> float:
    return float(read(file)["tokens"][tokens]["contenders"][key]["times_ours_paired_median"])


# --- forecasts -------------------------------------------------------------------------------------------------------------


def forecast_rows(file: str, unit: str) -> str:
    rows = []
    for row in sorted(read(file)["rows"], key=lambda one: (-one["horizon"], one["model"], one["samples"])):
        plain, ours = row["plain"], row["ours"]
        guessed = " *" if plain["extrapolated"] else ""
        rows.append(
            [f"{row['model']}, {row['samples']} sample{'s' * (row['samples'] > 1)}", str(row["horizon"]),
             f"{few(plain[unit])}{guessed}", few(ours[unit]), times(plain[unit] / ours[unit]), f"{row['compared_ids']:,}"]
        )  # fmt: skip
    found = read(file)
    timed = found["rows"][0]["ours"].get("all_s")
    how = (
        f"{len(timed)} timed runs of each side, the better one"
        if timed
        else "ours the best of two runs, the loop's one"
    )
    head = ["random weights", "horizon", "published, s", "anytorch, s", "times", "ids compared, all equal"]
    return table(head, rows) + f"\n\n{how}; {origin(file)}; `bench/results/{file}.json`."


@part("forecast-cpu")
def forecast_cpu() -> str:
    return forecast_rows("forecast-cpu", "cpu_s")


@part("forecast-h200")
def forecast_h200() -> str:
    return forecast_rows("forecast-h200", "wall_s")


def forecast_ratio(file: str, unit: str, **case: Any) -> float:
    (row,) = [row for row in read(file)["rows"] if all(row[name] == value for name, value in case.items())]
    return float(row["plain"][unit] / row["ours"][unit])


@part("finetune")
def finetune() -> str:
    found = read("finetune-h200")
    rows = [
        [
            row["shape"],
            row["loop"],
            f"{1e3 * row['step_s']:.1f} ms",
            row.get("beside", "published, float32"),
            f"{row['speed']:.2f}",
        ]
        for row in found["results"]
    ]
    return (
        table(["model", "loop", "one step", "beside", "times"], rows)
        + f"\n\nBatch {found['batch']} × {found['rows']} rows, random weights; {origin('finetune-h200')}; `bench/results/finetune-h200.json`."
    )


# --- the tables that lead ----------------------------------------------------------------------------------------------------


def embed_cpu(cores: str, name: str, kind: str, file: str = "embed-cpu") -> float:
    return float(read(file)["cores"][cores]["rows"][name][kind]["ratio"])


def pair(name: str, file: str = "embed-cpu", cores: str = "1") -> str:
    return " / ".join(f"{embed_cpu(cores, name, kind, file):.2f}" for kind in ("sentences", "passages"))


def span(values: list[float]) -> str:
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low} to {high}"


def serve_ratio(clients: str) -> tuple[float, str]:
    """Ours over the best of all peers, and which that is."""
    rows = read("serve-cpu")["results"][clients]
    peers = {name: row["per_second"] for name, row in rows.items() if name != "anytorch"}
    best = max(peers, key=lambda name: peers[name])
    return rows["anytorch"]["per_second"] / peers[best], best


@part("readme-why")
def readme_why() -> str:
    less = read("info-startup")["times_less"]
    diagnoses = len(list((ROOT / "docs" / "doctor").glob("*.md"))) - 1  # without the index
    overview = "[CPU time of the overview](docs/benchmarks.md#the-overview-benchinfo_startuppy)"
    rows = [
        [
            "says why a device is missing, with the fix",
            f"yes, [{diagnoses} diagnoses](docs/doctor/index.md)",
            "no",
            "no",
            "no",
        ],
        ["works when `import torch` fails", "yes", "no", "no", "partly"],
        [
            overview,
            "1",
            "–",
            f"{less['accelerate env']:.0f} times as much",
            f"{less['torch.utils.collect_env']:.0f} times as much",
        ],
        ["sees container CPU and memory limits", "yes", "no", "no", "no"],
        ["never initialises a driver in your process", "yes, tested by tripwire", "no", "partly", "no"],
    ]
    return table(["", "anytorch", "`torch.accelerator`", "`accelerate env`", "`torch.utils.collect_env`"], rows)


@part("readme-jobs")
def readme_jobs() -> str:
    here, simd = read("embed-cpu"), features(read("embed-cpu")["machine"])
    cold = here["cores"]["1"]["rows"]
    gpu = embed_gpu_rows()
    ratios = [row["anytorch"]["rate"] / row.get("median_peer", row["best_peer"]) for row in gpu]
    minilm = next(row for row in gpu if (row["model"], row["kind"]) == ("minilm", "short"))
    host = read("tiers-h200")
    offloaded = median(host["accelerate_cpu_offload"]["times_s"]) / median(host["ours_host"]["times_s"])
    disk = host["disk"]
    h200 = [row["plain"]["wall_s"] / row["ours"]["wall_s"] for row in read("forecast-h200")["rows"]]
    compiled = next(row for row in read("compile-h200")["rows"] if "Llama" in row["name"])["ms"]
    one, many = serve_ratio("1"), serve_ratio("32")
    rows = [
        [
            "[embeddings, one CPU core](docs/benchmarks.md#embeddings-on-the-cpu-benchembed_cpupy)", "sentence-transformers",
            f"{simd}: {pair('anytorch fp32')} times the sentences / passages a second in float32, {pair('anytorch int8')} in int8; "
            f"{older_cpu()}. First vector after {cold['anytorch fp32']['cold_s']:.1f} s, not {cold['sentence-transformers']['cold_s']:.1f}. "
            f"**OpenVINO in bfloat16 ({pair('openvino default')}) is faster than our float32** where the CPU has it",
        ],
        [
            "[embeddings, H200](docs/benchmarks.md#embeddings-on-a-gpu-benchembed_gpupy)", "sentence-transformers",
            f"{span(ratios)} times, end to end: {few(minilm['anytorch']['rate'])} sentences a second with MiniLM{unfair(gpu)}",
        ],
        [
            "[serving them, 2 cores](docs/benchmarks.md#serving-embeddings-benchservepy)", "the best of infinity-emb and FastAPI",
            f"{features(read('serve-cpu')['machine'])}: {times(one[0])} times the requests a second with 1 client ({one[1]}), {times(many[0])} with 32 ({many[1]})",
        ],
        [
            "[a 16 GB model in 2 GB of an H200](docs/benchmarks.md#models-larger-than-the-device-benchtierspy)", "accelerate's offload",
            f"{times(offloaded)} times as fast from host memory, {percent(host['ours_host']['share_of_pinned'])} of the link's rate. "
            f"**From disk accelerate wins** where the page cache holds the model: {few(median(disk['accelerate_disk_offload']['times_s']))} s, ours {few(median(disk['times_s']))} s",
        ],
        [
            "[a 2 GB model in 0.5 GB of RAM, from disk](docs/benchmarks.md#models-larger-than-the-device-benchtierspy)", "accelerate's offload",
            f"{span([offload('8', 'accelerate-dat'), offload('8', 'accelerate-dat', 'tiers-cpu-engine-room')])} times as fast, by the disk's speed; "
            f"{span([offload('8', 'accelerate-safetensors'), offload('8', 'accelerate-safetensors', 'tiers-cpu-engine-room')])} with its safetensors path",
        ],
        [
            "[forecasts, Kronos-small with random weights, 5 samples, one core](docs/benchmarks.md#forecasts-benchforecastpy)", "the published loop",
            f"{times(forecast_ratio('forecast-cpu', 'cpu_s', model='small', samples=5, horizon=120))} times with a rolling window, "
            f"{times(forecast_ratio('forecast-cpu', 'cpu_s', model='small', samples=5, horizon=112))} without (the loop's time is extrapolated from 7 of its steps); "
            f"on an H200 {span(h200)} times, all ids compared",
        ],
        [
            "[`torch.compile`, a small Llama-style decoder, H200](docs/benchmarks.md#kernel-graphs-benchgraphspy)", "inductor",
            f"**inductor wins**: {few(compiled['inductor'])} ms, our back end {few(compiled['anytorch'])}, eager {few(compiled['eager'])}",
        ],
    ]  # fmt: skip
    if text := kernel_tables.decode_cpu_job():
        rows.insert(
            -1,
            [
                "[text, a decoder of Qwen3-0.6B's shape, 2 cores](docs/benchmarks.md#decoding-on-the-cpu-benchdecode_cpupy)",
                "llama.cpp",
                text,
            ],
        )
    if inference := modes_tables.headline():
        rows.insert(
            -1, ["[a mode around a model, unchanged](docs/benchmarks.md#modes-benchmodespy)", "plain torch", inference]
        )
    return table(["for the job", "beside", "measured"], rows)


def older_cpu() -> str:
    """int8 on a CPU without VNNI: measured on one, or with every library held to AVX2."""
    file = "embed-cpu-zen3" if (RESULTS / "embed-cpu-zen3.json").exists() else "embed-cpu-avx2"
    held = "" if file == "embed-cpu-zen3" else ", every library held to it"
    return (
        f"on AVX2 without VNNI{held} {pair('anytorch fp32', file)} and {pair('anytorch int8', file)}; {another_cpu()}"
    )


def another_cpu() -> str:
    """Machines that call themselves the same differ: this one's AVX-512 gave our float32 kernels what AVX2 gives torch's."""
    file = "embed-cpu-first"
    return f"on another machine of that name, {read(file)['date'][:10]}, {pair('anytorch fp32', file)} and {pair('anytorch int8', file)}"


@part("readme-webgpu")
def readme_webgpu() -> str:
    rows = {row["name"]: row for row in read("webgpu-h200-interleaved")["rows"]}
    small = {row["name"]: row for row in read("webgpu-h200-small-ops")["rows"]}
    encoder, half = (small[f"MiniLM shape {dtype} 64x128"]["share"] for dtype in ("float32", "float16"))
    return (
        "The [`webgpu` device](docs/benchmarks.md#the-webgpu-device-beside-cuda-benchwebgpu_gpupy), on an H200 through Vulkan beside CUDA on the\n"
        f"same card: {percent(rows['float32 4096']['share'])} of cuBLAS in float32, {percent(rows['copy_ 256 MiB']['share'])} of the copy rate, "
        f"{percent(encoder)} of a float32 encoder's speed ({percent(half)} in float16, before its kernels for matrix cores).\n"
        f"PyTorch's operator suite finds no wrong answer on it beside the CPU, within {tolerances()}\n"
        "([all operators](docs/reference/webgpu-operators.md)). [All numbers, with what they do not show](docs/benchmarks.md)."
    )


def tolerances() -> str:
    """What the operator suite allows, as tests/webgpu/opinfo_examiner.py has it."""
    source = (ROOT / "tests" / "webgpu" / "opinfo_examiner.py").read_text("utf-8")
    found = dict(re.findall(r'^    "(\w+)": \(([\de.-]+, [\de.-]+)\),$', source, re.M))
    named = [(dtype, *found[dtype].split(", ")) for dtype in ("float32", "float16", "bfloat16")]
    return ", ".join(f"{relative} of the value + {absolute} in {dtype}" for dtype, relative, absolute in named)


@part("summary")
def summary() -> str:
    info_ = read("info-startup")["times_less"]
    rows = {row["name"]: row for row in read("webgpu-h200-interleaved")["rows"]}
    gpu = [row["anytorch"]["rate"] / row.get("median_peer", row["best_peer"]) for row in embed_gpu_rows()]
    host = read("tiers-h200")
    offloaded = median(host["accelerate_cpu_offload"]["times_s"]) / median(host["ours_host"]["times_s"])
    cpu = [row["plain"]["cpu_s"] / row["ours"]["cpu_s"] for row in read("forecast-cpu")["rows"]]
    card = [row["plain"]["wall_s"] / row["ours"]["wall_s"] for row in read("forecast-h200")["rows"]]
    both = [embed_cpu(cores, "anytorch fp32", kind) for cores in ("1", "2") for kind in ("sentences", "passages")]
    int8 = [embed_cpu(cores, "anytorch int8", kind) for cores in ("1", "2") for kind in ("sentences", "passages")]
    one, many = serve_ratio("1"), serve_ratio("32")
    lines = [
        ["[The overview](#the-overview-benchinfo_startuppy)", "`collect_env`, `accelerate env`",
         f"their CPU time is {span(list(info_.values()))} times ours"],
        ["[The webgpu device](#the-webgpu-device-beside-cuda-benchwebgpu_gpupy)", "CUDA on the same H200",
         f"{percent(rows['float32 4096']['share'])} of cuBLAS in float32, {percent(rows['float16 4096']['share'])} in float16; "
         f"{percent(rows['copy_ 256 MiB']['share'])} of the copy rate"],
        ["[The same](#the-webgpu-device-beside-tinygrads-benchwebgpu_peerspy)", "tinygrad's WEBGPU, with TinyJit", f"{times(tinyjit())} times"],
        ["[Embeddings, CPU](#embeddings-on-the-cpu-benchembed_cpupy)", "sentence-transformers, five other engines",
         f"{span(both)} times in float32, {span(int8)} in int8 with VNNI; {older_cpu()}"],
        ["[Embeddings, GPU](#embeddings-on-a-gpu-benchembed_gpupy)", "sentence-transformers, H200", f"{span(gpu)} times{unfair(embed_gpu_rows())}"],
        ["[Larger than the device](#models-larger-than-the-device-benchtierspy)", "accelerate",
         f"{times(offloaded)} times (H200, host memory); {times(offload('8', 'accelerate-safetensors'))} and {times(offload('8', 'accelerate-dat'))} times (CPU, disk); "
         "slower than its disk offload on the H200"],
        ["[Forecasts](#forecasts-benchforecastpy)", "the published loop, random weights", f"{span(cpu)} times on a core, {span(card)} on an H200"],
        ["[Serving embeddings](#serving-embeddings-benchservepy)", "the best of infinity-emb and FastAPI",
         f"{times(one[0])} times with 1 client, {times(many[0])} with 32"],
        ["[Modes](#modes-benchmodespy)", "plain torch", modes_tables.headline() or "in the section"],
        ["[Kernel graphs](#kernel-graphs-benchgraphspy)", 'eager torch, `torch.compile(mode="max-autotune")`', kernel_tables.graphs_headline()],
        ["[Decoding texts](#decoding-texts-benchdecodepy)", "recorded steps of torch, `torch.compile`", kernel_tables.decode_headline()],
        *([["[Decoding on the CPU](#decoding-on-the-cpu-benchdecode_cpupy)", "transformers, llama.cpp", kernel_tables.decode_cpu_headline()]]
          if kernel_tables.decode_cpu_headline() else []),
        ["quantized layers", "`nn.Linear`, torchao, bitsandbytes", "in [Quantize](guide/quantize.md#what-computes)"],
        ["`anytorch.lite`", "torch, tinygrad", "in [How lite is made](concepts/lite.md#what-it-costs)"],
    ]  # fmt: skip
    return table(["section", "beside", "what was measured"], lines)


# --- what the pages for those who come from elsewhere say -----------------------------------------------------------------------

TABLES = "../benchmarks.md#embeddings-on-the-cpu-benchembed_cpupy"


@part("migrating-embeddings")
def migrating_embeddings() -> str:
    machine = features(read("embed-cpu")["machine"])
    fp32, int8 = (embed_cpu("2", f"anytorch {name}", "sentences") for name in ("fp32", "int8"))
    rows = read("embed-cpu")["cores"]["2"]["rows"]
    memory = rows["anytorch fp32"]["peak_rss_mb"] / rows["sentence-transformers"]["peak_rss_mb"]
    minilm = next(row for row in embed_gpu_rows() if (row["model"], row["kind"]) == ("minilm", "short"))
    ratio = minilm["anytorch"]["rate"] / minilm.get("median_peer", minilm["best_peer"])
    return (
        f"- On the CPU ({machine}) all-MiniLM-L6-v2 is **{fp32:.2f} times** as fast as sentence-transformers on torch in float32 and **{int8:.2f} times** in int8\n"
        f"  (sentences, two cores), with {percent(memory)} of the memory and no torch; on an H200 {times(ratio)} times (sentences){unfair([minilm])}.\n"
        f"  [The tables]({TABLES}) have every peer."
    )


@part("peers-embeddings")
def peers_embeddings() -> str:
    machine = features(read("embed-cpu")["machine"])
    rows = read("embed-cpu")["cores"]["2"]["rows"]
    ours, theirs = rows["anytorch fp32"], rows["sentence-transformers"]
    gpu = embed_gpu_rows()
    ratios = [row["anytorch"]["rate"] / row.get("median_peer", row["best_peer"]) for row in gpu]
    return (
        f"On two CPU cores ({machine}) sentences / passages are {pair('anytorch fp32', cores='2')} times (float32) and "
        f"{pair('anytorch int8', cores='2')} times (int8)\nas fast and need {percent(ours['peak_rss_mb'] / theirs['peak_rss_mb'])} of the memory; the first vector is "
        f"there after {ours['cold_s']:.1f} s instead of {theirs['cold_s']:.1f} s ([tables]({TABLES})).\n"
        f"On an H200 {span(ratios)} times as fast{unfair(gpu)}."
    )


@part("kronos-speed")
def kronos_speed() -> str:
    rolling, still = (
        forecast_ratio("forecast-cpu", "cpu_s", model="small", samples=5, horizon=bars) for bars in (120, 112)
    )
    card = [forecast_ratio("forecast-h200", "wall_s", model="base", samples=20, horizon=bars) for bars in (120, 112)]
    return (
        f"- **Speed with the same ids** (random weights). Kronos-small, five paths of 120 bars: [{times(rolling)} times](../benchmarks.md#forecasts-benchforecastpy) as fast as the\n"
        f"  published loop on a CPU core, {times(still)} times where the window does not roll (the loop's time there is extrapolated from 7 of its steps); Kronos-base with 20\n"
        f"  paths on an H200: {times(card[0])} and {times(card[1])} times."
    )


# --- pages -------------------------------------------------------------------------------------------------------------------

MARK = re.compile(r"<!-- results: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end of (?P=name) -->", re.S)


def written(text: str) -> str:
    """The page with every part as the files have it. Raises KeyError for an unknown part."""
    return MARK.sub(
        lambda found: f"<!-- results: {found['name']} -->\n{PARTS[found['name']]()}\n<!-- end of {found['name']} -->",
        text,
    )


def main() -> int:
    stale = []
    for page in PAGES:
        before = page.read_text("utf-8")
        after = written(before)
        if before != after:
            stale.append(page.name)
            if "--check" not in sys.argv[1:]:
                page.write_text(after, "utf-8")
    done = "not what the files say" if "--check" in sys.argv[1:] else "written"
    sys.stdout.write(f"{done}: {', '.join(stale) or 'none'}\n")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
