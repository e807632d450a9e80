"""How fast is the webgpu device beside CUDA, on the same GPU in the same run?

    python bench/webgpu_gpu.py [--budget 480] [--only matmul,attention] [--small] [--output bench/results/webgpu.json]

Every answer is checked before its clock runs. Where torch has CUDA, the same work is timed there too and the last column is
our rate as a share of it; elsewhere the column stays empty. Rates are medians of seven windows after a warm-up, the two
devices taking turns; the spread is (largest - smallest) / median. A section that fails is reported and the rest go on;
sections that no longer fit the budget are listed as skipped. The file also says which kernels were chosen during the run,
with the time of each candidate, launched without CUDA in turns. `--small` is for software adapters: it shows that
everything runs, not how fast.

What the numbers do not show: other GPUs and drivers, other shapes, and memory use.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import chosen_since, provenance, write_results
from torch import nn
from webgpu_models import Decoder, Encoder, UNet, angles, resnet

import anytorch.webgpu  # noqa: F401  (registers the device)
from anytorch.graph.compiler import compile_graph

WINDOWS = 7
WARM_UP_S = 0.3
MIB = 1 << 20


@dataclass
class Row:
    section: str
    name: str
    unit: str
    webgpu: float
    cuda: float | None = None
    spread: float = 0.0
    error: float | None = None  # largest difference from the reference, relative to its largest value
    cuda_spread: float | None = None

    @property
    def share(self) -> float | None:
        """Our rate as a share of CUDA's; for times the other way round, so that 1 is as good and more is better."""
        if not self.cuda:
            return None
        return self.cuda / self.webgpu if self.unit in ("us", "ms") else self.webgpu / self.cuda


@dataclass
class Report:
    machine: dict[str, Any]
    began: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    small: bool
    window_s: float
    cuda: bool


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    else:
        torch.webgpu.synchronize()  # type: ignore[attr-defined]


def interleaved(works: dict[str, Callable[[], Any]], settings: Settings) -> dict[str, tuple[float, float]]:
    """Seconds per call (median of windows) and the spread, for each device. The devices take turns, window by window: what
    else happens on the machine meets all of them alike."""
    calls = {device: warm(work, device, settings) for device, work in works.items()}
    found: dict[str, list[float]] = {device: [] for device in works}
    for _ in range(1 if settings.small else WINDOWS):
        for device, work in works.items():
            start = time.perf_counter()
            for _ in range(calls[device]):
                work()
            synchronize(device)
            found[device].append((time.perf_counter() - start) / calls[device])
    middle = {device: statistics.median(seconds) for device, seconds in found.items()}
    return {device: (middle[device], (max(all_) - min(all_)) / middle[device]) for device, all_ in found.items()}


def warm(work: Callable[[], Any], device: str, settings: Settings) -> int:
    """Bring the device to its clock; how many calls fill a window."""
    until = time.perf_counter() + (0.0 if settings.small else WARM_UP_S)
    work()
    while time.perf_counter() < until:  # an idle GPU takes a while to reach its clock
        work()
        synchronize(device)
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    once = time.perf_counter() - start
    return max(1, min(1000, int(settings.window_s / max(once, 1e-6))))


def difference(got: torch.Tensor, reference: torch.Tensor) -> float:
    expected = reference.detach().double().cpu()
    largest = float(expected.abs().max()) or 1.0
    return float((got.detach().double().cpu() - expected).abs().max()) / largest


def checked(got: torch.Tensor, reference: torch.Tensor, tolerance: float, what: str) -> float:
    error = difference(got, reference)
    if not error <= tolerance:  # a NaN is not
        raise AssertionError(
            f"{what}: differs from the reference by {error:.2e} of its largest value, more than {tolerance}"
        )
    return error


def compare(
    section: str,
    name: str,
    unit: str,
    amount: float,
    make: Callable[[str], Callable[[], Any]],
    settings: Settings,
    error: float | None = None,
) -> Row:
    """Time `make(device)()` on both devices. `amount` per second in `unit`; for "us" and "ms" the time itself."""

    def rate(seconds: float) -> float:
        return seconds * {"us": 1e6, "ms": 1e3}[unit] if unit in ("us", "ms") else amount / seconds

    found = interleaved({device: make(device) for device in ("webgpu", *(["cuda"] if settings.cuda else []))}, settings)
    seconds, spread = found["webgpu"]
    other, other_spread = found.get("cuda", (None, None))
    return Row(section, name, unit, rate(seconds), other and rate(other), spread, error, other_spread)


# --- sections ------------------------------------------------------------------------------------------------------


BOTH = (torch.float32, torch.float16)


def matmul(
    settings: Settings, dtypes: Sequence[torch.dtype] = BOTH, sizes: Sequence[int] = (1024, 2048, 4096, 8192)
) -> Iterator[Row]:
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in dtypes:
        for n in (64, 96) if settings.small else sizes:
            host = [torch.randn(n, n) / n**0.5 for _ in range(2)]

            def make(device: str, host: Any = host, dtype: Any = dtype) -> Callable[[], Any]:
                a, b = (t.to(device, dtype) for t in host)
                return lambda: a @ b

            rows = slice(0, 64)  # the whole product would take the CPU minutes
            reference = host[0].to(dtype).double()[rows] @ host[1].to(dtype).double()
            allowed = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}[dtype]
            error = checked(make("webgpu")()[rows], reference, allowed, f"matmul {n}")
            yield compare("matmul", f"{str(dtype)[6:]} {n}", "TFLOP/s", 2 * n**3 / 1e12, make, settings, error)


def linear(settings: Settings) -> Iterator[Row]:
    """The skinny products of decoding, and of an encoder."""
    shapes = ((1, 1024, 3072), (1, 1024, 151_936), (8, 1024, 3072), (128, 384, 1536), (4096, 384, 1536))
    for m, k, n in ((1, 64, 96), (8, 64, 96)) if settings.small else shapes:
        for dtype in (torch.float32, torch.float16):
            x, w, b = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)

            def make(device: str, held: Any = (x, w, b), dtype: Any = dtype) -> Callable[[], Any]:
                on = [t.to(device, dtype) for t in held]
                return lambda: F.linear(*on)

            reference = F.linear(*[t.to(dtype).double() for t in (x, w[:512], b[:512])])
            error = checked(
                make("webgpu")()[:, :512], reference, 1e-4 if dtype is torch.float32 else 5e-3, f"{m}x{k}x{n}"
            )
            gigabytes = (m * k + n * k + m * n) * dtype.itemsize / 1e9
            unit, amount = ("GB/s", gigabytes) if m <= 8 else ("TFLOP/s", 2 * m * n * k / 1e12)
            yield compare("linear", f"{str(dtype)[6:]} {m}x{k}x{n}", unit, amount, make, settings, error)


def memory(settings: Settings) -> Iterator[Row]:
    nbytes = (1 if settings.small else 256) * MIB
    host = torch.randn(nbytes // 4)

    def copying(device: str) -> Callable[[], Any]:
        x = host.to(device)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    def adding(device: str) -> Callable[[], Any]:
        x = host.to(device)
        y = torch.empty_like(x)
        return lambda: torch.add(x, 1.0, out=y)

    error = checked(torch.add(host.to("webgpu"), 1.0), host + 1, 1e-6, "add")
    yield compare("memory", f"copy_ {nbytes // MIB} MiB", "GB/s", 2 * nbytes / 1e9, copying, settings)
    yield compare("memory", f"add kernel {nbytes // MIB} MiB", "GB/s", 2 * nbytes / 1e9, adding, settings, error)
    nbytes = (1 if settings.small else 64) * MIB
    source = torch.randn(nbytes // 4)

    def upload(device: str) -> Callable[[], Any]:
        target = torch.empty(nbytes // 4, device=device)
        return lambda: (target.copy_(source), synchronize(device))

    def readback(device: str) -> Callable[[], Any]:
        x = source.to(device)
        target = torch.empty(nbytes // 4)
        return lambda: target.copy_(x)

    if not torch.equal(source.to("webgpu").cpu(), source):
        raise AssertionError("a round trip changed the data")
    yield compare("memory", f"upload {nbytes // MIB} MiB", "GB/s", nbytes / 1e9, upload, settings)
    yield compare("memory", f"readback {nbytes // MIB} MiB", "GB/s", nbytes / 1e9, readback, settings)


def overhead(settings: Settings) -> Iterator[Row]:
    """CPU time of this thread per small op: the least of many windows, for other work on the machine only adds to it."""
    count = 50 if settings.small else 500

    def least(device: str, grad: bool) -> float:
        a = torch.randn(64, 64, device=device, requires_grad=grad)
        b = torch.randn(64, 64, device=device)
        found = []
        for _ in range(3 if settings.small else 20):
            start = time.thread_time()
            for _ in range(count):
                a + b
            found.append((time.thread_time() - start) / count)
            synchronize(device)
        return min(found) * 1e6

    for grad in (False, True):
        name = "a + b, 64x64, " + ("with autograd" if grad else "no grad")
        yield Row("overhead", name, "us", least("webgpu", grad), least("cuda", grad) if settings.cuda else None)

    def one(device: str) -> Callable[[], Any]:
        x = torch.ones(1, device=device)
        return lambda: x.item()

    yield compare("overhead", "item()", "us", 1, one, settings)


FIRST = """
import sys, time, torch, anytorch.webgpu
n = int(sys.argv[1])
a = torch.randn(n, n)
b = a.to("webgpu")
(b + b).cpu()
start = time.perf_counter()
c = (b @ b).cpu()
seconds = time.perf_counter() - start
wanted = a[:64].double() @ a.double()
assert float((c[:64] - wanted).abs().max() / wanted.abs().max()) < 1e-4
print(seconds)
"""


def first_use(settings: Settings) -> Iterator[Row]:
    """A process's first product of a size, with its compiling: nothing known of the card, and then remembered."""
    size = 96 if settings.small else 1024
    with tempfile.TemporaryDirectory() as cache:
        for name in ("nothing known", "remembered"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST, str(size)], env={**os.environ, "ANYTORCH_CACHE_DIR": cache},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            yield Row("first use", f"float32 product {size}, {name}", "ms", float(done.stdout) * 1e3)


def fused(settings: Settings) -> Iterator[Row]:
    rows, width = (64, 256) if settings.small else (16_384, 1024)
    x = torch.randn(rows, width)
    works: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
        ("softmax", lambda t: torch.softmax(t, -1)),
        ("layer norm", lambda t: F.layer_norm(t, (width,))),
        ("gelu", lambda t: F.gelu(t)),
        ("sum of rows", lambda t: t.sum(-1)),
    )
    for name, work in works:

        def make(device: str, work: Any = work) -> Callable[[], Any]:
            on = x.to(device)
            return lambda: work(on)

        error = checked(work(x.to("webgpu")), work(x), 1e-4, name)
        amount = (1 if name.startswith("sum") else 2) * x.numel() * 4 / 1e9
        yield compare("fused", f"{name} {rows}x{width}", "GB/s", amount, make, settings, error)


def attention(settings: Settings, dtypes: Sequence[torch.dtype] = BOTH) -> Iterator[Row]:
    shapes = (
        ("prefill", 1, 16, 16, 2048, 2048, 64),
        ("prefill", 1, 16, 8, 2048, 2048, 128),
        ("encoder", 32, 12, 12, 128, 128, 32),
        ("decode", 1, 16, 8, 1, 2048, 128),
    )
    for name, batch, heads, key_heads, queries, keys, d in (
        (("prefill", 1, 2, 1, 40, 40, 32),) if settings.small else shapes
    ):
        for dtype in dtypes:
            q = torch.randn(batch, heads, queries, d)
            k, v = torch.randn(batch, key_heads, keys, d), torch.randn(batch, key_heads, keys, d)
            causal = name == "prefill"

            def make(
                device: str, held: Any = (q, k, v), dtype: Any = dtype, causal: bool = causal
            ) -> Callable[[], Any]:
                on = [t.to(device, dtype) for t in held]
                gqa = held[0].shape[1] != held[1].shape[1]
                return lambda: F.scaled_dot_product_attention(*on, is_causal=causal, enable_gqa=gqa)

            reference = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != key_heads)
            error = checked(make("webgpu")(), reference, 1e-4 if dtype is torch.float32 else 1e-2, name)
            work = 4 * batch * heads * queries * keys * d / 1e12 / (2 if causal else 1)
            label = f"{name} {str(dtype)[6:]} {batch}x{heads}/{key_heads}x{queries}x{keys}x{d}"
            yield compare("attention", label, "TFLOP/s", work, make, settings, error)


def encoder(settings: Settings, dtypes: Sequence[torch.dtype] = BOTH) -> Iterator[Row]:
    torch.manual_seed(0)
    model = Encoder(*((2, 64, 4, 100) if settings.small else (6, 384, 12, 30_522))).eval()
    batch, length = (2, 16) if settings.small else (64, 128)
    tokens = torch.randint(0, model.words.num_embeddings, (batch, length))
    places = torch.arange(length)
    with torch.no_grad():
        reference = model(tokens[:2], places)
        for dtype in dtypes:

            def make(device: str, dtype: Any = dtype) -> Callable[[], Any]:
                moved = copied(model, device, dtype)
                ids, at = tokens.to(device), places.to(device)
                return lambda: moved(ids, at)

            error = checked(make("webgpu")()[:2], reference, 1e-3 if dtype is torch.float32 else 2e-2, "encoder")
            yield compare(
                "encoder", f"MiniLM shape {str(dtype)[6:]} {batch}x{length}", "texts/s", batch, make, settings, error
            )


def copied(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """A copy of a model on a device, so that both devices can hold one."""
    return copy.deepcopy(model).to(device, dtype)


def convolution(settings: Settings, dtypes: Sequence[torch.dtype] = BOTH) -> Iterator[Row]:
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = resnet((1, 1), 8) if settings.small else resnet((3, 4, 6, 3), 64)
    model.eval()
    batch, side = (1, 32) if settings.small else (16, 224)
    images = torch.randn(batch, 3, side, side)
    with torch.no_grad():
        reference = model(images[:1])
        for dtype in dtypes:

            def make(device: str, dtype: Any = dtype) -> Callable[[], Any]:
                moved = copied(model, device, dtype)
                on = images.to(device, dtype)
                return lambda: moved(on)

            error = checked(make("webgpu")()[:1], reference, 1e-3 if dtype is torch.float32 else 5e-2, "resnet")
            yield compare(
                "convolution", f"ResNet-50 shape {str(dtype)[6:]} {batch}", "images/s", batch, make, settings, error
            )


def recorded(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The work as a graph of the webgpu device: what replays it, and the result it will write again."""
    work()
    graph = torch.webgpu.Graph()  # type: ignore[attr-defined]
    with graph:
        out = work()
    return graph.replay, out


def decoder(settings: Settings) -> tuple[Decoder, tuple[int, ...]]:
    """Of Qwen3-0.6B's shape, and that shape."""
    torch.manual_seed(0)
    shape = (2, 64, 4, 2, 16, 96, 100) if settings.small else (28, 1024, 16, 8, 128, 3072, 151_936)
    model = Decoder(*shape)
    nn.init.normal_(model.words.weight, std=0.02)
    return model, shape


def decode(settings: Settings, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> Iterator[Row]:
    model, shape = decoder(settings)
    model.eval()
    length, d = (8, shape[4]) if settings.small else (512, shape[4])
    cache = [[torch.randn(1, shape[3], length, d) for _ in range(2)] for _ in range(shape[0])]
    turns = angles(length - 1, 1, d)
    token = torch.tensor([[7]])
    with torch.no_grad():
        held = [[t.clone() for t in pair] for pair in cache]
        reference = model(token, turns.cos(), turns.sin(), held, length - 1)
        for dtype in dtypes:

            def make(device: str, dtype: Any = dtype, fused: bool = False) -> Callable[[], Any]:
                moved: Any = copied(model, device, dtype)
                if fused:
                    torch._dynamo.reset()
                    moved = torch.compile(moved, backend=compile_graph, dynamic=False)
                pairs = [[t.to(device, dtype) for t in pair] for pair in cache]
                cosine, sine = turns.cos().to(device, dtype), turns.sin().to(device, dtype)
                ids = token.to(device)
                return lambda: moved(ids, cosine, sine, pairs, length - 1)

            error = checked(make("webgpu")(), reference, 1e-3 if dtype is torch.float32 else 5e-2, "decode")
            name = f"Qwen3-0.6B shape {str(dtype)[6:]}"
            yield compare("decode", name, "tokens/s", 1, make, settings, error)

            for fused in (False, True):

                def replayed(device: str, make: Any = make, fused: bool = fused) -> Callable[[], Any]:
                    return recorded(make(device, fused=fused))[0] if device == "webgpu" else make(device)

                replay, out = recorded(make("webgpu", fused=fused))
                replay()
                way = "compiled by kernel graphs and replayed" if fused else "replayed"
                error = checked(out, reference, 1e-3 if dtype is torch.float32 else 5e-2, f"decode, {way}")
                yield compare("decode", f"{name}, {way} (CUDA: eager)", "tokens/s", 1, replayed, settings, error)


def training(settings: Settings, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """A whole step: forward, loss, backward, AdamW. The losses of three steps are compared with the CPU's in float32."""
    model, shape = decoder(settings)
    batch, length = (2, 16) if settings.small else (4, 256)
    tokens = torch.randint(0, shape[-1], (batch, length + 1))
    turns = angles(0, length, shape[4])

    def make(device: str, dtype: torch.dtype = dtype) -> Callable[[], Any]:
        moved: Any = copied(model, device, dtype).train()
        optimizer = torch.optim.AdamW(moved.parameters(), lr=1e-3)
        given, wanted = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
        cosine, sine = turns.cos().to(device, dtype), turns.sin().to(device, dtype)

        def step() -> torch.Tensor:
            loss = F.cross_entropy(moved(given, cosine, sine).flatten(0, 1).float(), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    ours, reference = (
        torch.stack([step().cpu() for _ in range(3)]) for step in (make("webgpu"), make("cpu", torch.float32))
    )
    error = checked(ours, reference, 2e-2, "training")
    name = f"Qwen3-0.6B shape {str(dtype)[6:]} {batch}x{length}"
    yield compare("training", name, "tokens/s", batch * length, make, settings, error)


def unet(settings: Settings, dtypes: Sequence[torch.dtype] = BOTH) -> Iterator[Row]:
    """A step of Stable Diffusion 1.5's shape: two latents of 64 x 64 (with the prompt and without), 77 tokens."""
    torch.manual_seed(0)
    width, levels, side = (32, (1, 2), 8) if settings.small else (320, (1, 2, 4, 4), 64)
    model = UNet(width, levels, 768, 8).eval()
    latents, context = torch.randn(2, 4, side, side), torch.randn(2, 77, 768)
    at = torch.tensor([500, 500])
    with torch.no_grad():
        reference = model(latents, at, context)
        for dtype in dtypes:

            def make(device: str, dtype: Any = dtype) -> Callable[[], Any]:
                moved = copied(model, device, dtype)
                x, words, step = latents.to(device, dtype), context.to(device, dtype), at.to(device)
                return lambda: moved(x, step, words)

            error = checked(make("webgpu")(), reference, 1e-3 if dtype is torch.float32 else 5e-2, "U-Net")
            yield compare("unet", f"Stable Diffusion 1.5 shape {str(dtype)[6:]}", "steps/s", 1, make, settings, error)


def half(settings: Settings) -> Iterator[Row]:
    """What matrix cores are for: half precision. 1000 has tiles with edges, 1023 rows that begin anywhere."""
    halves = (torch.float16, torch.bfloat16)
    yield from matmul(settings, halves, (1024, 4096))
    yield from matmul(settings, halves[:1], (1000, 1023))
    for section in (attention, encoder, convolution, unet):
        yield from section(settings, halves[:1])
    yield from training(settings)


SECTIONS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "matmul": matmul,
    "memory": memory,
    "overhead": overhead,
    "first": first_use,
    "linear": linear,
    "fused": fused,
    "attention": attention,
    "encoder": encoder,
    "decode": decode,
    "decode-half": partial(decode, dtypes=(torch.float16,)),
    "convolution": convolution,
    "unet": unet,
    "training": training,
    "half": half,
}


def machine() -> dict[str, Any]:
    made = provenance()
    properties = torch.webgpu.get_device_properties()  # type: ignore[attr-defined]
    return {
        **made,
        "torch": torch.__version__,
        "adapter": properties["name"],
        "api": properties["api"],
        "driver": properties["driver"],
        "matrix_cores": properties["matrix_cores"],
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def text(row: Row) -> str:
    cuda = f"{row.cuda:12.2f}" if row.cuda is not None else " " * 12
    share = f"{row.share:7.0%}" if row.share is not None else " " * 7
    error = f"{row.error:9.1e}" if row.error is not None else " " * 9
    return f"{row.section:12} {row.name:44} {row.unit:>9} {row.webgpu:12.2f} {cuda} {share} {row.spread:7.0%} {error}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="S", help="no section starts later (default: 480)"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated, of: {', '.join(SECTIONS)}")
    parser.add_argument("--window", type=float, default=0.2, metavar="S", help="a window's length (default: 0.2)")
    parser.add_argument("--small", action="store_true", help="tiny shapes, one window: for software adapters")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else [name for name in SECTIONS if name != "half"]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; sections: {', '.join(SECTIONS)}")
    settings = Settings(options.small, 0.0 if options.small else options.window, torch.cuda.is_available())
    report = Report(machine())
    print(", ".join(f"{key} {value}" for key, value in report.machine.items()))
    header = ("section", "what", "unit", "webgpu", "cuda", "share", "spread", "error")
    print("{:12} {:44} {:>9} {:>12} {:>12} {:>7} {:>7} {:>9}".format(*header), flush=True)
    started = time.perf_counter()
    for name in names:
        if time.perf_counter() - started > options.budget:
            report.skipped.append(name)
            continue
        try:
            for row in SECTIONS[name](settings):
                report.rows.append(row)
                print(text(row), flush=True)
                write(report, options.output)  # a run that is killed leaves what it has
                if time.perf_counter() - started > options.budget:
                    report.skipped.append(f"the rest of {name}")
                    break
        except Exception as exc:  # noqa: BLE001  (one section's failure must not lose the others' numbers)
            report.failed[name] = "".join(traceback.format_exception(exc))
            print(f"{name:12} FAILED: {type(exc).__name__}: {str(exc)[:500]}", flush=True)
        torch.webgpu.empty_cache()  # type: ignore[attr-defined]
        write(report, options.output)
    fallbacks = torch.webgpu.fallback_stats()  # type: ignore[attr-defined]
    if fallbacks:
        print("on the CPU:", ", ".join(f"{name} x{count}" for name, count in sorted(fallbacks.items())))
    for name in report.skipped:
        print(f"skipped, the budget is spent: {name}")
    return 1 if report.failed else 0


def write(report: Report, output: Path | None) -> None:
    """After every section, so that a run that is killed leaves what it has."""
    if output is None:
        return
    rows = [{**asdict(row), "share": row.share} for row in report.rows]
    told = {"rows": rows, "failed": report.failed, "skipped": report.skipped, "chosen": chosen_since(report.began)}
    write_results(output, {**report.machine, **told})


if __name__ == "__main__":
    sys.exit(main())
