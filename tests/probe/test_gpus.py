"""GPUs from recorded trees: PCI, NVIDIA's files and NVML, KFD, Ascend, Intel, Apple."""

from __future__ import annotations

from typing import Any

import pytest

from anytorch.probe import snapshot
from anytorch.probe.cards import gfx_name
from anytorch.probe.facts import Gpu
from anytorch.probe.nvidia import read_nvml
from anytorch.probe.pci import merge, pci_address
from anytorch.probe.windows import read_adapters

# The H200 machine this project tests on, recorded 2026-11-15: /proc/driver/nvidia, /sys/bus/pci, /dev.
H200_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    "GCC version:  gcc version 15.3.0 (GCC) \n"
)
H200_INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 41
GPU UUID: \t GPU-8b76e503-d849-6334-acea-f57e29736cb3
Video BIOS: \t 96.00.a5.00.1a
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:00:06.0
Device Minor: \t 0
GPU Firmware: \t 580.159.04
GPU Excluded:\t No
"""


def h200_files(pci: Any) -> dict[str, str]:
    return {
        **pci("0000:00:00.0", "0x060000", "0x8086", "0x0d57"),
        **pci("0000:00:03.0", "0x020000", "0x1af4", "0x1041", "virtio-pci"),
        **pci("0000:00:06.0", "0x030200", "0x10de", "0x2335", "nvidia"),
        "/proc/driver/nvidia/version": H200_VERSION,
        "/proc/driver/nvidia/gpus/0000:00:06.0/information": H200_INFORMATION,
        "/sys/module/nvidia/version": "580.159.04\n",
        "/dev/nvidia0": "",
        "/dev/nvidiactl": "",
        "/dev/nvidia-uvm": "",
        "/dev/nvidia-uvm-tools": "",
    }


def test_one_card_seen_twice_is_one_card(build: Any, pci: Any) -> None:
    hardware = snapshot(build(h200_files(pci)))
    assert len(hardware.gpus) == 1
    gpu = hardware.gpus[0]
    assert (gpu.vendor, gpu.name, gpu.pci, gpu.device_id) == ("nvidia", "NVIDIA H200", "0000:00:06.0", 0x2335)
    assert (gpu.uuid, gpu.driver, gpu.minor) == ("GPU-8b76e503-d849-6334-acea-f57e29736cb3", "nvidia", 0)
    assert gpu.sources == ("pci", "proc")
    assert hardware.nvidia.kernel_version == "580.159.04"
    assert not hardware.nvidia.nvml_found and hardware.nvidia.nvml_code is None
    assert [node.path for node in hardware.nodes] == [
        "/dev/nvidia0",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidiactl",
    ]
    assert hardware.problems == ()


def test_a_sandbox_without_a_pci_bus_still_shows_the_card(build: Any) -> None:
    root = build(
        {
            "/proc/driver/nvidia/version": H200_VERSION,
            "/proc/driver/nvidia/gpus/0000:00:06.0/information": H200_INFORMATION,
        }
    )
    hardware = snapshot(root)
    assert [gpu.name for gpu in hardware.gpus] == ["NVIDIA H200"]
    assert hardware.nvidia.kernel_version == "580.159.04"


def test_the_closed_kernel_module_writes_its_version_differently(build: Any) -> None:
    # Recorded in astral-sh/uv, crates/uv-torch/src/accelerator.rs (its tests).
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  375.74  Wed Jun 14 01:39:39 PDT 2017\n"
    assert snapshot(build({"/proc/driver/nvidia/version": text})).nvidia.kernel_version == "375.74"


def test_a_card_on_nouveau_and_one_given_to_a_virtual_machine(build: Any, pci: Any) -> None:
    # nouveau's driver link: nokyan/resources issue 488. vfio: an RTX 3060 (10de:2504) at 07:00.0, with its audio
    # function 10de:228e, HikariKnight/quickpassthrough issue 22.
    root = build(
        {
            **pci("0000:01:00.0", "0x030000", "0x10de", "0x1f91", "nouveau", boot_vga="1\n"),
            **pci("0000:07:00.0", "0x030000", "0x10de", "0x2504", "vfio-pci", boot_vga="0\n"),
            **pci("0000:07:00.1", "0x040300", "0x10de", "0x228e"),
        }
    )
    hardware = snapshot(root)
    assert [(g.driver, g.display) for g in hardware.gpus] == [("nouveau", True), ("vfio-pci", False)]
    assert hardware.nvidia.kernel_version is None


def test_names_come_from_the_pci_database(build: Any, pci: Any) -> None:
    # Lines of pci.ids as lspci prints them in quickpassthrough issue 22; the format is described in the file's head.
    ids = (
        "#\n1002  Advanced Micro Devices, Inc. [AMD/ATI]\n\t2504  not this one\n"
        "10de  NVIDIA Corporation\n\t2503  GA106 [GeForce RTX 3060]\n"
        "\t2504  GA106 [GeForce RTX 3060 Lite Hash Rate]\n\t\t1043 881d  a subsystem\n8086  Intel Corporation\n"
    )
    root = build({**pci("0000:07:00.0", "0x030000", "0x10de", "0x2504"), "/usr/share/misc/pci.ids": ids})
    assert snapshot(root).gpus[0].name == "GA106 [GeForce RTX 3060 Lite Hash Rate]"


# Vendor numbers from pci.ids: consoles of virtual machines and of management controllers.
@pytest.mark.parametrize("vendor", ["0x1af4", "0x1234", "0x15ad", "0x1b36", "0x1013", "0x1a03", "0x102b", "0x1414"])
def test_consoles_are_no_compute_devices(build: Any, pci: Any, vendor: str) -> None:
    assert snapshot(build(pci("0000:00:02.0", "0x030000", vendor, "0x1050"))).gpus == ()


def test_unknown_vendors_keep_their_number_and_an_intel_npu_is_no_xpu(build: Any, pci: Any) -> None:
    root = build(
        {
            **pci("0000:00:02.0", "0x030000", "0x8086", "0x7d55", "i915"),  # Meteor Lake graphics
            **pci("0000:00:0b.0", "0x120000", "0x8086", "0x7d1d", "intel_vpu"),  # and its NPU (drivers/accel/ivpu)
            **pci("0000:03:00.0", "0x030000", "0x8086", "0xe20b", "xe"),  # Arc B580 (drivers/gpu/drm/xe, BMG ids)
            **pci(
                "0000:05:00.0", "0x030000", "0x1ed5", "0x0001"
            ),  # Moore Threads' vendor number (pci.ids); the device is any
        }
    )
    hardware = snapshot(root)
    assert [(g.pci, g.integrated, g.driver) for g in hardware.gpus_of("intel")] == [
        ("0000:00:02.0", True, "i915"),
        ("0000:03:00.0", False, "xe"),
    ]
    assert [g.vendor for g in hardware.gpus if g.vendor.startswith("0x")] == ["0x8086", "0x1ed5"]


KFD = "/sys/class/kfd/kfd/topology/nodes"

# A Radeon Pro W7900: the numbers a developer read off the card (ROCm/rocm-systems pull 7360). Beside it a Strix Point
# APU: chip 0x150e (5390), BDFID 50688, 16 CUs of 2 SIMDs (mudler/LocalAI issue 10624, rocminfo). The slot of the card
# is ours; its two memory files are those of an 8 GB card, verbatim from elementary/monitor issue 369.
W7900 = (
    "cpu_cores_count 0\nsimd_count 192\ngfx_target_version 110000\nvendor_id 4098\ndevice_id 29768\nlocation_id 768\n"
)
W7900 += "domain 0\ndrm_render_minor 129\nunique_id 7155534708977696464\n"
STRIX = (
    "cpu_cores_count 0\nsimd_count 32\ngfx_target_version 110500\nvendor_id 4098\ndevice_id 5390\nlocation_id 50688\n"
)
STRIX += "domain 0\ndrm_render_minor 128\nunique_id 0\n"


def test_radeon_card_beside_integrated_graphics(build: Any, pci: Any) -> None:
    root = build(
        {
            f"{KFD}/0/properties": "cpu_cores_count 24\nsimd_count 0\n",
            f"{KFD}/1/properties": W7900,
            f"{KFD}/2/properties": STRIX,
            **pci(
                "0000:03:00.0",
                "0x030000",
                "0x1002",
                "0x7448",
                "amdgpu",
                mem_info_vram_total="8573157376\n",
                mem_info_vram_used="6812925952\n",
            ),
            **pci("0000:c6:00.0", "0x038000", "0x1002", "0x150e", "amdgpu"),
        }
    )
    card, built_in = snapshot(root).gpus
    assert (card.arch, card.pci, card.index, card.integrated) == ("gfx1100", "0000:03:00.0", 0, False)
    assert (card.uuid, card.device_id) == (f"GPU-{7155534708977696464:016x}", 0x7448)
    assert (card.total, card.free) == (8573157376, 8573157376 - 6812925952)
    assert card.sources == ("pci", "kfd")
    assert (built_in.arch, built_in.pci, built_in.index) == ("gfx1150", "0000:c6:00.0", 1)
    assert built_in.integrated and built_in.unified and built_in.uuid is None and built_in.total is None


@pytest.mark.parametrize(
    ("version", "name"),
    # 90402: read on an MI300X (ROCm/rocm-cli pull 343); 90010 is MI200's, 100302 an RX 6600's (LLVM AMDGPUUsage).
    [(110000, "gfx1100"), (90402, "gfx942"), (90010, "gfx90a"), (100302, "gfx1032"), (0, None), (None, None)],
)
def test_gfx_names(version: int | None, name: str | None) -> None:
    assert gfx_name(version) == name


def test_kfd_locations_hold_bus_device_and_function(build: Any) -> None:
    # location_id is PCI_DEVID(bus, devfn), devfn is device << 3 | function (Linux amdkfd/kfd_topology.c, pci.h).
    properties = "simd_count 4\ndomain 1\nlocation_id 787\n"  # 0x0313
    assert snapshot(build({f"{KFD}/1/properties": properties})).gpus[0].pci == "0001:03:02.3"


def test_ascend_nodes_and_toolkit(build: Any) -> None:
    # Node names: vllm-project/vllm-ascend pull 49. ascend_toolkit_install.info: verbatim from its issue 4621.
    info = (
        "package_name=Ascend-cann-toolkit\nversion=8.3.RC2\ninnerversion=V100R001C23SPC002B210\n"
        "compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C23]\n"
        "arch=x86_64\nos=linux\npath=/usr/local/Ascend/ascend-toolkit/8.3.RC2/x86_64-linux\n"
    )
    root = build(
        {
            "/dev/davinci1": "",
            "/dev/davinci_manager": "",
            "/dev/devmm_svm": "",
            "/dev/hisi_hdc": "",
            "/usr/local/Ascend/ascend-toolkit/8.3.RC2/x86_64-linux/ascend_toolkit_install.info": info,
            "/usr/local/Ascend/ascend-toolkit/latest": "-> 8.3.RC2",
        }
    )
    hardware = snapshot(root)
    assert [(gpu.vendor, gpu.index) for gpu in hardware.gpus] == [("huawei", 1)]
    assert (hardware.ascend.toolkit, hardware.ascend.driver) == ("8.3.RC2", None)
    assert hardware.node("/dev/davinci1") is not None and hardware.node("/dev/davinci_manager") is not None


def test_ascend_cards_on_the_bus_take_their_nodes(build: Any, pci: Any) -> None:
    # Two 910B4 at C1 and C2 (vllm-ascend issue 3657); 0xd802 is 910B in pci.ids; 0x1711 is the iBMC's console.
    root = build(
        {
            **pci("0000:c1:00.0", "0x120000", "0x19e5", "0xd802"),
            **pci("0000:c2:00.0", "0x120000", "0x19e5", "0xd802"),
            **pci("0000:06:00.0", "0x030000", "0x19e5", "0x1711", "hibmc-drm"),
            "/dev/davinci0": "",
            "/dev/davinci1": "",
        }
    )
    gpus = snapshot(root).gpus
    assert [(g.pci, g.index, g.sources) for g in gpus] == [
        ("0000:c1:00.0", 0, ("pci", "dev")),
        ("0000:c2:00.0", 1, ("pci", "dev")),
    ]


# An M1 Pro: Dr-Noob/cpufetch issues 139 and 183 (`sysctl -a`); 16 GiB as system_profiler says there.
M1_PRO = {
    "hw.logicalcpu": "10",
    "hw.physicalcpu": "10",
    "hw.perflevel0.physicalcpu": "8",
    "hw.perflevel1.physicalcpu": "2",
    "machdep.cpu.brand_string": "Apple M1 Pro",
    "hw.memsize": str(16 * 1024**3),
}
PLIST = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<plist version="1.0">\n<dict>\n\t<key>ProductName</key>\n'
    "\t<string>macOS</string>\n\t<key>ProductVersion</key>\n\t<string>14.5</string>\n</dict>\n</plist>\n"
)


def test_a_mac(build: Any) -> None:
    root = build({"/System/Library/CoreServices/SystemVersion.plist": PLIST})
    hardware = snapshot(root, arch="arm64", sysctl=M1_PRO.get)
    assert (hardware.machine.system, hardware.machine.macos, hardware.machine.rosetta) == ("Darwin", "14.5", False)
    assert (hardware.cpu.performance_cores, hardware.cpu.efficiency_cores, hardware.cpu.good_threads) == (8, 2, 8)
    (gpu,) = hardware.gpus
    assert (gpu.vendor, gpu.name, gpu.unified, gpu.total) == ("apple", "Apple M1 Pro", True, 16 * 1024**3)
    assert hardware.memory.total == 16 * 1024**3 and hardware.memory.available is None


def test_a_translated_python_on_a_mac_still_shows_its_gpu(build: Any) -> None:
    # sysctl.proc_translated is 1 in a translated process (Apple, "About the Rosetta translation environment").
    root = build({"/System/Library/CoreServices/SystemVersion.plist": PLIST})
    sysctl = {**M1_PRO, "sysctl.proc_translated": "1"}.get
    hardware = snapshot(root, arch="x86_64", sysctl=sysctl)
    assert hardware.machine.rosetta and hardware.gpus_of("apple")
    assert not snapshot(root, arch="x86_64", sysctl=M1_PRO.get).gpus  # an Intel Mac


def test_pci_addresses_have_one_spelling() -> None:
    assert pci_address("00000000:00:06.0") == pci_address("0000:00:06.0") == pci_address("00:06.0") == "0000:00:06.0"
    assert pci_address("0000:C1:00.0") == "0000:c1:00.0"
    assert pci_address("junk") is None and pci_address(None) is None


def test_merge_by_address_then_by_uuid_and_never_across_vendors() -> None:
    seen = Gpu("nvidia", pci="0000:00:06.0", driver="nvidia", sources=("pci",))
    named = Gpu("nvidia", pci="0000:00:06.0", uuid="GPU-1", name="NVIDIA H200", sources=("proc",))
    counted = Gpu("nvidia", uuid="GPU-1", index=0, total=5, sources=("nvml",))
    other = Gpu("amd", pci="0000:00:06.0", sources=("kfd",))
    merged = merge([[seen], [named, counted], [other]])
    assert merged == [
        Gpu(
            "nvidia",
            "NVIDIA H200",
            "0000:00:06.0",
            driver="nvidia",
            uuid="GPU-1",
            index=0,
            total=5,
            sources=("pci", "proc", "nvml"),
        ),
        other,
    ]


def test_windows_adapters() -> None:
    # Value names and their types: Microsoft, "Registering Hardware Information" (display drivers). The ids are those
    # of the RTX 3060 above, a card of 12 GB; an adapter without a PCI id is a remote or indirect display.
    adapters = [
        {
            "DriverDesc": "NVIDIA GeForce RTX 3060",
            "MatchingDeviceId": "pci\\ven_10de&dev_2504",
            "HardwareInformation.qwMemorySize": (12 * 1024**3).to_bytes(8, "little"),
        },
        {"DriverDesc": "Microsoft Remote Display Adapter", "MatchingDeviceId": "root\\display"},
        {},
    ]
    (gpu,) = read_adapters(lambda: iter(adapters))
    assert (gpu.vendor, gpu.name, gpu.device_id, gpu.total) == (
        "nvidia",
        "NVIDIA GeForce RTX 3060",
        0x2504,
        12 * 1024**3,
    )


# --- NVML ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(nvml_stub: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tell the mock library, loaded into this very process, what to say."""

    def tell(*arguments: Any, **options: Any) -> str:
        for name, value in nvml_stub.env(*arguments, **options).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            elif name.startswith("NVML_STUB_"):
                monkeypatch.setenv(name, value)
        return str(nvml_stub.path)

    return tell


def test_nvml_and_the_bus_name_the_same_card(build: Any, pci: Any, nvml: Any, nvml_stub: Any) -> None:
    library = nvml([nvml_stub.h200])
    card = nvml_stub.h200
    address = pci_address(card.pci)
    assert address is not None
    root = build(pci(address, "0x030200", "0x10de", "0x2335", "nvidia"))
    hardware = snapshot(root, {"ANYTORCH_NVML_LIBRARY": library})
    (gpu,) = hardware.gpus
    assert (gpu.name, gpu.uuid, gpu.index, gpu.capability, gpu.minor) == (card.name, card.uuid, 0, (9, 0), 0)
    assert (gpu.pci, gpu.driver, gpu.sources) == (address, "nvidia", ("pci", "nvml"))
    assert gpu.total and gpu.free and gpu.free <= gpu.total
    assert gpu.integrated is False
    assert (hardware.nvidia.nvml_code, hardware.nvidia.driver, hardware.nvidia.cuda) == (0, nvml_stub.driver, (13, 0))


def test_nvml_finds_cards_where_there_is_no_bus(build: Any, nvml: Any) -> None:
    library = nvml()
    hardware = snapshot(build({"/dev/": ""}), {"ANYTORCH_NVML_LIBRARY": library})
    assert [gpu.index for gpu in hardware.gpus_of("nvidia")] == [0, 1]


def test_memory_not_supported_means_unified(nvml: Any, nvml_stub: Any, build: Any) -> None:
    library = nvml([nvml_stub.gb10])
    assert [gpu.unified for gpu in read_nvml(library).gpus] == [True]
    (gpu,) = snapshot(build({"/dev/": ""}), {"ANYTORCH_NVML_LIBRARY": library}).gpus
    assert (gpu.total, gpu.free, gpu.unified, gpu.integrated) == (None, None, True, True)


@pytest.mark.parametrize(("code", "words"), [(18, "Driver/library version mismatch"), (9, "Driver Not Loaded")])
def test_nvml_that_fails_gives_its_code_and_words(nvml: Any, code: int, words: str) -> None:
    report = read_nvml(nvml(init=code))
    assert (report.code, report.error, report.gpus) == (code, words, ())


def test_a_library_that_is_none(tmp_path: Any) -> None:
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_bytes(b"not a library")
    for library in (str(broken), "/nowhere/libnvidia-ml.so.1"):
        report = read_nvml(library)
        assert report.code is None and report.error and not report.gpus


def test_a_library_without_nvml_in_it() -> None:
    report = read_nvml("libm.so.6")
    assert report.code is None and "nvmlInit_v2" in (report.error or "")


def test_a_recorded_root_never_loads_its_own_library(build: Any) -> None:
    hardware = snapshot(build({"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": b"\x7fELF"}))
    assert hardware.nvidia.nvml_found and hardware.nvidia.nvml_code is None and hardware.nvidia.nvml_error is None
