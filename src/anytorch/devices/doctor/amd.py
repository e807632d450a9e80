"""AMD cards: device nodes, the compute driver, integrated beside discrete. The nodes of Intel cards work alike."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from anytorch.devices.doctor.common import in_container, listed, named
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import cards_of, is_xpu
from anytorch.probe.facts import Node


@diagnosis(
    "no-permission",
    Level.ERROR,
    "This user may not open the GPU's device node",
    number=19,
    symptom="`No HIP GPUs are available` or `torch.xpu.is_available()` False for you, and all is well as root; "
    "`rocminfo` says `Unable to open /dev/kfd read-write: Permission denied`.",
    evidence="`/dev/kfd` or every `/dev/dri/renderD*` exists and this user has no read-write access; the node's "
    "owning group.",
    fix="`sudo usermod -aG render $USER`, with the group that owns the node, then log in again; in a container "
    "`docker run --group-add <gid>` with the *number* of that group on this host.",
    background=("https://github.com/ROCm/rocminfo/issues/34", "https://github.com/ROCm/vllm/pull/893"),
)
def no_permission(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    amd = bool(cards_of(hardware, "amd"))
    intel = any(is_xpu(gpu) for gpu in cards_of(hardware, "intel"))
    kfd = hardware.node("/dev/kfd")
    if amd and kfd is not None and not _open(kfd):
        yield _permission(kfd, in_container(hardware), ("rocm",))
    renders = [node for node in hardware.nodes if node.path.startswith("/dev/dri/renderD")]
    if (amd or intel) and renders and not any(_open(node) for node in renders):
        backends = (("rocm",) if amd else ()) + (("xpu",) if intel else ())
        yield _permission(renders[0], in_container(hardware), backends)


def _open(node: Node) -> bool:
    return node.readable and node.writable


def _permission(node: Node, container: bool, backends: tuple[str, ...]) -> Finding:
    group = node.group or (str(node.gid) if node.gid is not None else "unknown")
    if container:
        fix = f"docker run --group-add {node.gid if node.gid is not None else quote(group)} …"
    else:
        fix = f"sudo usermod -aG {quote(group)} $USER  # then log out and in again"
    rights = f"readable: {'yes' if node.readable else 'no'}, writable: {'yes' if node.writable else 'no'}"
    text = f"this user may not read and write {node.path}, which belongs to group {group} (gid {node.gid})"
    return Finding(text, fix, f"{node.path} {rights}", backends)


@diagnosis(
    "kfd-missing",
    Level.ERROR,
    "The AMD compute driver is not there",
    symptom="`No HIP GPUs are available` with a ROCm wheel and an AMD card on the desk.",
    evidence="An AMD card, a ROCm wheel and no `/dev/kfd`, outside a container; which kernel driver holds the card.",
    fix="`sudo modprobe amdgpu`; on kernels without KFD install AMD's `amdgpu-dkms`.",
    background=("https://rocm.docs.amd.com/projects/install-on-linux/en/latest/",),
)
def kfd_missing(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards = hardware.torch, cards_of(hardware, "amd")
    if wheel is None or wheel.kind != "rocm" or not cards or hardware.node("/dev/kfd") is not None:
        return
    if in_container(hardware) or hardware.machine.wsl or hardware.machine.system != "Linux":
        return
    yield Finding(
        f"{named(cards[0])} is present, but /dev/kfd is not: the kernel driver is {cards[0].driver or 'none'}",
        "sudo modprobe amdgpu",
        f"/dev/kfd does not exist; the card's kernel driver is {cards[0].driver or 'none'}",
        ("rocm",),
    )


@diagnosis(
    "amd-two-gpus",
    Level.WARNING,
    "An AMD processor's graphics unit is beside an AMD card",
    number=20,
    symptom="The program crashes at the first kernel, or the slow graphics unit is chosen because it reports the "
    "system's RAM as its own.",
    evidence="An integrated and a discrete AMD GPU, and neither `HIP_VISIBLE_DEVICES` nor `ROCR_VISIBLE_DEVICES`.",
    fix="`export HIP_VISIBLE_DEVICES=<index of the card>`. Never rank the two by free memory.",
    background=(
        "https://github.com/oobabooga/textgen/issues/7319",
        "https://github.com/unslothai/unsloth/pull/7670",
    ),
)
def amd_two_gpus(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    cards = cards_of(hardware, "amd")
    small = [gpu for gpu in cards if gpu.integrated is True]
    big = [gpu for gpu in cards if gpu.integrated is False]
    masked = [name for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in hardware.env]
    if not small or not big or masked:
        return
    order = sorted(cards, key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.pci or ""))
    indices = listed(str(gpu.index if gpu.index is not None else order.index(gpu)) for gpu in big).replace(" ", "")
    yield Finding(
        f"{named(small[0])} (integrated) is beside {named(big[0])}, and ROCm may choose either",
        f"export HIP_VISIBLE_DEVICES={indices}",
        "neither HIP_VISIBLE_DEVICES nor ROCR_VISIBLE_DEVICES is set",
    )
