"""The wheel tables against torch's own, and the advice they lead to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anytorch.devices.wheels import (
    COMPILED_FOR,
    RELEASES,
    ROCM_GFX,
    TESTED,
    advise,
    compiled_for,
    covers,
    cuda_tag,
    driver_suffices,
    is_xpu,
    least_driver,
    parse_version,
    runs_on,
)
from anytorch.probe.facts import Gpu, Hardware

from .build import (
    ARC,
    GIB,
    H200,
    RX7900,
    amd_box,
    apple_box,
    ascend_box,
    change,
    cpu_box,
    cuda_box,
    intel_box,
    wheel,
)
from .cases import GTX1080, RAPHAEL, RTX5090, SECOND, UHD630, V100, VM_CARD

INDEX = "https://download.pytorch.org/whl"


def box(*gpus: Gpu, driver: str | None = "580.159.04", torch: object = None, **machine: str) -> Hardware:
    facts = change(cuda_box(), nvidia={"driver": driver, "kernel_version": driver}, machine=machine)
    return replace(facts.hardware, gpus=gpus, torch=torch)  # type: ignore[arg-type]


def test_the_capabilities_are_those_of_torchs_own_table() -> None:
    import torch
    from torch.cuda import PYTORCH_RELEASES_CODE_CC as theirs

    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"our table is that of torch 2.13, this is {torch.__version__}")

    for cuda, by_arch in theirs.items():
        for arch, codes in by_arch.items():
            assert compiled_for(cuda, arch) == codes, (cuda, arch)


def test_what_runs_where_is_what_the_installed_torch_says() -> None:
    from torch.cuda import DEVICE_REQUIREMENT

    for code, allowed in DEVICE_REQUIREMENT.items():
        for capability in range(30, 130):
            assert runs_on(code, capability) == (capability in allowed), (code, capability)


def test_every_published_cuda_and_rocm_has_a_table() -> None:
    for release in RELEASES.values():
        assert set(release.cuda) <= set(COMPILED_FOR)
        assert set(release.rocm) <= set(ROCM_GFX)
        assert all(least_driver(cuda) for cuda in release.cuda)
    assert parse_version(TESTED)[:2] in RELEASES


@pytest.mark.parametrize(
    ("driver", "cuda", "system", "enough"),
    [
        ("580.159.04", "13.0", "Linux", True),
        ("580", "13.2", "Linux", True),
        ("575.57.08", "13.0", "Linux", False),
        ("525.60.13", "12.6", "Linux", True),
        ("525.60.12", "12.6", "Linux", False),
        ("528.33", "12.6", "Windows", True),
        ("528.24", "12.6", "Windows", False),
        ("470.256.02", "11.8", "Linux", True),
        ("", "13.0", "Linux", None),
        ("580", "99.0", "Linux", None),
    ],
)
def test_drivers(driver: str, cuda: str, system: str, enough: bool | None) -> None:
    assert driver_suffices(driver, cuda, system) is enough


@pytest.mark.parametrize(
    ("cuda", "capability", "torch", "covered"),
    [
        ("13.0", (7, 0), "2.13.0", False),
        ("12.6", (7, 0), "2.13.0", True),
        ("12.6", (12, 0), "2.13.0", False),
        ("12.8", (7, 0), "2.10.0", True),  # pytorch#175253: Volta left CUDA 12.8 with 2.11
        ("12.8", (7, 0), "2.11.0", False),
        ("12.6", (6, 1), "2.13.0", True),
        ("13.0", (8, 9), "2.13.0", True),
        ("13.0", (8, 7), "2.13.0", False),  # Jetson Orin wants code of its own
        ("14.0", (9, 0), "2.13.0", None),
    ],
)
def test_cards(cuda: str, capability: tuple[int, int], torch: str, covered: bool | None) -> None:
    assert covers(cuda, capability, "x86_64", torch) is covered


def pip(version: str, tag: str) -> str:
    return f"pip install torch=={version}+{tag} --index-url {INDEX}/{tag}"


@pytest.mark.parametrize(
    ("hardware", "kind", "command"),
    [
        (box(H200), "cuda", pip(TESTED, "cu130")),
        (box(H200, driver="570.133.20"), "cuda", pip(TESTED, "cu126")),
        (box(H200, driver=None), "cuda", pip(TESTED, "cu130")),
        (box(V100), "cuda", pip(TESTED, "cu126")),
        (box(GTX1080, driver="535.183.01"), "cuda", pip(TESTED, "cu126")),
        # sm_120 on a driver for CUDA 12.8: 2.13 has no wheel for that, 2.11 has.
        (box(RTX5090, driver="570.133.20"), "cuda", pip("2.11.0", "cu128")),
        # Both cards at once: only CUDA 12.8 of 2.10 has code for sm_70 and sm_120.
        (box(V100, RTX5090), "cuda", pip("2.10.0", "cu128")),
        (box(H200, torch=wheel("cpu", "2.12.1")), "cuda", pip("2.12.1", "cu130")),
        (box(H200, SECOND, arch="aarch64"), "cuda", pip(TESTED, "cu130")),
        (box(VM_CARD), "cpu", pip(TESTED, "cpu")),
        (box(RX7900), "rocm", pip(TESTED, "rocm7.2")),
        (box(replace(RX7900, arch="gfx1151")), "rocm", pip(TESTED, "rocm7.2")),
        (box(RX7900, torch=wheel("cpu", "2.10.0")), "rocm", pip("2.10.0", "rocm7.1")),
        # 2.15 has no ROCm wheel that we know of: the tested version has.
        (box(RX7900, torch=wheel("cpu", "2.15.0")), "rocm", pip("2.13.0", "rocm7.2")),
        (box(RAPHAEL), "cpu", pip(TESTED, "cpu")),
        (box(RX7900, system="Windows"), "cpu", pip(TESTED, "cpu")),
        (box(ARC), "xpu", pip(TESTED, "xpu")),
        (box(UHD630), "cpu", pip(TESTED, "cpu")),
        (box(H200, RX7900, ARC), "cuda", pip(TESTED, "cu130")),
        (box(), "cpu", pip(TESTED, "cpu")),
        (replace(apple_box().hardware, torch=None), "mps", f"pip install torch=={TESTED}"),
        (
            replace(ascend_box().hardware, torch=None),
            "npu",
            f"{pip(TESTED, 'cpu')} && pip install 'torch-npu==2.13.*'",
        ),
        # A development build is not on the release indexes.
        (box(H200, torch=wheel("cpu", "2.14.0.dev20260801")), "cuda", pip(TESTED, "cu130")),
    ],
)
def test_advice(hardware: Hardware, kind: str, command: str) -> None:
    advice = advise(hardware)
    assert (advice.kind, advice.command) == (kind, command)
    assert advice.index in advice.command and advice.why


def test_a_driver_too_old_for_everything_is_told_first() -> None:
    advice = advise(box(RTX5090, driver="390.157"))
    assert advice.kind == "cuda"
    assert advice.needs_driver == "580" and advise(box(RTX5090)).needs_driver == ""
    assert "install NVIDIA driver" in advice.why and "first" in advice.why and "390.157" in advice.why


def test_torchvision_moves_with_torch() -> None:
    facts = change(cuda_box(), hardware={"torch": wheel("cpu")}, packages={"torchvision": "0.28.0+cpu"})
    assert "torch==2.13.0+cu130 torchvision==0.28.0+cu130 --index-url" in advise(facts.hardware).command


def test_an_intel_mac_gets_no_command() -> None:
    advice = advise(change(apple_box(), machine={"arch": "x86_64"}).hardware)
    assert (advice.kind, advice.command) == ("none", "") and "Intel" in advice.why


def test_the_installed_wheel_of_a_healthy_machine_is_the_advised_one() -> None:
    for facts in (cuda_box(), amd_box(), intel_box(), cpu_box()):
        torch = facts.hardware.torch
        assert torch is not None and f"torch=={torch.version} " in advise(facts.hardware).command


@pytest.mark.parametrize(
    ("device_id", "integrated", "supported"),
    [
        (0x56A0, False, True),  # Arc A770
        (0xE20B, False, True),  # Arc B580
        (0x0BD5, False, True),  # Max 1550
        (0x7D55, True, True),  # Meteor Lake-H
        (0x64A0, True, True),  # Lunar Lake
        (0x9A49, True, False),  # Tiger Lake, Iris Xe
        (0x3E92, True, False),  # UHD 630
        (None, False, True),
        (None, True, False),
    ],
)
def test_which_intel_gpus_the_xpu_wheel_drives(device_id: int | None, integrated: bool, supported: bool) -> None:
    assert is_xpu(Gpu("intel", device_id=device_id, integrated=integrated, total=8 * GIB)) is supported


def test_tags() -> None:
    assert cuda_tag("13.0") == "cu130" and cuda_tag("12.6") == "cu126"
    assert parse_version("580.159.04") == (580, 159, 4) and parse_version("rc1") == ()


# torch 2.11.0+cu130 on the H200 (driver 580.159.04, 2026-11-15): torch.cuda.get_arch_list().
H200_ARCH_LIST = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def test_the_table_of_cuda_13_is_what_a_real_wheel_carries() -> None:
    assert compiled_for("13.0", "x86_64", "2.11.0") == {int(arch.removeprefix("sm_")) for arch in H200_ARCH_LIST}
