"""What the results of a run amount to: per file and in all, and which failures are by design."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What the device does not do and is not going to: the reason, and how a failure of that kind is told, by the test's name or
# by its error. Nothing is out by design because it is hard.
BY_DESIGN: dict[str, str] = {
    "sparse tensors: the device has dense ones only": (
        r"has no sparse (tensors|gradients)|[Ss]parse(Csr|Coo)?(PrivateUse1|webgpu)|sparse_(coo|csr)|to_sparse"
    ),
    "nested tensors: the device has dense ones only": r"has no nested tensors|NestedTensor(PrivateUse1|webgpu)",
    "quantized tensors: torchao's packed weights take their place": (
        r"has no quantized tensors|Quantized(PrivateUse1|webgpu)|empty_quantized"
    ),
    "DLPack: torch has no such device type for a device written in Python": r"[Dd]lpack|__dlpack",
    "copy-on-write storages: torch makes them with a C++ allocator": (
        r"_lazy_clone|storage != nullptr|is_cow|lazy_clone|copy_on_write|cow_(in|un)"
    ),
    "torch.Generator(device='webgpu'): torch makes it in C++; a CPU generator is taken": (
        r"getNewGenerator|PrivateUse1HooksInterface"
    ),
    "names of PyTorch's own convolution backends": r"_ConvBackend|select_conv_backend|ConvBackend\.",
    "CPU tensors beside the device's, which no accelerator takes": (
        r"^EXC RuntimeError: Expected all tensors to be on the same device"
    ),
    "_addmm_activation's GELU is by tanh, as on CUDA; the CPU's is by erf": r"test_addmm_gelu",
    # They take the CPU's class on every device but cuda, and then ask for the device's name, or the other way round.
    "tests written for cpu and cuda alone": (
        r"test_grad_scaler_deprecated_warning|test_grad_scaling_state_dict|test_tensor_storage_type_|"
        r"Expected device_type in \['cpu', 'cuda'\]|test_addbmm_bfloat16|"
        r"test_linalg_lstsq_input_checks|"
        r"test_upsamplingBiMode2d_nonsupported_dtypes_\w+_uint8$"
    ),
    "the remainder of an integer by zero is the integer, as on ROCm; the CPU refuses it, CUDA sets all bits": (
        r"test_fmod_remainder_by_zero_integral"
    ),
    "torch.compile's inductor writes no code for the device: backend='anytorch' does": (
        r"InductorError: KeyError: 'webgpu'"
    ),
    "model.to() exchanges the tensor behind a parameter: torch lists in C++ where its contents are moved": (
        r"\.test_to_(?!empty_)\w+_swap_False"
    ),
    "index_reduce of half types is rounded once; the test's own sum is rounded after every element": (
        r"test_index_reduce_reduce_(mean|prod)_b?float16"
    ),
    "map_, map2_ and apply_ call a Python function per element: torch has them for CPU tensors": (
        r"only implemented on CPU tensors"
    ),
    "memory addresses on the host (pinned memory, shared memory, numpy)": (
        r"convert webgpu:0 device type tensor to numpy|share_memory|pin_memory"
    ),
}
# Of what was compared in vain: two tensors, two numbers.
WRONG = re.compile(
    r"AssertionError: (Tensor-likes|Scalars|The values for|Booleans|Sequences|.*Absolute diff|.*not close|.*mismatched)"
)


@dataclass
class Summary:
    """Counts of one file."""

    file: str
    collected: int = 0
    run: int = 0
    cpu: int = 0  # pass on the CPU
    both: int = 0
    without_cpu: int = 0  # of those, without a fallback
    skipped: int = 0  # by PyTorch's own decorators, on webgpu only
    late: int = 0  # too slow on the adapter, or for the time given
    by_design: int = 0
    failed: int = 0
    wrong: int = 0  # of the failed: a number differs
    aborted: int = 0
    complete: bool = False
    reasons: dict[str, int] = field(default_factory=dict)
    troubles: list[dict[str, str]] = field(default_factory=list)

    @property
    def counted(self) -> int:
        return self.both + self.failed + self.aborted


def reason_of(key: str, why: str) -> str:
    """Why a failure is by design; "" where it is not."""
    last = why[why.rfind("EXC ") :] if "EXC " in why else why
    return next((reason for reason, told in BY_DESIGN.items() if re.search(told, last) or re.search(told, key)), "")


def read(path: Path) -> Summary:
    """The summary of one file's log."""
    found = Summary(path.stem.replace("+", "/"))
    results: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    begun: dict[tuple[str, str], int] = {}
    for line in path.read_text("utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a line that a dying process did not finish
            continue
        if "collected" in entry:
            found.collected = entry["collected"]
        elif "complete" in entry:
            found.complete = True
        elif "died" in entry:
            for key, device in begun:
                results[key][device] = {
                    "status": "abort",
                    "why": f"the process ended with {entry['died']}",
                    "fallbacks": [],
                }
            begun.clear()
        elif "status" in entry:
            results[entry["key"]][entry["device"]] = entry
            begun.pop((entry["key"], entry["device"]), None)
        elif "key" in entry:
            begun[entry["key"], entry["device"]] = 1
    found.run = len(results)
    for key, pair in sorted(results.items()):
        if pair.get("cpu", {}).get("status") == "pass" and "webgpu" in pair:
            found.cpu += 1
            _count(found, key, pair["webgpu"])
    return found


def _count(found: Summary, key: str, ours: dict[str, Any]) -> None:
    status = ours["status"]
    if status == "pass":
        found.both += 1
        found.without_cpu += not ours["fallbacks"]
    elif status in ("skip", "expected failure"):
        found.skipped += 1
    elif status == "late":
        found.late += 1
    else:
        reason = "" if status == "abort" else reason_of(key, ours["why"])
        if reason:
            found.by_design += 1
            found.reasons[reason] = found.reasons.get(reason, 0) + 1
            return
        wrong = bool(WRONG.search(ours["why"]))
        kind = "abort" if status == "abort" else "wrong" if wrong else "error"
        found.aborted += kind == "abort"
        found.failed += kind != "abort"
        found.wrong += kind == "wrong"
        said = ours["why"][ours["why"].rfind("EXC ") + 4 :] if "EXC " in ours["why"] else ours["why"]
        found.troubles.append({"test": key, "kind": kind, "why": " ".join(said.split())[:300]})


def totals(summaries: Iterable[Summary]) -> dict[str, int]:
    counted: collections.Counter[str] = collections.Counter()
    for one in summaries:
        for name, value in vars(one).items():
            if isinstance(value, int) and not isinstance(value, bool):
                counted[name] += value
    return dict(counted)
