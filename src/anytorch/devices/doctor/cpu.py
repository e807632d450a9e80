"""The processor and the memory: limits that torch does not see, and choices that make it slow."""

from __future__ import annotations

from collections.abc import Iterator

from anytorch.devices.doctor.common import GIB, Finding, child_fact, diagnosis, gib, in_container
from anytorch.devices.types import Facts, Level

SMALL_SHM = GIB
FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16", "amx_tile", "bf16", "avx_ne_convert", "hw.optional.arm.feat_bf16"})
FAST_FP16 = frozenset({"avx512_fp16", "amx_fp16", "fphp", "asimdhp", "fp16", "hw.optional.arm.feat_fp16"})
# Requirement A4: the least memory each back end is documented with, in GiB. A card sold with 4 reports a little less (the
# driver keeps some), so what counts as less begins at that many times 10^9 bytes.
LEAST_GIB = {"cuda": 4, "rocm": 4, "xpu": 4, "mps": 8, "webgpu": 2, "cpu": 2}


def too_small(backend: str, nbytes: int) -> bool:
    return nbytes < LEAST_GIB[backend] * 10**9


def planned_threads(facts: Facts) -> tuple[int | None, str]:
    """How many threads torch will use and what sets that number; (None, "") if nothing does."""
    for value, source in (
        (facts.settings.get("threads"), "the setting threads"),
        (child_fact(facts, "threads", int), "torch.get_num_threads()"),
        (facts.hardware.env.get("OMP_NUM_THREADS"), "OMP_NUM_THREADS"),
    ):
        number = str(value).split(",")[0].strip() if value is not None else ""
        if number.isascii() and number.isdigit() and 0 < len(number) < 7:
            return int(number), source
    return None, ""


@diagnosis(
    Level.WARNING,
    "The container may use fewer CPUs than torch will start threads for",
    symptom="A CPU job in a container is many times slower than on the host, with all threads busy waiting.",
    evidence="The cgroup CPU quota (`cpu.max`, `cpu.cfs_quota_us`) against the CPUs this process may run on and the "
    "threads torch uses. Neither `os.cpu_count()` nor the affinity shows the quota. Where nothing says how many threads "
    "there will be (torch was not tried), it is a note.",
    fix="`export OMP_NUM_THREADS=<quota rounded down>`.",
    background="https://github.com/python/cpython/issues/80235 https://github.com/OpenMathLib/OpenBLAS/issues/6059",
)
def cpu_quota(facts: Facts) -> Iterator[Finding]:
    cpu = facts.hardware.cpu
    seen = min(cpu.logical, cpu.affinity or cpu.logical)
    if cpu.quota is None or cpu.quota >= seen:
        return
    good = max(1, int(cpu.quota))
    threads, source = planned_threads(facts)
    if threads is not None and threads <= good:
        return
    plan = f"{source} is {threads}" if threads is not None else f"torch will see {seen} CPUs"
    yield Finding(
        f"the container may use {cpu.quota:g} CPUs, but {plan}",
        f"export OMP_NUM_THREADS={good}",
        f"cgroup CPU quota {cpu.quota:g}, affinity {cpu.affinity}, {cpu.logical} logical CPUs",
        level=Level.WARNING
        if threads is not None
        else Level.NOTE,  # nobody has said yet how many threads there will be
    )


@diagnosis(
    Level.NOTE,
    "The container may use less memory than the machine shows",
    symptom="The process is killed (exit status 137) while `free` still shows plenty.",
    evidence="The cgroup memory limit (`memory.max`, `memory.limit_in_bytes`) against MemTotal. A limit is usually "
    "intended, so this is a note; it is a warning where the limit is below the 2 GiB that the CPU is documented with.",
    fix="Nothing, if the limit is intended: anytorch plans within it. To raise it: `docker run --memory 32g …`.",
    background="https://github.com/giampaolo/psutil/issues/2100 https://github.com/Comfy-Org/ComfyUI/pull/15272",
)
def memory_limit(facts: Facts) -> Iterator[Finding]:
    memory = facts.hardware.memory
    if memory.limit is not None and memory.total is not None and memory.limit < memory.total:
        used = f", {gib(memory.limit_used)} used" if memory.limit_used is not None else ""
        yield Finding(
            f"this process may use {gib(memory.limit)} of the machine's {gib(memory.total)}{used}; budgets use the "
            "limit",
            f"docker run --memory {max(1, round(memory.total / GIB))}g …",
            f"cgroup limit {memory.limit}, MemTotal {memory.total}",
            level=Level.WARNING if too_small("cpu", memory.limit) else None,
        )


@diagnosis(
    Level.WARNING,
    "torch uses the slow cores of a hybrid processor too",
    symptom="Eight threads take longer than four: each step waits for the efficiency cores.",
    evidence="Efficiency cores (`/sys/devices/cpu_atom/cpus`, `hw.perflevel1`) and more threads than performance "
    "cores.",
    fix="`export OMP_NUM_THREADS=<performance cores>` and bind: `taskset -c 0-7 python …`; `anytorch optimize` "
    "measures it.",
    background="https://github.com/ggml-org/llama.cpp/issues/842 https://github.com/ttlequals0/MinusPod/issues/333",
)
def hybrid_cpu(facts: Facts) -> Iterator[Finding]:
    cpu, machine = facts.hardware.cpu, facts.hardware.machine
    if not cpu.hybrid or cpu.performance_cores is None:
        return
    threads, source = planned_threads(facts)
    if threads is None:
        if machine.system == "Darwin":
            return  # torch on a Mac asks for hw.perflevel0 by itself
        threads, source = cpu.physical or cpu.logical, "torch's default"
    if threads > cpu.performance_cores:
        yield Finding(
            f"{source} is {threads} threads, but only {cpu.performance_cores} of this processor's cores are "
            "performance cores",
            f"export OMP_NUM_THREADS={cpu.good_threads}",
            f"{cpu.performance_cores} performance and {cpu.efficiency_cores} efficiency cores "
            f"({cpu.model or 'unknown'})",
        )


@diagnosis(
    Level.WARNING,
    "Half precision is chosen on a CPU that has no hardware for it",
    symptom="A model in bfloat16 or float16, or under `torch.autocast('cpu')`, runs tens of times slower than in "
    "float32.",
    evidence="The setting `cpu_dtype`, and `torch.ops.mkldnn._is_mkldnn_bf16_supported()` in the child or the CPU's "
    "feature flags (avx512_bf16, amx_bf16; avx512_fp16 for float16). Measured on an AVX2 CPU: 48 to 84 times slower.",
    fix="`export ANYTORCH_CPU_DTYPE=float32`; `anytorch optimize --apply` measures it and remembers the answer.",
    background="https://docs.pytorch.org/docs/stable/amp.html#cpu-training-example",
)
def slow_half_on_cpu(facts: Facts) -> Iterator[Finding]:
    dtype, features = facts.settings.get("cpu_dtype"), facts.hardware.cpu.features
    if dtype not in ("bfloat16", "float16"):
        return
    wanted = FAST_BF16 if dtype == "bfloat16" else FAST_FP16
    measured = child_fact(facts, "mkldnn_bf16", bool) if dtype == "bfloat16" else None
    fast = measured if measured is not None else (bool(wanted & features) if features else None)
    if fast is False:
        yield Finding(
            f"{dtype} is chosen for the CPU, but {facts.hardware.cpu.model or 'this CPU'} has no hardware for it: "
            "float32 is far faster here",
            "export ANYTORCH_CPU_DTYPE=float32",
            f"mkldnn bf16: {measured if measured is not None else 'not asked'}; none of {', '.join(sorted(wanted))}",
        )


@diagnosis(
    Level.WARNING,
    "/dev/shm is too small for DataLoader workers",
    symptom="`RuntimeError: DataLoader worker (pid …) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.`",
    evidence="`/dev/shm` holds less than 1 GiB (a container gets 64 MiB by default) and more than one CPU is there "
    "for workers.",
    fix="`docker run --shm-size=8g …` or `--ipc=host`; outside a container `sudo mount -o remount,size=8G /dev/shm`.",
    background="https://github.com/pytorch/pytorch#docker-image",
)
def small_shm(facts: Facts) -> Iterator[Finding]:
    shm = facts.hardware.memory.shm
    if shm is None or shm >= SMALL_SHM or facts.hardware.cpu.usable < 2:
        return
    fix = "docker run --shm-size=8g …" if in_container(facts.hardware) else "sudo mount -o remount,size=8G /dev/shm"
    yield Finding(
        f"/dev/shm holds only {shm // 2**20} MiB, too little for DataLoader workers", fix, f"/dev/shm: {shm} bytes"
    )


@diagnosis(
    Level.NOTE,
    "The device has less memory than its back end is documented with",
    symptom="Out of memory with all but the smallest models.",
    evidence="The memory of each device, or the RAM this process may use, against the documented least: CUDA, ROCm "
    "and XPU 4 GiB, MPS 8 GiB, WebGPU 2 GiB, CPU 2 GiB.",
    fix="Use a smaller batch, quantization, or the memory mode; on a shared card stop the other programs.",
)
def too_little_memory(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    sizes: list[tuple[str, str, int | None]] = []
    for vendor, backend in (("nvidia", "cuda"), ("amd", "rocm"), ("intel", "xpu")):
        sizes += [(backend, gpu.name or backend, gpu.total) for gpu in hardware.gpus_of(vendor) if not gpu.integrated]
    if hardware.gpus_of("apple"):
        sizes.append(("mps", hardware.gpus_of("apple")[0].name or "the Apple GPU", hardware.memory.total))
    if facts.torch is not None and "webgpu" in facts.torch.backends:
        devices = facts.torch.backends["webgpu"].devices
        sizes += [("webgpu", device.name, device.total) for device in devices if not device.software]
    sizes.append(("cpu", "this process", hardware.memory.usable_total))
    for backend, name, total in sizes:
        if total is not None and too_small(backend, total):
            yield Finding(
                f"{name} has {gib(total)}, less than the {LEAST_GIB[backend]} GiB {backend} is documented with",
                "use a smaller batch or a quantized model",
                f"{backend}: {total} bytes",
            )
