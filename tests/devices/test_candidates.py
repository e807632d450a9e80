"""Merging what was seen with what was tried."""

from __future__ import annotations

from tests.devices.machines import GIB, hardware

from anytorch.devices.cpu import CpuBackend
from anytorch.devices.cuda import CudaBackend
from anytorch.devices.gather import candidates
from anytorch.devices.rocm import RocmBackend
from anytorch.devices.types import BackendReport, DeviceReport, Facts, Level, Reason, State, TorchReport
from anytorch.devices.webgpu import WebgpuBackend
from anytorch.devices.xpu import XpuBackend
from anytorch.probe.facts import Gpu, Graphics, Icd

H200 = Gpu(
    "nvidia", "NVIDIA H200", "0000:01:00.0", driver="nvidia", uuid="GPU-a", index=0, capability=(9, 0), total=140 * GIB
)
T4 = Gpu("nvidia", "Tesla T4", "0000:02:00.0", driver="nvidia", uuid="GPU-b", index=1, capability=(7, 5))


def tried(*devices: DeviceReport, **more: object) -> TorchReport:
    return TorchReport("2.13.0+cu130", backends={"cuda": BackendReport("cuda", devices, **more)})  # type: ignore[arg-type]


def test_untried_hardware_is_seen_unless_a_diagnosis_blocks_it() -> None:
    facts = Facts(hardware(H200, wheel="2.13.0+cu130"))
    (card,) = candidates(facts, [CudaBackend()], [])
    assert (card.id, card.state, card.uuid) == ("cuda:0", State.SEEN, "GPU-a")
    blocked = Reason("cpu-only-wheel", Level.ERROR, "torch is CPU-only", backends=("cuda",))
    (card,) = candidates(facts, [CudaBackend()], [blocked])
    assert (card.state, card.reasons) == (State.UNUSABLE, (blocked,))
    warning = Reason("order", Level.WARNING, "indices differ", backends=("cuda",))
    assert candidates(facts, [CudaBackend()], [warning])[0].state is State.SEEN


def test_a_tried_card_is_matched_by_uuid_not_by_index() -> None:
    # CUDA's own order (fastest first) can differ from NVML's: the fast card is CUDA's 0 and NVML's 1.
    first, second = DeviceReport(0, "NVIDIA H200", "GPU-a"), DeviceReport(1, "Tesla T4", "GPU-b")
    machine = hardware(
        Gpu("nvidia", "Tesla T4", uuid="GPU-b", index=0), Gpu("nvidia", "NVIDIA H200", uuid="GPU-a", index=1)
    )
    found = candidates(Facts(machine, tried(first, second)), [CudaBackend()], [])
    assert [(c.index, c.physical_index, c.name) for c in found] == [(0, 1, "NVIDIA H200"), (1, 0, "Tesla T4")]


def test_a_broken_card_does_not_hide_the_other() -> None:
    report = tried(DeviceReport(0, "NVIDIA H200", "GPU-a"), facts={"broken": {"1": "RuntimeError: ECC error"}})
    good, bad = candidates(Facts(hardware(H200, T4), report), [CudaBackend()], [])
    assert good.state is State.USABLE
    assert bad.state is State.UNUSABLE
    assert "ECC error" in bad.reasons[0].text


def test_a_failed_back_end_keeps_the_childs_words_unless_a_diagnosis_explains_them() -> None:
    report = tried(code="failed", error="RuntimeError: no kernel image is available")
    (card,) = candidates(Facts(hardware(H200), report), [CudaBackend()], [])
    assert card.state is State.UNUSABLE
    assert "no kernel image" in card.reasons[0].text
    known = Reason("not-covered", Level.ERROR, "the wheel has no kernels for capability 9.0", backends=("cuda",))
    (card,) = candidates(Facts(hardware(H200), report), [CudaBackend()], [known])
    assert card.reasons == (known,)


def test_masks_change_the_index_and_keep_the_physical_one() -> None:
    machine = hardware(H200, T4, env={"CUDA_VISIBLE_DEVICES": "1"})
    (card,) = CudaBackend().seen(machine)
    assert (card.id, card.physical_index, card.name) == ("cuda:0", 1, "Tesla T4")


def test_cards_that_are_all_masked_are_still_listed() -> None:
    assert len(CudaBackend().seen(hardware(H200, T4, env={"CUDA_VISIBLE_DEVICES": "-1"}))) == 2


def test_a_card_held_by_another_driver_is_not_a_cuda_device() -> None:
    nouveau = Gpu("nvidia", "GP104", "0000:01:00.0", driver="nouveau")
    assert list(CudaBackend().seen(hardware(nouveau))) == []


def test_rocm_masks_are_applied_one_after_the_other() -> None:
    cards = [Gpu("amd", f"card {i}", index=i, arch="gfx1100") for i in range(3)]
    machine = hardware(*cards, env={"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"})
    assert [c.name for c in RocmBackend().seen(machine)] == ["card 2"]


def test_intel_discrete_comes_before_integrated() -> None:
    machine = hardware(
        Gpu("intel", "Iris Xe", "0000:00:02.0", integrated=True), Gpu("intel", "Arc B580", "0000:03:00.0")
    )
    assert [c.name for c in XpuBackend().seen(machine)] == ["Arc B580", "Iris Xe"]


def test_the_cpu_is_always_there_with_its_limits() -> None:
    (cpu,) = candidates(Facts(hardware()), [CpuBackend()], [])
    assert (cpu.id, cpu.torch_name, cpu.total) == ("cpu", "cpu", 32 * GIB)
    assert cpu.caps is not None and cpu.caps.autocast_dtype is None  # AVX2 only: bf16 would be slower


def test_lavapipe_is_listed_as_software() -> None:
    icd = Icd("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json", "libvulkan_lvp.so", True)
    machine = hardware(graphics=Graphics(vulkan_loader="/lib/libvulkan.so.1", vulkan_icds=(icd,)))
    (adapter,) = WebgpuBackend().seen(machine)
    assert adapter.software
    assert adapter.priority < CpuBackend.priority
