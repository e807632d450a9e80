"""Kernel graphs beside eager torch and torch.compile: the same function, the same inputs, the same clock, in turns.

    python bench/graphs.py                                        fp32 on the CPU, about 20 minutes on two quiet cores
    python bench/graphs.py --device cuda                          bf16 on a GPU
    python bench/graphs.py --device webgpu                        fp16, beside our own kernels op by op, both recorded
    python bench/graphs.py --only rms --batches 1,8               some cases
    python bench/graphs.py --output bench/results/graphs-cpu.json

Answers first: every contender's error from float64 is printed beside eager's, and one that is wrong has no time. On a GPU
every contender is recorded in a CUDA graph of twelve launches, each on another copy of the inputs (weights come from memory,
as they do in a model); on the CPU each is called. Contenders take turns, nine rounds; times are medians.

Peers: eager torch; torch.compile as it comes and with mode="max-autotune" (on the GPU without its own CUDA graphs, since all
contenders are recorded by us), the ratio being to the faster of the two; on the CPU also its best with weights frozen
(packed ahead of time), which our kernels do not do: that column is shown and does not count.

The floor is the larger of bytes (inputs read once, outputs written once) by a rate, and operations by another. On a GPU
these are the rates of a large copy or sum and of a large matrix product, measured once. On the CPU they are measured before
and after every row (`cpu_limits.py`): how fast our threads read so many bytes again and again, from a cache where they fit,
and add products in registers. A row whose answer is wrong, or whose time is more than 3 % under its floor, is refused, and
the script fails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_limits
import torch
import torch.nn.functional as F
from provenance import provenance, write_results
from torch import nn

import anytorch.graph as kernel_graphs
from anytorch.graph.clock import Clock
from anytorch.graph.verify import errors

ROUNDS = 9
FLOOR_NOISE = 1.03  # a floor is measured, too: on a GPU rows reach 99 % of it
SAMPLE_S = 1e-3  # a sample of a contender is as many calls as take so long, three at least
DTYPES = {"cpu": torch.float32, "webgpu": torch.float16}  # elsewhere bfloat16
Tensors = list[torch.Tensor]


class Wrong(Exception):
    """A row that must not be published: a wrong answer, or a time that cannot be."""


@dataclass(frozen=True)
class Case:
    """One row: `plain` is what a user writes in torch, `build` the same as a graph; the last `weights` are weights."""

    name: str
    plain: Callable[..., torch.Tensor]
    build: Callable[[Any, list[Any]], Any]
    shapes: Sequence[tuple[int, ...]]
    weights: int
    flops: float


def linear_case(name: str, plain: Any, build: Any, rows: int, weights: Sequence[tuple[int, ...]], width: int) -> Case:
    flops = 2.0 * rows * sum(math.prod(shape) for shape in weights if len(shape) == 2)
    return Case(name, plain, build, [(rows, width), *weights], len(weights), flops)


def rms_linear(x: Any, g: Any, w: Any) -> Any:
    return F.rms_norm(x, (x.shape[-1],), g, 1e-6) @ w


def gated_mlp(x: Any, w1: Any, w2: Any) -> Any:
    return F.silu(x @ w1) * (x @ w2)


def lora(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w + (x @ a) @ b


def attend(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def qk_norm(q: Any, k: Any, v: Any, gq: Any, gk: Any) -> Any:
    width = (q.shape[-1],)
    return attend(F.rms_norm(q, width, gq, 1e-6), F.rms_norm(k, width, gk, 1e-6), v)


def unit(x: Any) -> Any:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True))


def n_trans(h: Any, x: Any, alpha: Any) -> Any:
    return unit(h + alpha * (unit(x) - h))


HIDDEN, INNER, HEADS, KV_HEADS, HEAD, CACHE = 4096, 11008, 32, 8, 128, 1024


def block(x: Any, k: Any, v: Any, g1: Any, wq: Any, wo: Any, g2: Any, w1: Any, w2: Any, w3: Any) -> Any:
    """A decoder block for one new token of each sequence over a full cache (the new key and value are in it already)."""
    b = x.shape[0]
    q = (F.rms_norm(x, (HIDDEN,), g1, 1e-6) @ wq).view(b, HEADS, 1, HEAD)
    x = x + attend(q, k, v).view(b, HIDDEN) @ wo
    normed = F.rms_norm(x, (HIDDEN,), g2, 1e-6)
    return x + (F.silu(normed @ w1) * (normed @ w2)) @ w3


def g_unit(g: Any, x: Any) -> Any:
    return g.mul(x, g.rsqrt(g.reduction(g.square(x), -1)))


def g_block(g: Any, inputs: list[Any]) -> Any:
    x, k, v, g1, wq, wo, g2, w1, w2, w3 = inputs
    b = x.shape[0]
    q = g.reshape(g.matmul(g.rms_norm(x, weight=g1, eps=1e-6), wq), (b, HEADS, 1, HEAD))
    x = g.add(x, g.matmul(g.reshape(g.attention(q, k, v), (b, HIDDEN)), wo))
    normed = g.rms_norm(x, weight=g2, eps=1e-6)
    return g.add(x, g.matmul(g.mul(g.silu(g.matmul(normed, w1)), g.matmul(normed, w2)), w3))


def cases(batches: Sequence[int], small: bool) -> Iterator[Case]:
    cut = 8 if small else 1  # --small: the same shapes with shorter sides, to see that everything runs
    d, n, inner, t = 4096 // cut, 6144 // cut, 11008 // cut, 8192 // cut
    for b in batches:
        yield linear_case(
            f"RMSNorm + linear, b={b}",
            rms_linear,
            lambda g, i: g.matmul(g.rms_norm(i[0], weight=i[1], eps=1e-6), i[2]),
            b,
            [(d,), (d, n)],
            d,
        )
    for b in batches:
        yield linear_case(
            f"gated MLP, b={b}",
            gated_mlp,
            lambda g, i: g.mul(g.silu(g.matmul(i[0], i[1])), g.matmul(i[0], i[2])),
            b,
            [(d, inner), (d, inner)],
            d,
        )
    for b in batches:
        yield linear_case(
            f"LoRA rank 16, b={b}",
            lora,
            lambda g, i: g.add(g.matmul(i[0], i[1]), g.matmul(g.matmul(i[0], i[2]), i[3])),
            b,
            [(d, d), (d, 16), (16, d)],
            d,
        )
    heads = [(2, 32, 1, 128), (2, 8, t, 128), (2, 8, t, 128)]
    flops = 4.0 * 2 * 32 * t * 128
    yield Case("GQA decode 2x32 heads, 8 KV heads x 8192 x 128", attend, lambda g, i: g.attention(*i), heads, 0, flops)
    yield Case(
        "QK-norm GQA decode, same shapes",
        qk_norm,
        lambda g, i: g.attention(
            g.rms_norm(i[0], weight=i[3], eps=1e-6), g.rms_norm(i[1], weight=i[4], eps=1e-6), i[2]
        ),
        [*heads, (128,), (128,)],
        2,
        flops,
    )
    for b in batches:
        rows = (8 * b, d)
        yield Case(
            f"nTrans, b={b}",
            n_trans,
            lambda g, i: g_unit(g, g.add(i[0], g.mul(i[2], g.sub(g_unit(g, i[1]), i[0])))),
            [rows, rows, rows],
            0,
            12.0 * 8 * b * d,
        )
    if small:
        return
    weights = [(HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, INNER), (HIDDEN, INNER)]
    weights.append((INNER, HIDDEN))
    for b in batches:
        cache = (b, KV_HEADS, CACHE, HEAD)
        flops = 2.0 * b * sum(math.prod(shape) for shape in weights if len(shape) == 2) + 4.0 * b * HEADS * CACHE * HEAD
        yield Case(f"decoder block, b={b}", block, g_block, [(b, HIDDEN), cache, cache, *weights], 7, flops)


class Module(nn.Module):
    """The function with its weights as parameters, which is what torch.compile can freeze."""

    def __init__(self, case: Case, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.plain = case.plain
        self.weights = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights])

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.plain(*inputs, *self.weights)


def example(case: Case, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Random inputs; weights are scaled so that activations keep their size, as in a trained model."""
    torch.manual_seed(11)
    made = []
    for place, shape in enumerate(case.shapes):
        scale = shape[0] ** -0.5 if place >= len(case.shapes) - case.weights and len(shape) == 2 else 1.0
        made.append((torch.randn(shape) * scale).to(device, dtype))
    return made


def ours(case: Case, inputs: Tensors, limit_s: float) -> tuple[Any, float]:
    graph = kernel_graphs.new_kernel_graph(backend="auto")
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    graph.mark_output(case.build(graph, [graph.new_input(shape, dtype=dtype) for shape in case.shapes]))
    begun = time.perf_counter()
    graph.superoptimize(*inputs, time_limit_s=limit_s)
    return graph, time.perf_counter() - begun


def contenders(
    case: Case, inputs: Tensors, frozen: bool, compiled_too: bool = True
) -> dict[str, Callable[[Tensors], Any]]:
    """Each takes the inputs and computes; what cannot be compiled is left out, and said."""
    made: dict[str, Callable[[Tensors], Any]] = {"eager": lambda tensors: case.plain(*tensors)}
    on_cpu = inputs[0].device.type == "cpu"

    def compiled(mode: str | None) -> Callable[[Tensors], Any]:
        torch._dynamo.reset()
        function = torch.compile(case.plain, mode=mode, dynamic=False)
        function(*inputs)
        return lambda tensors: function(*tensors)

    best = "max-autotune" if on_cpu else "max-autotune-no-cudagraphs"  # all contenders are recorded by us
    modes = {"compile": None, "max-autotune": best}
    for name, mode in modes.items() if compiled_too else ():
        try:
            made[name] = compiled(mode)
        except Exception:  # noqa: BLE001  (a peer that fails is said, and the rest go on)
            print(f"    {name} cannot compile it:\n{traceback.format_exc(limit=1)}", file=sys.stderr)
    if frozen and case.weights and compiled_too:
        try:
            import torch._inductor.config as config

            with config.patch(freezing=True, max_autotune=True):
                count = len(inputs) - case.weights
                module = torch.compile(Module(case, inputs[count:]).eval(), dynamic=False)
                with torch.no_grad():
                    module(*inputs[:count])
            made["frozen"] = lambda tensors: module(*tensors[:count])
        except Exception:  # noqa: BLE001
            print(f"    frozen cannot compile it:\n{traceback.format_exc(limit=1)}", file=sys.stderr)
    return made


def limits(device: torch.device, dtype: torch.dtype, small: bool) -> tuple[float, float]:
    """Bytes/s of a large copy (read and written) and operations/s of a large product, on this device now."""
    clock = Clock(device)
    side, count = (8192, 1 << 28) if device.type != "cpu" and not small else (1536, 1 << 26)
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device, dtype=dtype)

    def best(run: Callable[[], Any]) -> float:
        timed = clock.timed([run])
        clock.stopwatch.seconds(timed, 1)
        return min(clock.stopwatch.seconds(timed, 1) for _ in range(7))

    moved = max(count / best(source.sum), 2 * count / best(lambda: target.copy_(source)))
    return moved, 2.0 * side**3 / best(lambda: a @ a)


def rates_for(nbytes: int, device: torch.device, rates: tuple[float, float]) -> tuple[float, float]:
    """The rates that a row's floor is made of. A row may lie in the CPU's caches, which read faster than memory does."""
    if device.type != "cpu":
        return rates
    return cpu_limits.bytes_per_s(nbytes), cpu_limits.operations_per_s()


def measure(
    case: Case, device: torch.device, options: argparse.Namespace, rates: tuple[float, float]
) -> dict[str, Any]:
    dtype = DTYPES.get(device.type, torch.bfloat16)
    inputs = example(case, device, dtype)
    near = device if device.type == "cuda" else torch.device("cpu")  # webgpu has no float64
    truth = case.plain(*(tensor.to(near).double() for tensor in inputs)).cpu()
    graph, search_s = ours(case, inputs, options.time_limit)
    again, recall_s = ours(case, inputs, options.time_limit)
    runs = {
        "ours": lambda tensors: again(*tensors),
        **contenders(case, inputs, device.type == "cpu", not options.eager),
    }
    wrong = {name: errors(_first(run(inputs)), truth) for name, run in runs.items()}
    scale = float(truth.abs().max())
    clock = Clock(device)
    sets = clock.copies(inputs)
    timed = {}
    for name, run in runs.items():
        if wrong[name] <= 32 * max(wrong["eager"], torch.finfo(dtype).eps * scale):
            timed[name] = clock.timed([lambda run=run, one=one: run(one) for one in sets])
        elif name == "ours":
            raise Wrong(f"ours is off by {wrong[name]:.3g}, eager torch by {wrong['eager']:.3g}")
    nbytes = sum(tensor.nbytes for tensor in inputs) + truth.numel() * inputs[0].element_size()
    before = rates_for(nbytes, device, rates)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    calls = {name: max(3, round(SAMPLE_S / clock.stopwatch.seconds(run, 2))) for name, run in timed.items()}
    for _ in range(ROUNDS):
        for name, run in timed.items():
            clock.stopwatch.seconds(run, 1)  # whose turn it was kept the cores' caches and threads busy
            seconds[name].append(clock.stopwatch.seconds(run, calls[name]))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    most = [max(pair) for pair in zip(before, rates_for(nbytes, device, rates), strict=True)]
    floor = max(nbytes / most[0], case.flops / most[1])
    if floor > FLOOR_NOISE * median["ours"]:
        said = f"a result in {median['ours'] * 1e6:.3g} µs is under its floor of {floor * 1e6:.3g} µs"
        raise Wrong(f"{said}: something else used the machine when the floor was measured; run it again")
    peers = {name: s for name, s in median.items() if name not in ("ours", "frozen")}
    best = min(peers, key=lambda name: peers[name])
    compiled = min((s for name, s in peers.items() if name != "eager"), default=None)
    found = next(iter(graph._found.values()))
    return {
        "name": case.name,
        "us": {name: round(s * 1e6, 2) for name, s in median.items()},
        "spread": {name: round((max(s) - min(s)) / median[name], 3) for name, s in seconds.items()},
        "error": {name: error for name, error in wrong.items()},
        "scale": scale,
        "floor_us": round(floor * 1e6, 2),
        "bytes_per_s": most[0],
        "flops_per_s": most[1],
        "of_floor": round(floor / median["ours"], 3),
        "over_eager": round(median["eager"] / median["ours"], 3),
        "over_compile": round(compiled / median["ours"], 3) if compiled else None,
        "best_peer": best,
        "chosen": found.verdict.chosen if found.verdict else found.why,
        "search_s": round(search_s, 2),
        "recall_s": round(recall_s, 4),
        "explain": graph.explain(),
    }


def _first(made: Any) -> torch.Tensor:
    return made[0] if isinstance(made, (list, tuple)) else made


def show(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return (
        f"{row['name']:<48} {times}  floor {row['floor_us']:.1f}  | {row['over_eager']:.2f}x eager, "
        f"{row['over_compile'] or float('nan'):.2f}x compile, "
        f"error {row['error']['ours']:.2g} (eager {row['error']['eager']:.2g}), "
        f"search {row['search_s']:.1f} s, again {row['recall_s'] * 1e3:.0f} ms: {row['chosen']}"
    )


RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench/graphs.py {0}: begin -->", "<!-- bench/graphs.py {0}: end -->"


def table(result: dict[str, Any]) -> str:
    """The rows of a result for docs/benchmarks.md."""
    names = [name for name in ("ours", "eager", "compile", "max-autotune", "frozen") if name in result["rows"][0]["us"]]
    unit, by = ("ms", 1e3) if result["device"] == "cpu" else ("µs", 1.0)
    head = [
        "",
        *(f"{name}, {unit}" for name in names),
        f"floor, {unit}",
        "× eager",
        "× compile",
        "error, eager's",
        "search, s",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in result["rows"]:
        times = [f"{row['us'][name] / by:.3g}" if name in row["us"] else "" for name in names]
        refused = row["of_floor"] > FLOOR_NOISE  # by the script, since some of the files were written
        floor = "?" if refused else f"{row['floor_us'] / by:.3g}"
        cells = [row["name"], *times, floor, f"{row['over_eager']:.2f}"]
        cells += [f"{row['over_compile']:.2f}" if row["over_compile"] else ""]
        cells += [f"{row['error']['ours']:.1e}, {row['error']['eager']:.1e}", f"{row['search_s']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    mean = {name: result.get(f"{name}_geometric_mean") for name in ("over_eager", "over_compile")}
    cpu = result["machine"]["cpu"] if result["device"] == "cpu" else ", ".join(result["machine"]["gpus"])
    said = f"{cpu}, torch {result['torch']}, {result['date'][:10]}, commit {result['commit'][:7]}. Geometric means: "
    said += f"{mean['over_eager']} times eager, {mean['over_compile']} times the faster torch.compile. "
    if ratios := over_frozen(result["rows"]):
        said += f"{beside_frozen(ratios)}. "
    said += (
        f"Searches: median {result['search_s_median']:.0f} s, from the cache {result['recall_s_median'] * 1e3:.0f} ms."
    )
    return "\n".join([*lines, "", said])


def over_frozen(rows: list[dict[str, Any]]) -> list[float]:
    """The fastest way of torch.compile by ours, with weights packed ahead of time among the ways; empty if not measured."""
    if not any("frozen" in row["us"] for row in rows):
        return []
    ways = ("compile", "max-autotune", "frozen")
    return [min(row["us"][name] for name in ways if name in row["us"]) / row["us"]["ours"] for row in rows]


def beside_frozen(ratios: list[float]) -> str:
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    lost = sum(ratio < 1 for ratio in ratios)
    may = "Where torch.compile may pack weights ahead of time, which ours may not"
    return f"{may}: {mean:.2f} times, and it wins {lost} of {len(ratios)} rows"


def write_docs() -> None:
    page = Path(__file__).parents[1] / "docs" / "benchmarks.md"
    text = page.read_text()
    for where in ("h200", "cpu"):
        path = RESULTS / f"graphs-{where}.json"
        if path.exists():
            begin, end = BEGIN.format(where), END.format(where)
            head, rest = text.split(begin)
            text = f"{head}{begin}\n{table(json.loads(path.read_text()))}\n{end}{rest.split(end)[1]}"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", help="cases whose name has this part; may be repeated")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8, 16])
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of a search")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after this long")
    parser.add_argument("--small", action="store_true", help="an eighth of every side: shows that all of it runs")
    parser.add_argument("--eager", action="store_true", help="beside eager torch alone, for work on our own kernels")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--docs", action="store_true", help="write the tables of docs/benchmarks.md from the results, and end"
    )
    options = parser.parse_args()
    if options.docs:
        write_docs()
        return
    if options.device == "webgpu":
        import anytorch.webgpu  # noqa: F401  (registers the device)

        options.eager = True  # inductor has no kernels for it: the peer is our own path, op by op
    device = torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")
    begun = time.perf_counter()
    rates = limits(device, DTYPES.get(device.type, torch.bfloat16), options.small)
    print(f"{rates[0] / 1e9:.0f} GB/s, {rates[1] / 1e12:.2f} Tflop/s")
    result: dict[str, Any] = {"what": __doc__, **provenance(), "torch": torch.__version__, "device": str(device)}
    result.update(threads=torch.get_num_threads(), bytes_per_s=rates[0], flops_per_s=rates[1], rows=[], skipped=[])
    failed: list[str] = []
    with torch.no_grad():
        for case in cases(options.batches, options.small):
            if options.only and not any(part.lower() in case.name.lower() for part in options.only):
                continue
            if time.perf_counter() - begun > options.seconds:
                result["skipped"].append(case.name)
                continue
            try:
                row = measure(case, device, options, rates)
            except Exception as exc:  # noqa: BLE001  (one row must not cost the others)
                traceback.print_exc()
                result["skipped"].append(f"{case.name}: {exc}")
                failed.append(case.name)
                continue
            result["rows"].append(row)
            print(show(row), flush=True)
            if options.output:
                write_results(options.output, result)
    rows = result["rows"]
    for name in ("over_eager", "over_compile"):
        known = [row[name] for row in rows if row[name]]
        if known:
            mean = math.exp(statistics.fmean(math.log(one) for one in known))
            result[f"{name}_geometric_mean"] = round(mean, 3)
            print(f"{name}: {mean:.3f} on the geometric mean of {len(known)}, least {min(known):.2f}")
    for name in ("search_s", "recall_s"):
        if rows:
            result[f"{name}_median"] = statistics.median(row[name] for row in rows)
    if options.output and rows:
        write_results(options.output, result)
    if failed:
        sys.exit(f"no numbers for {len(failed)} rows, for the reasons above: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
