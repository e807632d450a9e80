"""Models that do not fit: anytorch.memory beside accelerate (and diffusers, where it is installed).

    python bench/tiers.py cpu  --output bench/results/tiers-cpu.json      # 2 GB of float32 weights, a quarter of it in RAM
    python bench/tiers.py gpu  --output bench/results/tiers-h200.json     # Qwen3-8B's shape, 2 GB of device memory

Every contender runs in a process of its own (CPU) or from the same weights (GPU); passes are interleaved, outputs are
compared before anything is timed, and on the CPU the page cache is emptied before every pass and looked at (mincore).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results
from torch import nn
from torch.nn import functional

WIDTH, BLOCKS, HEADS = 2048, 10, 16
# Float32 numbers per token and unit of width that a layer computes with at once, and what the allocator keeps of them. The
# budget is for everything: what passes need besides weights is named with `reserve`.
ACTIVATIONS = 16
# What moves as one: a whole layer, or every linear layer by itself as accelerate's hooks do.
BLOCKS_OF: dict[str, str | None] = {"ours": None, "ours-leaves": "leaves"}


# --- the CPU part ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # tokens × width
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def memory_kb(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(key)))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def cached_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0.0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
        libc = ctypes.CDLL(None, use_errno=True)
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        view = memoryview(mapped)
        import numpy

        address = numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector):
            raise OSError(ctypes.get_errno(), "mincore")
        share = sum(value & 1 for value in vector) / pages
        del view
    return share


def make_cold(folder: Path) -> float:
    """Empty the page cache of a folder's files; returns the share that is still there."""
    worst = 0.0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 2**20:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            worst = max(worst, cached_share(path))
    return worst


def accelerate_model(kind: str, weights: Path, folder: Path) -> nn.Module:
    from accelerate import disk_offload
    from accelerate.hooks import attach_align_device_hook
    from accelerate.utils import OffloadedWeightsLoader
    from safetensors import safe_open
    from safetensors.torch import load_file

    model = Model().eval()
    model.load_state_dict(load_file(weights))
    if kind == "accelerate-dat":
        disk_offload(model, str(folder / "dat"), execution_device=torch.device("cpu"))
        return model
    with safe_open(weights, "pt") as file:
        index = {
            name: {"safetensors_file": str(weights), "weight_name": name, "dtype": "float32"}
            for name in file.keys()  # noqa: SIM118
        }
    loader = OffloadedWeightsLoader(index=index, save_folder=str(folder / "unused"))
    attach_align_device_hook(model, execution_device=torch.device("cpu"), offload=True, weights_map=loader)
    return model


def cpu_child(kind: str, folder: Path, budget: int, tokens: list[int]) -> None:
    """Reads "cold N" or "warm N" lines, runs one pass of N tokens each, answers with a line of JSON."""
    torch.manual_seed(1)
    inputs = {count: torch.randn(count, WIDTH) for count in tokens}
    weights = folder / "model.safetensors"
    import anytorch
    import anytorch.memory.loading  # Python's own memory for it is not a budget's business

    with torch.no_grad():  # nor are activations and the BLAS library's buffers: one layer of the same size makes them
        warm = Layer(WIDTH)
        for x in inputs.values():
            warm(x)
        del warm
    gc.collect()
    baseline = memory_kb("VmRSS")
    fitted: Any = None
    if kind.startswith("ours"):
        model: nn.Module = anytorch.memory.load(
            Model,
            "cpu",
            weights=weights,
            device_budget=budget,
            reserve=ACTIVATIONS * max(tokens) * WIDTH * 4,
            disk=str(folder),
            blocks=BLOCKS_OF[kind],
        )
        fitted = anytorch.memory.fitted(model)
    elif kind == "ram":
        from safetensors.torch import load_file

        model = Model().eval()
        model.load_state_dict({k: v.clone() for k, v in load_file(weights).items()})
    else:
        model = accelerate_model(kind, weights, folder)
    gc.collect()
    if fitted is None:
        reset_peak()  # their set-up holds the whole model; only passes are counted for them. Ours is counted from the start.
    say({"ready": kind, "explain": fitted.explain() if fitted else ""})
    for line in sys.stdin:
        word, count = line.split()
        residual = make_cold(folder) if word == "cold" else None
        x = inputs[int(count)]
        begin, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            y = model(x)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        say(
            {
                "seconds": seconds,
                "cpu_s": cpu_s,
                "digest": hashlib.sha256(y.numpy().tobytes()).hexdigest()[:16],
                "cached": residual,
                "peak_above_baseline": (memory_kb("VmHWM") - baseline) * 1024,
                "ledger_peak": fitted.ledger.use("device").peak if fitted else None,
            }
        )


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def run_cpu(options: argparse.Namespace) -> dict[str, Any]:
    from safetensors.torch import save_file

    folder = Path(options.folder or tempfile.mkdtemp(prefix="anytorch-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model()
    nbytes = sum(p.nbytes for p in model.parameters())
    save_file(model.state_dict(), folder / "model.safetensors")
    del model
    gc.collect()
    budget = nbytes // 4
    kinds = [*BLOCKS_OF, "ram", "accelerate-dat", "accelerate-safetensors"]
    children: dict[str, Any] = {}
    rows: dict[str, dict[int, list[dict[str, Any]]]] = {kind: {n: [] for n in options.tokens} for kind in kinds}
    explain: dict[str, str] = {}
    try:
        for kind in kinds:
            command = [
                sys.executable,
                __file__,
                "child",
                "--kind",
                kind,
                "--folder",
                str(folder),
                "--budget",
                str(budget),
            ]
            command += ["--tokens", *map(str, options.tokens)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            children[kind] = child
            assert child.stdout is not None
            explain[kind] = json.loads(child.stdout.readline())["explain"]
        for number in range(options.repeats + 1):
            for count in options.tokens:
                for kind, child in children.items():
                    child.stdin.write(f"cold {count}\n")
                    child.stdin.flush()
                    row = json.loads(child.stdout.readline())
                    if number:  # the first is a warm-up
                        rows[kind][count].append(row)
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait(timeout=60)
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return summarise_cpu(rows, nbytes, budget, explain)


def summarise_cpu(rows: dict[str, Any], nbytes: int, budget: int, explain: dict[str, str]) -> dict[str, Any]:
    plans = {kind: text for kind, text in explain.items() if text}
    result: dict[str, Any] = {"model_nbytes": nbytes, "budget_nbytes": budget, "plans": plans, "tokens": {}}
    for count in next(iter(rows.values())):
        digests = {row["digest"] for kind in rows for row in rows[kind][count]}
        ours = [row["seconds"] for row in rows["ours"][count]]
        table = {}
        for kind, by_count in rows.items():
            times = [row["seconds"] for row in by_count[count]]
            paired = [other / own for other, own in zip(times, ours, strict=True)]
            beside_leaves = [a / b["seconds"] for a, b in zip(times, rows["ours-leaves"][count], strict=True)]
            table[kind] = {
                "min_s": min(times),
                "median_s": statistics.median(times),
                "cpu_s": statistics.median(row["cpu_s"] for row in by_count[count]),
                "times_ours_paired_median": statistics.median(paired),
                "times_ours_leaves_paired_median": statistics.median(beside_leaves),
                "peak_above_baseline": max(row["peak_above_baseline"] for row in by_count[count]),
                "ledger_peak": by_count[count][-1]["ledger_peak"],
                "cached_share_before": max(row["cached"] for row in by_count[count]),
            }
        result["tokens"][str(count)] = {"outputs_equal": len(digests) == 1, "contenders": table}
    return result


# --- the GPU part ------------------------------------------------------------------------------------------------------


def qwen_config(layers: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        use_cache=False,
    )


class Gpu:
    """One model's weights on the host, and ways to run it."""

    def __init__(self, layers: int) -> None:
        import anytorch

        self.device = anytorch.best_device()
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                self.model: Any = Qwen3ForCausalLM(qwen_config(layers)).eval()
        finally:
            torch.set_default_dtype(default)
        self.model.requires_grad_(False)
        self.nbytes = sum(p.nbytes for p in self.model.parameters())

    def ids(self, tokens: int) -> torch.Tensor:
        torch.manual_seed(2)
        length = min(tokens, 1024)
        return torch.randint(0, 151936, (tokens // length, length), device=self.device)

    @torch.no_grad()
    def forward(self, tokens: int) -> torch.Tensor:
        output: torch.Tensor = self.model(self.ids(tokens), logits_to_keep=1).logits
        return output

    def time(self, tokens: int, repeats: int = 3, warm: int = 1) -> list[float]:
        import anytorch

        for _ in range(warm):
            self.forward(tokens)
        times = []
        for _ in range(repeats):
            anytorch.synchronize(self.device)
            begin = time.perf_counter()
            self.forward(tokens)
            anytorch.synchronize(self.device)
            times.append(time.perf_counter() - begin)
        return times


def log(*words: Any) -> None:
    sys.stderr.write(" ".join(map(str, words)) + "\n")
    sys.stderr.flush()


def run_gpu(options: argparse.Namespace) -> dict[str, Any]:
    import anytorch
    from anytorch.memory.levels import link_speed

    deadline = time.perf_counter() + options.seconds
    result: dict[str, Any] = {}

    def left() -> float:
        return deadline - time.perf_counter()

    def keep(name: str, value: Any) -> None:
        result[name] = value
        log(f"[{options.seconds - left():.0f} s]", name, json.dumps(value))
        if options.output:
            write_results(Path(options.output), result | stamp())

    gpu = Gpu(options.layers)
    device = gpu.device
    keep("model", {"layers": options.layers, "nbytes": gpu.nbytes, "device": str(device)})
    keep("pinned_gb_per_s", link_speed(device, refresh=True))
    few = options.tokens[0]
    reference = gpu.forward(few).cpu()
    resident = {tokens: min(gpu.time(tokens)) for tokens in options.tokens if fits(gpu, tokens)}
    keep("resident_s", resident)
    state = {name: tensor.to("cpu") for name, tensor in gpu.model.state_dict().items()}
    restore(gpu.model, state)
    gc.collect()
    anytorch.cleanup(device)

    def same(what: str) -> dict[str, float]:
        found = gpu.forward(few).cpu()
        scale = float(reference.float().abs().max())
        error = float((found.float() - reference.float()).abs().max()) / scale
        if error > 2e-2:
            raise SystemExit(f"{what} computes something else: relative error {error}")
        return {"error": error, "equal": bool(torch.equal(found, reference))}

    pinned = result["pinned_gb_per_s"]
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    begin = time.perf_counter()
    anytorch.memory.fit(gpu.model, device, device_budget=options.device_budget, host_budget="40GB", disk=False)
    handle = anytorch.memory.fitted(gpu.model)
    setup = time.perf_counter() - begin
    row: dict[str, Any] = {"setup_s": setup, "plan": handle.explain(), **same("ours")}
    torch.accelerator.synchronize()
    moved = handle.mover.stats.from_host_nbytes
    times = gpu.time(few, repeats=5, warm=1)
    per_pass = (handle.mover.stats.from_host_nbytes - moved) / 6
    row |= {"times_s": times, "streamed_nbytes": per_pass, "gb_per_s": per_pass / statistics.median(times) / 1e9}
    row["share_of_pinned"] = row["gb_per_s"] / pinned
    row["model_gb_per_s"] = gpu.nbytes / statistics.median(times) / 1e9
    row["device_peak"] = torch.accelerator.max_memory_allocated(device) - before
    row["ledger"] = handle.stats()["levels"]
    keep("ours_host", row)
    sweep = {}
    for tokens in options.tokens:
        if tokens in resident and left() > 40:
            ours = min(gpu.time(tokens, repeats=3))
            sweep[tokens] = {"ours_s": ours, "resident_s": resident[tokens], "ratio": ours / resident[tokens]}
    keep("hidden_behind_compute", sweep)
    handle.unfit("cpu")
    gc.collect()
    state = dict(gpu.model.state_dict())
    if left() > 60:
        keep("accelerate_cpu_offload", peer(gpu, few, same, accelerate_cpu))
        restore(gpu.model, state)
    if left() > 60:
        keep("diffusers_group_offload", peer(gpu, few, same, diffusers_group))
        restore(gpu.model, state)
    if left() > 90:
        keep("disk", disk_part(gpu, options, few, same, left))
    extra = Path(__file__).with_name("tiers_training.py")
    if extra.exists() and left() > 60:
        log("a training step is measured by", extra, "in a process of its own")
    return result


def fits(gpu: Gpu, tokens: int) -> bool:
    try:
        gpu.forward(tokens)
    except torch.OutOfMemoryError:
        return False
    return True


def restore(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The original weights on the host, whatever a contender left behind."""
    model.load_state_dict(state, assign=True)
    for name, buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        if buffer.device.type != "cpu":
            owner._buffers[name.rpartition(".")[2]] = buffer.cpu()
    model.requires_grad_(False)


def accelerate_cpu(gpu: Gpu) -> Any:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    cpu_offload(gpu.model, execution_device=gpu.device)
    return lambda: remove_hook_from_module(gpu.model, recurse=True)


def diffusers_group(gpu: Gpu) -> Any:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        gpu.model,
        onload_device=gpu.device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )

    def undo() -> None:
        from diffusers.hooks import HookRegistry

        for module in gpu.model.modules():
            if hasattr(module, "_diffusers_hook"):
                registry = HookRegistry.check_if_exists_or_initialize(module)
                for name in list(registry.hooks):
                    registry.remove_hook(name, recurse=False)
        gpu.model.to("cpu")

    return undo


def peer(gpu: Gpu, tokens: int, same: Any, attach: Any) -> dict[str, Any]:
    """A contender's passes, or why it could not run."""
    begin = time.perf_counter()
    try:
        undo = attach(gpu)
    except Exception as exc:  # noqa: BLE001  (a peer that is absent or refuses the model is part of the result)
        return {"failed": f"{type(exc).__name__}: {str(exc)[:300]}"}
    try:
        setup = time.perf_counter() - begin
        row = {"setup_s": setup, **same(attach.__name__)}
        times = gpu.time(tokens, repeats=2, warm=0)
        return row | {"times_s": times, "gb_per_s": gpu.nbytes / statistics.median(times) / 1e9}
    except Exception as exc:  # noqa: BLE001
        return {"failed": f"{type(exc).__name__}: {str(exc)[:300]}"}
    finally:
        undo()


def disk_part(gpu: Gpu, options: argparse.Namespace, tokens: int, same: Any, left: Any) -> dict[str, Any]:
    import anytorch
    from anytorch.memory.buffers import host_buffer
    from anytorch.memory.images import from_files
    from anytorch.memory.reader import Reader
    from anytorch.memory.saving import save_state
    from anytorch.safetensors_files import locate_tensors

    folder = Path(options.folder or tempfile.mkdtemp(prefix="anytorch-bench-"))
    row: dict[str, Any] = {}
    try:
        begin = time.perf_counter()
        save_state(gpu.model.state_dict(), folder, 4 * 2**30)
        row["write_gb_per_s"] = gpu.nbytes / (time.perf_counter() - begin) / 1e9
        located = list(locate_tensors(folder).values())
        reader, rates = Reader(), []
        layers = [[t for t in located if f"layers.{n}." in t.name] for n in range(min(8, options.layers))]
        images = [from_files(str(n), tensors, in_place=True) for n, tensors in enumerate(layers)]
        buffer = host_buffer(max(image.nbytes for image in images))
        for image in images:
            begin = time.perf_counter()
            reader.read(image.pieces, buffer)
            rates.append(image.nbytes / (time.perf_counter() - begin) / 1e9)
        reader.close()
        del buffer
        row["direct_read_gb_per_s"] = statistics.median(rates)
        config = gpu.model.config
        from transformers import Qwen3ForCausalLM

        original, gpu.model = gpu.model, None
        gpu.model = anytorch.memory.load(
            lambda: Qwen3ForCausalLM(config),
            gpu.device,
            weights=folder,
            device_budget=options.device_budget,
            host_budget="1GB",
        )
        handle = anytorch.memory.fitted(gpu.model)
        row |= {"plan": handle.explain(), **same("ours from disk")}
        moved = handle.mover.stats.from_disk_nbytes
        times = gpu.time(tokens, repeats=2, warm=0)
        per_pass = (handle.mover.stats.from_disk_nbytes - moved) / 2
        row |= {"times_s": times, "gb_per_s": per_pass / statistics.median(times) / 1e9}
        row["share_of_direct_read"] = row["gb_per_s"] / row["direct_read_gb_per_s"]
        handle.close()
        gpu.model = original
        if left() > 120:
            row["accelerate_disk_offload"] = peer(gpu, tokens, same, lambda g: accelerate_disk(g, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def accelerate_disk(gpu: Gpu, folder: Path) -> Any:
    from accelerate import disk_offload
    from accelerate.hooks import remove_hook_from_module

    disk_offload(gpu.model, str(folder / "dat"), execution_device=gpu.device)
    return lambda: remove_hook_from_module(gpu.model, recurse=True)


# --- both --------------------------------------------------------------------------------------------------------------


def stamp() -> dict[str, Any]:
    return {
        **provenance(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cpu", "gpu", "child"])
    parser.add_argument("--output", help="write the result as JSON to this file")
    parser.add_argument("--folder", help="where the files go; a temporary folder by default")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=36, help="of the GPU part's model; Qwen3-8B has 36")
    parser.add_argument("--device-budget", default="2GB")
    parser.add_argument(
        "--seconds", type=float, default=280, help="the GPU part leaves out what does not fit into this"
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or ([8, 256] if options.part != "gpu" else [8, 1024, 4096, 8192, 16384, 32768])
    if options.part == "child":
        cpu_child(options.kind, Path(options.folder), options.budget, options.tokens)
        return
    result = (run_cpu if options.part == "cpu" else run_gpu)(options) | stamp()
    text = json.dumps(result, indent=1)
    if options.output:
        write_results(Path(options.output), result)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
