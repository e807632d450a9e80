"""Variables and programs that hide, reorder or fake devices."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from anytorch.devices.doctor.common import Finding, child_fact, diagnosis, listed, named
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import cards_of
from anytorch.probe.facts import Gpu
from anytorch.probe.masks import Mask, rocm_visible, visible

AMD_MASKS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
HARMLESS = frozenset({"mig", "many-masks"})  # these have diagnoses of their own


@diagnosis(
    Level.ERROR,
    "A mask variable hides devices",
    symptom="`torch.cuda.device_count()` is 0, or smaller than expected, and nothing says why.",
    evidence="`CUDA_VISIBLE_DEVICES` (NVIDIA), `HIP_VISIBLE_DEVICES` and `ROCR_VISIBLE_DEVICES` (AMD) or "
    "`ASCEND_RT_VISIBLE_DEVICES` (Huawei) is empty, -1, names a device twice, or names one that does not exist. CUDA "
    "reads the list up to the first bad entry, and a repeat empties it.",
    fix="`unset CUDA_VISIBLE_DEVICES`, or name existing devices once each: `export CUDA_VISIBLE_DEVICES=0`.",
    background="https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars "
    "https://github.com/pytorch/pytorch/issues/23544",
)
def mask_hides_devices(facts: Facts) -> Iterator[Finding]:
    env = facts.hardware.env
    for vendor, backend, variables in (
        ("nvidia", "cuda", ("CUDA_VISIBLE_DEVICES",)),
        ("amd", "rocm", ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        ("huawei", "npu", ("ASCEND_RT_VISIBLE_DEVICES",)),
    ):
        cards = _numbered(cards_of(facts.hardware, vendor))
        names = [name for name in variables if name in env]
        if not cards or not names:
            continue
        uuids = [gpu.uuid or "" for gpu in cards]
        mask = rocm_visible(env, len(cards), uuids) if vendor == "amd" else visible(env[names[0]], len(cards), uuids)
        finding = _masked(mask, cards, backend, [(name, env[name]) for name in names])
        if finding is not None:
            yield finding


def _masked(mask: Mask, cards: tuple[Gpu, ...], backend: str, variables: list[tuple[str, str]]) -> Finding | None:
    notes = [note for note in mask.notes if note.code not in HARMLESS]
    if mask.visible is None or (not mask.hides_all and not notes):
        return None
    setting = listed(f"{name}={value!r}" for name, value in variables)
    why = "; ".join(note.text for note in notes) or "no device is left"
    fix = f"unset {' '.join(name for name, _ in variables)}"
    if mask.hides_all:
        what = f"the only {backend} device" if len(cards) == 1 else f"all {len(cards)} {backend} devices"
        return Finding(f"{setting} hides {what}: {why}", fix, setting, (backend,))
    left = listed(named(cards[i]) for i in mask.visible)
    return Finding(f"{setting} leaves {left}: {why}", fix, setting, (), Level.WARNING)


def _numbered(cards: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """In the vendor's own order; a card without an index comes last, by PCI address."""
    return tuple(sorted(cards, key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.pci or "")))


@diagnosis(
    Level.WARNING,
    "Several AMD mask variables are set at once",
    symptom="`No HIP GPUs are available`, or the wrong card is used, on a machine with several AMD GPUs.",
    evidence="More than one of `HIP_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES`, `CUDA_VISIBLE_DEVICES` and "
    "`GPU_DEVICE_ORDINAL` is set: ROCR is applied first and HIP numbers what is left of it.",
    fix="Keep one: `unset ROCR_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL`.",
    background="https://github.com/mcmonkeyprojects/SwarmUI/issues/565 https://github.com/ray-project/ray/issues/53737",
)
def two_amd_masks(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    found = [name for name in AMD_MASKS if name in hardware.env]
    if cards_of(hardware, "nvidia") and "CUDA_VISIBLE_DEVICES" in found:
        found.remove("CUDA_VISIBLE_DEVICES")  # it may well be meant for the NVIDIA card
    if cards_of(hardware, "amd") and len(found) > 1:
        setting = listed(f"{name}={hardware.env[name]!r}" for name in found)
        yield Finding(
            f"{setting} are all set, and HIP numbers only what ROCR leaves",
            f"unset {' '.join(found[1:])}",
            setting,
        )


@diagnosis(
    Level.WARNING,
    "CUDA numbers the cards differently from nvidia-smi",
    symptom="`cuda:0` is not the card that `nvidia-smi` calls 0.",
    evidence="At least two NVIDIA cards of different names, and `CUDA_DEVICE_ORDER` is not `PCI_BUS_ID`: CUDA then "
    "puts the fastest card first.",
    fix="`export CUDA_DEVICE_ORDER=PCI_BUS_ID` before Python starts, or name cards by UUID.",
    background="https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars",
)
def different_cards_order(facts: Facts) -> Iterator[Finding]:
    names = {gpu.name for gpu in cards_of(facts.hardware, "nvidia") if gpu.name}
    order = facts.hardware.env.get("CUDA_DEVICE_ORDER")
    if len(names) > 1 and order != "PCI_BUS_ID":
        yield Finding(
            f"{listed(sorted(names))} are different cards, so CUDA's indices need not be those of nvidia-smi",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            f"CUDA_DEVICE_ORDER is {order or 'not set'}",
        )


@diagnosis(
    Level.WARNING,
    "CUDA_VISIBLE_DEVICES was changed after CUDA had started",
    needs="child",
    symptom="The program sets `CUDA_VISIBLE_DEVICES` and still uses the old devices.",
    evidence="The variable's value when torch was imported differs from now, and CUDA was initialised by then.",
    fix="Set it before Python starts: `CUDA_VISIBLE_DEVICES=1 python program.py`.",
    background="https://github.com/pytorch/pytorch/issues/80876",
)
def mask_changed(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None or not child_fact(facts, "cuda_initialized_before", bool):
        return
    before, now = child_fact(facts, "mask_at_import", str), child_fact(facts, "mask_now", str)
    if before != now:
        yield Finding(
            f"CUDA_VISIBLE_DEVICES was {before!r} when CUDA started and is {now!r} now, which has no effect",
            f"CUDA_VISIBLE_DEVICES={quote(now)} python …" if now is not None else "unset CUDA_VISIBLE_DEVICES",
            f"at import {before!r}, now {now!r}",
        )


@diagnosis(
    Level.WARNING,
    "The mask names a MIG slice",
    symptom="`Cannot re-initialize CUDA in forked subprocess` in a DataLoader or server, although the parent only "
    "asked `torch.cuda.is_available()`.",
    evidence="`CUDA_VISIBLE_DEVICES` begins with `MIG-`: NVML cannot count slices, so torch asks the driver and "
    "initialises it.",
    fix="Start workers with spawn: `torch.multiprocessing.set_start_method('spawn')`.",
    background="https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
)
def mig_mask(facts: Facts) -> Iterator[Finding]:
    mask = facts.hardware.env.get("CUDA_VISIBLE_DEVICES", "")
    if mask.startswith("MIG-"):
        yield Finding(
            f"CUDA_VISIBLE_DEVICES={mask} names a MIG slice, so asking torch whether CUDA is available starts the "
            "driver",
            "torch.multiprocessing.set_start_method('spawn')",
            f"CUDA_VISIBLE_DEVICES={mask}",
        )


@diagnosis(
    Level.WARNING,
    "Workers would be forked from a process that has started CUDA",
    needs="child",
    symptom="`RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
    "must use the 'spawn' start method`.",
    evidence="The multiprocessing start method is fork, and this process has already initialised the driver.",
    fix="`torch.multiprocessing.set_start_method('spawn')` at the top of the program.",
    background="https://docs.pytorch.org/docs/stable/notes/multiprocessing.html",
)
def fork_after_init(facts: Facts) -> Iterator[Finding]:
    if child_fact(facts, "cuda_initialized_before", bool) and child_fact(facts, "start_method", str) == "fork":
        yield Finding(
            "CUDA is already initialised in this process and multiprocessing would fork: the workers cannot use CUDA",
            "torch.multiprocessing.set_start_method('spawn')",
            "start method fork, torch.cuda.is_initialized() True",
        )


@diagnosis(
    Level.WARNING,
    "Another device pretends to be CUDA",
    needs="child",
    symptom="`torch.cuda.is_available()` is True on a machine without an NVIDIA or AMD GPU, and CUDA-only code fails "
    "later.",
    evidence="`torch.version.cuda` and `torch.version.hip` are None while `torch.cuda.is_available()` says True: "
    "`torch_npu.contrib.transfer_to_npu` and the like replace `torch.cuda`.",
    fix="Remove `from torch_npu.contrib import transfer_to_npu`, and ask for the device by its own name: "
    "`anytorch.resolve('npu')`.",
    background="https://github.com/huggingface/accelerate/issues/3020",
)
def cuda_spoofed(facts: Facts) -> Iterator[Finding]:
    if child_fact(facts, "cuda_spoofed", bool):
        name = child_fact(facts, "privateuse1", str) or "another device"
        yield Finding(
            f"torch.cuda.is_available() is True, but torch is built without CUDA: {name} pretends to be it",
            "remove `from torch_npu.contrib import transfer_to_npu` from the program",
            "torch.version.cuda is None and torch.cuda.is_available() is True",
        )
