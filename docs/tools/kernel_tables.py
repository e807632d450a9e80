"""Kernel graphs, torch.compile and decoding: parts of docs/benchmarks.md."""

# ruff: noqa: E501  (a row of a table is a line)

from __future__ import annotations

import sys
from statistics import median
from types import ModuleType
from typing import Any

from results_files import ROOT, features, few, origin, part, percent, read, table, there, times


def bench(name: str) -> ModuleType:
    """A script of bench/ as a module."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


# --- kernel graphs -----------------------------------------------------------------------------------------------------------


def graphs(where: str) -> str:
    """As bench/graphs.py writes it, between the marks of its own --docs."""
    script = bench("graphs")
    begin, end = script.BEGIN.format(where), script.END.format(where)
    return f"{begin}\n{script.table(read(f'graphs-{where}'))}\n{end}"


@part("graphs-h200")
def graphs_h200() -> str:
    return graphs("h200")


@part("graphs-cpu")
def graphs_cpu() -> str:
    return graphs("cpu")


@part("graphs-block")
def graphs_block() -> str:
    """The decoder block again, after its time limit was mended."""
    rows = []
    for file in ("graphs-h200-block-one-row", "graphs-h200-block", "graphs-h200-block-16-rows"):
        for row in read(file)["rows"]:
            compiled = min(row["us"][name] for name in ("compile", "max-autotune") if name in row["us"])
            rows.append(
                [row["name"], f"{row['us']['ours']:.0f}", f"{row['us']['eager']:.0f}", f"{compiled:.0f}", f"{row['floor_us']:.0f}",
                 f"{row['search_s']:.0f}", f"`{file}.json`, {origin(file)}"]
            )  # fmt: skip
    return table(["µs", "ours", "eager", "the faster torch.compile", "floor", "search, s", "file"], rows)


@part("graphs-webgpu")
def graphs_webgpu() -> str:
    found = read("graphs-webgpu-h200")
    rows = [
        [row["name"], few(row["us"]["ours"]), few(row["us"]["eager"]), f"{row['over_eager']:.2f}", few(row["floor_us"]),
         f"{row['search_s']:.0f}"]
        for row in found["rows"]
    ]  # fmt: skip
    return (
        table(["float16, both recorded", "ours, µs", "our kernels op by op, µs", "×", "floor, µs", "search, s"], rows)
        + f"\n\n{found['over_eager_geometric_mean']:.2f} times on the geometric mean of {len(rows)} rows; searches: median "
        f"{found['search_s_median']:.0f} s, from the cache {1e3 * found['recall_s_median']:.0f} ms; {origin('graphs-webgpu-h200')}; "
        "`bench/results/graphs-webgpu-h200.json`."
    )


def graphs_headline() -> str:
    card, host, web = (read(f"graphs-{name}") for name in ("h200", "cpu", "webgpu-h200"))
    both = [
        f"{one['over_eager_geometric_mean']:.1f} and {one['over_compile_geometric_mean']:.1f} times"
        for one in (card, host)
    ]
    script = bench("graphs")
    packed = script.beside_frozen(script.over_frozen(host["rows"]))
    packed = packed[0].lower() + packed[1:]
    return (
        f"H200: {both[0]} on the geometric mean; CPU: {both[1]} ({packed}); "
        f"webgpu: {web['over_eager_geometric_mean']:.1f} times our own kernels op by op"
    )


# --- torch.compile -----------------------------------------------------------------------------------------------------------

# Where a row is measured twice, the training of the one file and the inference of the other count: the older file's training
# was of a loss whose gradients are mostly rounding.
COMPILED = (
    ("H200, bfloat16", "compile-h200", "inference"),
    ("H200, bfloat16", "compile-training-h200", "training"),
    ("H200 through Vulkan, float32", "compile-webgpu-h200", "inference"),
    ("H200 through Vulkan, float32", "compile-webgpu-h200", "training"),
    ("CPU, two threads, float32", "compile-cpu", "inference"),
    ("CPU, two threads, float32", "compile-cpu", "training"),
)


@part("compile")
def compiled() -> str:
    rows = []
    for where, file, way in COMPILED:
        for row in read(file)["rows"]:
            if row["way"] != way:
                continue
            best = min(row["ms"].values())
            cells = [few(row["ms"][side]) if side in row["ms"] else "" for side in ("eager", "anytorch", "inductor")]
            shown = [f"**{cell}**" if cell and cell == few(best) else cell for cell in cells]
            first = ", ".join(f"{seconds:.0f}" for seconds in row["first_call_s"].values())
            rows.append([where, f"{row['name']}, {way}", *shown, f"{row['over_eager']:.2f}", first])
    files = "; ".join(f"`{file}.json` {origin(file)}" for file in dict.fromkeys(file for _, file, _ in COMPILED))
    head = ["", "ms", "eager", "ours", "inductor", "× eager", "first call, ours and inductor's, s"]
    return table(head, rows) + f"\n\n{files}."


# --- decoding ----------------------------------------------------------------------------------------------------------------


def decode_cell(row: dict[str, Any], side: str, *, bold: bool = False) -> str:
    if side not in row["ms"]:
        return ""
    best = f"**{few(row['ms'][side])}**" if bold else few(row["ms"][side])
    return f"{best} ({percent(row['share'][side])})"


@part("decode-h200")
def decode_h200() -> str:
    found = read("decode-h200")
    sides = ("one launch", "our step", "generate", "torch's step")
    rows = []
    for row in found["rows"]:
        first = min(row["ms"], key=lambda side: row["ms"][side])
        cells = [decode_cell(row, side, bold=side == first) for side in sides]
        rows.append([f"{row['name']} shape", str(row["rows"]), *cells, few(row["floor_ms"])])
    every = [one for row in found["rows"] for some in row["answers"].values() for one in some]
    return (
        table(["", "texts", *sides, "floor"], rows)
        + f"\n\nms per token of each text (share of the rate at which the card reads 8 GB: {found['read_TB_per_s']:.1f} TB/s). The furthest token "
        f"was {max(one['largest_gap'] for one in every):.2f} from float32's best one where rounding to bfloat16 makes "
        f"{max(one['rounding'] for one in every):.2f}. {origin('decode-h200')}; `bench/results/decode-h200.json`."
    )


@part("decode-compiled")
def decode_compiled() -> str:
    (row,) = read("decode-compiled-h200")["rows"]
    rows = [[f"{row['name']} shape", *(few(ms) for ms in row["ms"].values())]]
    return (
        table(["one text, ms per token", *row["ms"]], rows)
        + f"\n\n{origin('decode-compiled-h200')}; `bench/results/decode-compiled-h200.json`."
    )


@part("decode-launch")
def decode_launch() -> str:
    found = read("decode-h200-launch")
    sides = ("one launch", "scheduled", "int4 launch")
    rows = []
    for row in found["rows"]:
        more = row["ms"]["scheduled"] / row["ms"]["one launch"] - 1
        rows.append(
            [f"{row['name']} shape", *(decode_cell(row, side, bold=side == "one launch") for side in sides), f"{100 * more:.1f} %",
             few(row["floor_ms"])]
        )  # fmt: skip
    exact = [one for row in found["rows"] for one in row["answers"]["one launch"]]
    int4 = [one for row in found["rows"] for one in row["answers"].get("int4 launch", [])]
    same = [one["same"] for one in exact]
    return (
        table(["one text", *sides, "the scheduler's share", "floor in bfloat16"], rows)
        + f"\n\nms per token; int4's share is of its own bytes. Of {exact[0]['of']} tokens, {min(same)} to {max(same)} are float32's best, the others at most "
        f"{max(one['largest_gap'] for one in exact):.3f} from it where rounding to bfloat16 makes {max(one['rounding'] for one in exact):.2f}; int4's furthest "
        f"is {max(one['largest_gap'] for one in int4):.3f} where rounding its inputs makes {max(one['rounding'] for one in int4):.2f}. The card read "
        f"{found['read_TB_per_s']:.2f} TB/s; {origin('decode-h200-launch')}; `bench/results/decode-h200-launch.json`."
    )


def decode_headline() -> str:
    """How much less a token costs than by torch's recorded step, and by torch.compile's."""
    rows = read("decode-h200")["rows"]

    def ratios(count: int) -> str:
        found = [row for row in rows if row["rows"] == count]
        return ", ".join(
            few(row["ms"]["torch's step"] / min(row["ms"].get("one launch", 9e9), row["ms"]["our step"]), 2)
            for row in found
        )

    (one,) = read("decode-compiled-h200")["rows"]
    over = one["ms"]["torch.compile's step"] / one["ms"]["one launch"]
    return (
        f"H200: {ratios(1)} times torch's recorded step with one text (0.6B, 1B, 8B), {ratios(16)} with sixteen; "
        f"{times(over)} times torch.compile's on 0.6B"
    )


DECODE_CPU = (("decode-cpu", "as the CPU is"), ("decode-cpu-avx2", "both held to AVX2"))


@part("decode-cpu")
def decode_cpu() -> str:
    rows, files = [], []
    for file, held in DECODE_CPU:
        if not there(file):
            continue
        found = read(file)
        simd = features(found["machine"]) if file == "decode-cpu" else f"{found['machine']['cpu']}, {held}"
        files.append(f"`bench/results/{file}.json` ({origin(file)})")
        for entry in found["results"]:
            for name, one in entry["contenders"].items():
                off = one["logits_off"] if one["logits_off_unrounded"] is None else one["logits_off_unrounded"]
                ratio = median(one["times_ours"])
                rows.append(
                    [simd, entry["precision"], name, f"{few(min(one['ms_per_token']))}, {few(median(one['ms_per_token']))}",
                     percent(median(one["share_of_bandwidth"])), "1" if name == "anytorch" else f"{ratio:.2f}",
                     f"{one['weight_nbytes'] / 2**20:,.0f}", f"{off:.1e}" if off is not None else ""]
                )  # fmt: skip
    if not rows:
        return "Not measured yet: `bench/decode_cpu.py` has written no file."
    head = [
        "",
        "weights",
        "",
        "ms per token, least and median",
        "share of the read bandwidth",
        "its time, × ours",
        "MiB read per token",
        "logits off the unrounded weights'",
    ]
    first = read(next(file for file, _ in DECODE_CPU if there(file)))
    lamp = f", llama.cpp {first['llama_cpp']}" if first.get("llama_cpp") else ""
    return table(head, rows) + f"\n\n{first['threads']} threads, torch {first['torch']}{lamp}; {'; '.join(files)}."


def decode_cpu_job() -> str:
    """For the README: llama.cpp's time in ours, for each instruction set; empty where nothing was measured."""
    told = []
    for file, held in DECODE_CPU:
        rows = read(file)["results"] if there(file) else []
        if all("llama.cpp" in one["contenders"] for one in rows) and rows:
            times = [
                f"{median(one['contenders']['llama.cpp']['times_ours']):.2f} in {one['precision']}" for one in rows
            ]
            told.append(f"{features(read(file)['machine']) if file == 'decode-cpu' else held}: {', '.join(times)}")
    return f"its time per token, ours being 1. {'; '.join(told)}" if told else ""


def decode_cpu_headline() -> str:
    """Of each precision, the fastest of the others beside ours; empty where nothing was measured."""
    if not there("decode-cpu"):
        return ""
    told = []
    for entry in read("decode-cpu")["results"]:
        others = {name: median(one["times_ours"]) for name, one in entry["contenders"].items() if name != "anytorch"}
        if others:
            best = min(others, key=lambda name: others[name])
            told.append(f"{others[best]:.2f} ({best}) in {entry['precision']}")
    return f"the fastest of the others takes {', '.join(told)} times as long as ours" if told else ""
