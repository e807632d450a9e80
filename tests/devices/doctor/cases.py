"""Every diagnosis with a machine on which it must fire and a near miss on which it must stay silent.

The messages are recorded ones; their source stands beside them. "devices.md" is the project's research page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from anytorch.devices.types import BackendReport, DeviceReport, Facts, Level
from anytorch.probe.facts import EntryPoint, Gpu

from .build import (
    ARC,
    EGL_ICD,
    GIB,
    GLX_ICD,
    H200,
    H200_ADAPTER,
    LAVAPIPE_ICD,
    LLVMPIPE,
    RADEON_ICD,
    RX7900,
    amd_box,
    apple_box,
    ascend_box,
    change,
    cpu_box,
    cuda_box,
    intel_box,
    node,
    untried,
    wheel,
)


class Case(NamedTuple):
    fires: Facts
    silent: Facts  # a near miss
    text: str  # the decisive fact, in the reason's text
    fix: str  # the decisive part of the command
    backends: tuple[str, ...] = ()
    level: Level | None = None  # when it differs from the diagnosis' own


INDEX = "https://download.pytorch.org/whl"
LOADER = "/usr/lib/x86_64-linux-gnu/libvulkan.so.1"
RTX5090 = replace(H200, name="NVIDIA GeForce RTX 5090", device_id=0x2B85, capability=(12, 0), total=32 * GIB)
V100 = replace(H200, name="Tesla V100-SXM2-16GB", device_id=0x1DB1, capability=(7, 0), total=16 * GIB)
T4 = replace(H200, name="Tesla T4", device_id=0x1EB8, capability=(7, 5), total=15 * GIB)
GTX1080 = replace(H200, name="NVIDIA GeForce GTX 1080", device_id=0x1B80, capability=(6, 1), total=8 * GIB)
UHD630 = Gpu("intel", "Intel UHD Graphics 630", "0000:00:02.0", 0x3E92, "i915", integrated=True, sources=("pci",))
RAPHAEL = replace(
    RX7900, name="AMD Raphael", pci="0000:0b:00.0", device_id=0x164E, arch="gfx1036", integrated=True, index=1
)
SECOND = replace(H200, pci="0000:02:00.0", uuid="GPU-bbbbbbbb-0000-0000-0000-000000000000", index=1)
VM_CARD = replace(H200, driver="vfio-pci")
ROCM_TORCH = wheel("rocm7.2")
GB10 = replace(H200, name="NVIDIA GB10", capability=(12, 1), total=None, free=None, integrated=None)

# devices.md §0.2, measured: torch 2.13.0+cpu with torch_npu 2.13.0 and no CANN.
NO_CANN = (
    "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0. ← "
    "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
)
# pytorch/c10/cuda/CUDAFunctions.cpp, as printed in pytorch#88639.
UNKNOWN_ERROR = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
# accelerate#4226: the start of the message of every MPS out-of-memory error.
MPS_OOM = "RuntimeError: MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes)"
# The dynamic loader's own words for a library that is not there.
NO_GOMP = "ImportError: libgomp.so.1: cannot open shared object file: No such file or directory"
NO_CUDNN = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
NO_KERNEL = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
# vulkan-on-headless-nvidia.md
HEADLESS = "Could not get 'vkCreateInstance' via 'vk_icdGetInstanceProcAddr'"
WINDOWS_CRASH = "exit status 3221225477 (0xC0000005)"  # pytorch#157775


def cuinit(code: int) -> Facts:
    return change(
        cuda_box(), child={"cuinit_code": code}, report=BackendReport("cuda", code="no-device", error=UNKNOWN_ERROR)
    )


def cuda_fails(code: str, error: str) -> Facts:
    return change(cuda_box(), report=BackendReport("cuda", code=code, error=error))


def with_gpus(facts: Facts, *gpus: Gpu) -> Facts:
    return change(facts, hardware={"gpus": gpus})


def webgpu(facts: Facts, *adapters: object, icds: tuple[object, ...] = (), error: str = "") -> Facts:
    """wgpu and the Vulkan loader are installed, and the child listed these adapters."""
    report = BackendReport("webgpu", code="no-device", error=error, facts={"adapters": list(adapters)})
    return change(
        facts, packages={"wgpu": "0.32.0"}, graphics={"vulkan_loader": LOADER, "vulkan_icds": icds}, report=report
    )


def plain_amd() -> Facts:
    """An AMD card that no ROCm wheel covers (gfx803), with the CPU wheel: WebGPU is the way to it."""
    card = replace(RX7900, name="Radeon RX 580", device_id=0x67DF, arch="gfx803", total=8 * GIB)
    return change(cpu_box(), hardware={"gpus": (card,)}, packages={"wgpu": "0.32.0"})


CASES: dict[str, Case] = {
    # --- this Python
    "torch-missing": Case(
        untried(change(cuda_box(), hardware={"torch": None})),
        cuda_box(),
        "torch is not installed",
        f"torch==2.13.0+cu130 --index-url {INDEX}/cu130",
        ("cuda", "rocm", "npu", "xpu", "mps", "webgpu", "cpu"),
    ),
    "torch-import-failed": Case(
        change(cpu_box(), import_error=NO_GOMP, version=None),
        change(ascend_box(), autoload_error=NO_CANN),
        "libgomp.so.1",
        "sudo apt install libgomp1",
        ("cuda", "rocm", "npu", "xpu", "mps", "webgpu", "cpu"),
    ),
    "pynvml-twice": Case(
        change(cuda_box(), packages={"pynvml": "13.0.1"}),
        change(cuda_box(), packages={"pynvml": "11.5.3", "nvidia-ml-py": None}),
        "pynvml 13.0.1 and nvidia-ml-py 13.615.71",
        "pip install nvidia-ml-py",
    ),
    "two-torches": Case(
        change(
            cpu_box(), hardware={"torch": wheel("cpu", others=("/home/u/.local/lib/python3.11/site-packages/torch",))}
        ),
        cpu_box(),
        "/home/u/.local/lib/python3.11/site-packages/torch",
        "PYTHONNOUSERSITE=1",
    ),
    "torchvision-mismatch": Case(
        change(cuda_box(), packages={"torchvision": "0.28.0+cpu"}),
        change(cuda_box(), packages={"torchvision": "0.28.0+cu130", "torchaudio": "2.11.0+cu130"}),
        "torchvision 0.28.0+cpu was not built for torch 2.13.0+cu130",
        f"torchvision==0.28.0+cu130' --index-url {INDEX}/cu130",
    ),
    "plugin-broken": Case(
        change(
            cpu_box(),
            hardware={
                "packages": replace(
                    cpu_box().hardware.packages,
                    entry_points=(EntryPoint("anytorch.backends", "toy", "toy:Toy", "anytorch-toy"),),
                )
            },
            settings={"plugin_errors": {"toy": "ModuleNotFoundError: No module named 'toy'"}},
        ),
        change(cpu_box(), settings={"plugin_errors": {}}),
        "No module named 'toy'",
        "anytorch-toy",
        ("toy",),
    ),
    "backend-crashed": Case(
        cuda_fails("crashed", WINDOWS_CRASH),
        cuda_fails("failed", NO_KERNEL),
        "0xC0000005",
        "ANYTORCH_BACKEND=cpu",
        ("cuda",),
    ),
    "backend-timed-out": Case(
        cuda_fails("timed-out", "no answer after 120 s"),
        cuda_fails("crashed", WINDOWS_CRASH),
        "no answer after 120 s",
        "ANYTORCH_PROBE_TIMEOUT=600",
        ("cuda",),
    ),
    "backend-failed": Case(
        cuda_fails("failed", NO_KERNEL),
        change(apple_box(), report=BackendReport("mps", code="failed", error=MPS_OOM)),
        "no kernel image is available",
        "export ANYTORCH_BACKEND=cpu",
        ("cuda",),
    ),
    "reader-failed": Case(
        change(
            cpu_box(), hardware={"problems": ("pci: PermissionError: [Errno 13] Permission denied: '/sys/bus/pci'",)}
        ),
        cpu_box(),
        "Permission denied",
        "anytorch --json info",
    ),
    # --- wheel against hardware
    "cpu-only-wheel": Case(
        change(cuda_box(), hardware={"torch": wheel("cpu")}),
        change(cuda_box(), hardware={"torch": wheel("cpu"), "gpus": (VM_CARD,)}),
        "torch 2.13.0+cpu is the CPU-only build",
        f"pip install torch==2.13.0+cu130 --index-url {INDEX}/cu130",
        ("cuda",),
    ),
    "wrong-wheel": Case(
        change(amd_box(), hardware={"torch": wheel("cu130")}),
        change(cpu_box(), hardware={"gpus": (UHD630,)}),  # an Intel GPU that no wheel drives
        "built for NVIDIA GPUs",
        f"pip install torch==2.13.0+rocm7.2 --index-url {INDEX}/rocm7.2",
        ("rocm",),
    ),
    "driver-too-old": Case(
        # H20 with driver 570.133.20 and a cu13 wheel: "found version 12080"
        change(cuda_box(), nvidia={"driver": "570.133.20", "kernel_version": "570.133.20"}),
        change(
            cuda_box(),
            nvidia={
                "driver": "570.133.20",
                "kernel_version": "570.133.20",
                "libcuda": "/usr/local/cuda/compat/libcuda.so.1",
            },
        ),
        "570.133.20 is too old for torch 2.13.0+cu130: CUDA 13.0 needs 580",
        f"torch==2.13.0+cu126 --index-url {INDEX}/cu126",
        ("cuda",),
    ),
    "card-not-covered": Case(
        untried(with_gpus(cuda_box(), V100)),
        untried(with_gpus(change(cuda_box(), hardware={"torch": wheel("cu126")}), V100)),
        "compute capability 7.0",
        f"torch==2.13.0+cu126 --index-url {INDEX}/cu126",
        ("cuda",),
    ),
    "gfx-not-in-wheel": Case(
        change(amd_box(), hardware={"gpus": (replace(RX7900, arch="gfx1151"),), "torch": wheel("rocm7.1")}),
        change(amd_box(), hardware={"gpus": (replace(RX7900, arch="gfx90a:sramecc+:xnack-"),)}),
        "gfx1151",
        f"torch==2.13.0+rocm7.2 --index-url {INDEX}/rocm7.2",
        ("rocm",),
    ),
    "container-without-gpu": Case(
        change(cuda_box(), machine={"container": "docker"}, hardware={"nodes": ()}),
        change(cuda_box(), machine={"container": "docker"}),
        "docker container has no /dev/nvidia* node",
        "docker run --gpus all",
        ("cuda",),
    ),
    # --- the NVIDIA driver
    "nvidia-module-not-loaded": Case(
        change(
            cuda_box(),
            nvidia={"kernel_version": None, "nvml_code": 9, "driver": None},
            hardware={"nodes": (), "gpus": (replace(H200, driver="nouveau"),)},
        ),
        change(
            cuda_box(),
            nvidia={"kernel_version": None, "nvml_code": 9, "driver": None},
            hardware={"nodes": ()},
            machine={"container": "docker"},
        ),
        "nouveau holds NVIDIA H200",
        "blacklist nouveau",
        ("cuda",),
    ),
    "nvml-mismatch": Case(
        change(cuda_box(), nvidia={"nvml_code": 18, "nvml_error": "Driver/library version mismatch"}),
        change(cuda_box(), nvidia={"nvml_code": 9}),
        "kernel module (580.159.04) differ",
        "sudo reboot",
        ("cuda",),
    ),
    "driver-library-missing": Case(
        change(
            cuda_box(),
            machine={"container": "docker"},
            nvidia={"nvml_found": False, "nvml_code": None, "libcuda": None, "driver": None},
        ),
        change(
            cuda_box(),
            machine={"container": "docker"},
            nvidia={"nvml_found": False, "nvml_code": None, "libcuda": None, "driver": None},
            hardware={"nodes": ()},
        ),
        "libnvidia-ml.so.1 is not found",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ("cuda",),
    ),
    "uvm-broken": Case(
        change(cuinit(999), hardware={"nodes": (node("/dev/nvidia0"), node("/dev/nvidiactl"))}),
        change(cuda_box(), hardware={"nodes": (node("/dev/nvidia0"), node("/dev/nvidiactl"))}),
        "/dev/nvidia-uvm does not exist",
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm",
        ("cuda",),
    ),
    "fabric-manager": Case(
        change(cuinit(802), nvidia={"fabric_manager": False}),
        change(cuda_box(), nvidia={"fabric_manager": False}),
        "Fabric Manager is not running",
        "nvidia-fabricmanager",
        ("cuda",),
    ),
    "driver-library-conflict": Case(
        change(cuinit(804), nvidia={"libcuda": "/usr/local/cuda/compat/libcuda.so.1"}),
        change(cuda_box(), nvidia={"libcuda": "/usr/local/cuda/compat/libcuda.so.1"}),
        "/usr/local/cuda/compat/libcuda.so.1 is a forward-compatibility library",
        "cuda-compat",
        ("cuda",),
    ),
    "cuda-stub-library": Case(
        change(cuinit(34), nvidia={"libcuda": "/usr/local/cuda/lib64/stubs/libcuda.so.1"}),
        change(cuda_box(), env={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"}),
        "/usr/local/cuda/lib64/stubs/libcuda.so.1",
        "grep -v /stubs",
        ("cuda",),
    ),
    "cuda-init-failed": Case(
        cuinit(46),
        change(cuinit(100), env={"CUDA_VISIBLE_DEVICES": ""}),
        "cuInit returned 46 (CUDA_ERROR_DEVICE_UNAVAILABLE)",
        "dmesg",
        ("cuda",),
    ),
    "wsl-driver": Case(
        change(cuda_box(), machine={"wsl": True, "wsl_libraries_first": False}),
        change(cuda_box(), machine={"wsl": True, "wsl_libraries_first": True}),
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1 is found before /usr/lib/wsl/lib",
        "/usr/lib/wsl/lib",
    ),
    "unified-memory": Case(
        with_gpus(cuda_box(), GB10),
        with_gpus(
            cuda_box(), replace(H200, total=128 * GIB)
        ),  # a card of its own that happens to be as large as the RAM
        "NVIDIA GB10 at 0000:01:00.0 shares the system's memory: 100.0 GiB",
        "anytorch info",
    ),
    "bf16-emulated": Case(
        change(with_gpus(cuda_box(), T4), settings={"dtype": "bfloat16"}),
        change(with_gpus(cuda_box(), T4), settings={"dtype": "float16"}),
        "Tesla T4 at 0000:01:00.0 (compute capability 7.5)",
        "torch.float16",
    ),
    "compile-needs-volta": Case(
        with_gpus(change(cuda_box(), hardware={"torch": wheel("cu126")}), GTX1080),
        with_gpus(change(cuda_box(), hardware={"torch": wheel("cu126")}), V100),
        "has 6.1",
        "TORCH_COMPILE_DISABLE=1",
    ),
    # --- masks
    "mask-hides-devices": Case(
        change(cuda_box(), env={"CUDA_VISIBLE_DEVICES": "-1"}),
        change(with_gpus(cuda_box(), H200, SECOND), env={"CUDA_VISIBLE_DEVICES": "1"}),
        "CUDA_VISIBLE_DEVICES='-1' hides the only cuda device",
        "unset CUDA_VISIBLE_DEVICES",
        ("cuda",),
    ),
    "two-amd-masks": Case(
        change(amd_box(), env={"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}),
        change(amd_box(), env={"HIP_VISIBLE_DEVICES": "0"}),
        "ROCR_VISIBLE_DEVICES='0'",
        "unset ROCR_VISIBLE_DEVICES",
    ),
    "different-cards-order": Case(
        with_gpus(cuda_box(), H200, replace(SECOND, name="Tesla T4")),
        change(with_gpus(cuda_box(), H200, replace(SECOND, name="Tesla T4")), env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        "NVIDIA H200, Tesla T4",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ),
    "mask-changed": Case(
        change(cuda_box(), child={"mask_at_import": "0", "mask_now": "1", "cuda_initialized_before": True}),
        change(cuda_box(), child={"mask_at_import": "0", "mask_now": "1", "cuda_initialized_before": False}),
        "was '0' when CUDA started and is '1' now",
        "CUDA_VISIBLE_DEVICES=1 python",
    ),
    "mig-mask": Case(
        change(cuda_box(), env={"CUDA_VISIBLE_DEVICES": "MIG-3f8a2b1c-0000-0000-0000-000000000000"}),
        change(cuda_box(), env={"CUDA_VISIBLE_DEVICES": "GPU-aaaaaaaa"}),
        "MIG-3f8a2b1c",
        "spawn",
    ),
    "fork-after-init": Case(
        change(cuda_box(), child={"cuda_initialized_before": True}),
        change(cuda_box(), child={"cuda_initialized_before": True, "start_method": "spawn"}),
        "would fork",
        "spawn",
    ),
    "cuda-spoofed": Case(
        change(ascend_box(), child={"cuda_spoofed": True}),
        ascend_box(),
        "npu pretends to be it",
        "transfer_to_npu",
    ),
    # --- AMD
    "no-permission": Case(
        change(
            amd_box(),
            hardware={"nodes": (node("/dev/kfd", False, False, "render", 109), node("/dev/dri/renderD128"))},
        ),
        change(  # another card's node is closed, one is open
            amd_box(),
            hardware={
                "nodes": (
                    node("/dev/kfd"),
                    node("/dev/dri/renderD128"),
                    node("/dev/dri/renderD129", False, False, "render"),
                )
            },
        ),
        "/dev/kfd, which belongs to group render (gid 109)",
        "sudo usermod -aG render $USER",
        ("rocm",),
    ),
    "kfd-missing": Case(
        change(amd_box(), hardware={"nodes": (node("/dev/dri/renderD128"),), "gpus": (replace(RX7900, driver=None),)}),
        change(amd_box(), hardware={"nodes": (node("/dev/dri/renderD128"),), "torch": wheel("cpu")}),
        "/dev/kfd is not",
        "sudo modprobe amdgpu",
        ("rocm",),
    ),
    "amd-two-gpus": Case(
        with_gpus(amd_box(), RX7900, RAPHAEL),
        change(with_gpus(amd_box(), RX7900, RAPHAEL), env={"HIP_VISIBLE_DEVICES": "0"}),
        "AMD Raphael at 0000:0b:00.0 (integrated) is beside Radeon RX 7900 XTX",
        "HIP_VISIBLE_DEVICES=0",
    ),
    # --- Intel
    "level-zero-missing": Case(
        change(intel_box(), graphics={"level_zero_driver": None, "level_zero_code": None}),
        change(intel_box(), graphics={"level_zero_driver": None}, hardware={"torch": wheel("cpu")}),
        "libze_intel_gpu.so",
        "sudo apt install libze-intel-gpu1",
        ("xpu",),
    ),
    "level-zero-failed": Case(
        # ZE_RESULT_ERROR_UNINITIALIZED in ze_api.h
        change(intel_box(), graphics={"level_zero_code": 0x78000001}),
        change(intel_box(), graphics={"level_zero_code": 0x78000001, "level_zero_driver": None}),
        "0x78000001",
        "libze-intel-gpu1",
        ("xpu",),
    ),
    "ipex-installed": Case(
        change(intel_box(), packages={"intel-extension-for-pytorch": "2.8.0"}),
        change(intel_box(), packages={"intel-openmp": "2025.3.0"}),
        "intel-extension-for-pytorch 2.8.0",
        "pip uninstall -y intel-extension-for-pytorch",
    ),
    # --- Huawei
    "autoload-failed": Case(
        change(ascend_box(), autoload_error=NO_CANN),
        change(ascend_box(), report=BackendReport("npu", code="failed", error="RuntimeError: Initialize:torch_npu")),
        "torch-npu cannot load: ImportError: libhccl.so: cannot open shared object file",
        "set_env.sh",
        ("npu",),
    ),
    "cann-not-loaded": Case(
        change(ascend_box(), env={"ASCEND_HOME_PATH": None}, report=BackendReport("npu", code="failed", error=NO_CANN)),
        change(ascend_box(), env={"ASCEND_HOME_PATH": None}),  # and yet the child used the NPU
        "torch_npu 2.13.0",
        "set_env.sh",
    ),
    "npu-wheel-conflict": Case(
        change(ascend_box(), packages={"torch-npu": "2.12.0"}),
        change(ascend_box(), packages={"torch-npu": "2.13.0.post1"}),
        "torch_npu 2.12.0 is not made for torch 2.13.0+cpu",
        "'torch-npu==2.13.*'",
        ("npu",),
    ),
    # --- Apple
    "rosetta": Case(
        change(apple_box(), machine={"rosetta": True, "arch": "x86_64"}),
        change(apple_box(), machine={"arch": "x86_64"}),  # a Mac with an Intel processor
        "x86_64 build translated by Rosetta",
        "osx-arm64",
        ("mps",),
    ),
    "mps-unavailable": Case(
        change(apple_box(), machine={"macos": "13.6"}, child={"mps_available": False}),
        change(apple_box(), machine={"macos": "13.6"}),
        "macOS 13.6 is too old",
        "softwareupdate",
        ("mps",),
    ),
    "mps-fallback-unset": Case(
        change(apple_box(), env={"PYTORCH_ENABLE_MPS_FALLBACK": None}),
        change(apple_box(), env={"PYTORCH_ENABLE_MPS_FALLBACK": None}, child={"mps_available": False}),
        "PYTORCH_ENABLE_MPS_FALLBACK is not set",
        "export PYTORCH_ENABLE_MPS_FALLBACK=1",
    ),
    # --- graphics
    "wgpu-missing": Case(
        change(plain_amd(), packages={"wgpu": None}),
        change(cuda_box(), packages={"wgpu": None}),
        "Radeon RX 580",
        "pip install 'anytorch[webgpu]'",
    ),
    "vulkan-loader-missing": Case(
        plain_amd(),
        change(plain_amd(), packages={"wgpu": None}),
        "libvulkan.so.1",
        "sudo apt install libvulkan1 mesa-vulkan-drivers",
        ("webgpu",),
    ),
    "vulkan-driver-missing": Case(
        change(plain_amd(), graphics={"vulkan_loader": LOADER, "vulkan_icds": (replace(RADEON_ICD, found=False),)}),
        change(plain_amd(), graphics={"vulkan_loader": LOADER, "vulkan_icds": (RADEON_ICD,)}),
        "libvulkan_radeon.so, which is missing",
        "sudo apt install mesa-vulkan-drivers",
        ("webgpu",),
    ),
    "software-vulkan-only": Case(
        webgpu(plain_amd(), LLVMPIPE, icds=(LAVAPIPE_ICD,)),
        webgpu(cuda_box(), H200_ADAPTER, LLVMPIPE, icds=(EGL_ICD, LAVAPIPE_ICD)),
        "llvmpipe",
        "mesa-vulkan-drivers",
    ),
    "headless-nvidia-vulkan": Case(
        webgpu(
            change(cuda_box(), settings={"backend": "vulkan"}), LLVMPIPE, icds=(GLX_ICD, LAVAPIPE_ICD), error=HEADLESS
        ),
        webgpu(change(cuda_box(), settings={"backend": "vulkan"}), H200_ADAPTER, icds=(GLX_ICD,)),
        "libGLX_nvidia",
        "libEGL_nvidia.so.0",
        ("webgpu",),
    ),
    # --- CPU and memory
    "cpu-quota": Case(
        change(cpu_box(), cpu={"quota": 2.5}),
        change(cpu_box(), cpu={"quota": 2.5}, child={"threads": 2}),
        "may use 2.5 CPUs, but torch.get_num_threads() is 16",
        "OMP_NUM_THREADS=2",
    ),
    "memory-limit": Case(
        change(cpu_box(), memory={"limit": 8 * GIB, "limit_used": GIB}),
        change(cpu_box(), memory={"limit": 128 * GIB, "limit_used": GIB}),
        "8.0 GiB of the machine's 128.0 GiB",
        "--memory 128g",
    ),
    "hybrid-cpu": Case(
        # i9-13900H of home-ops#9050: 6 performance and 8 efficiency cores
        change(
            cpu_box(),
            cpu={"logical": 20, "physical": 14, "affinity": 20, "performance_cores": 6, "efficiency_cores": 8},
        ),
        change(
            cpu_box(),
            cpu={"logical": 20, "physical": 14, "affinity": 20, "performance_cores": 6, "efficiency_cores": 8},
            child={"threads": 6},
        ),
        "16 threads, but only 6",
        "OMP_NUM_THREADS=6",
    ),
    "slow-half-on-cpu": Case(
        change(cpu_box(), settings={"cpu_dtype": "bfloat16"}),
        change(cpu_box(), settings={"cpu_dtype": "bfloat16"}, child={"mkldnn_bf16": True}),
        "bfloat16 is chosen for the CPU, but AMD EPYC",
        "ANYTORCH_CPU_DTYPE=float32",
    ),
    "small-shm": Case(
        change(cpu_box(), machine={"container": "docker"}, memory={"shm": 64 * 2**20}),
        change(cpu_box(), machine={"container": "docker"}, memory={"shm": 64 * 2**20}, cpu={"quota": 1.0}),
        "64 MiB",
        "docker run --shm-size=8g",
    ),
    "too-little-memory": Case(
        with_gpus(cuda_box(), replace(H200, name="NVIDIA T400", total=2 * GIB)),
        with_gpus(cuda_box(), replace(H200, name="NVIDIA T400 4GB", total=4 * GIB)),
        "NVIDIA T400 has 2.0 GiB, less than the 4 GiB",
        "smaller batch",
    ),
    # --- last
    "unexplained": Case(
        change(cuda_box(), report=BackendReport("cuda", code="no-device", error="torch.cuda.is_available() is False")),
        change(  # the mask explains it
            cuda_box(),
            env={"CUDA_VISIBLE_DEVICES": ""},
            report=BackendReport("cuda", code="no-device", error="torch.cuda.is_available() is False"),
        ),
        "torch finds no cuda device",
        "doctor.json",
        ("cuda",),
    ),
}

# More near misses and further branches of a diagnosis: (code, facts, in the text or None for silence, level or None).
MORE: tuple[tuple[str, Facts, str | None, Level | None], ...] = (
    ("torch-import-failed", change(cuda_box(), import_error=NO_CUDNN), "libcudnn.so.9", Level.ERROR),
    (
        "torchvision-mismatch",
        change(cuda_box(), packages={"torchvision": "0.26.0"}),
        "torchvision 0.26.0",
        Level.WARNING,
    ),
    ("torchvision-mismatch", change(cuda_box(), packages={"torchvision": "0.28.1"}), None, None),
    ("wrong-wheel", change(intel_box(), hardware={"torch": wheel("cpu")}), "CPU-only build", Level.ERROR),
    ("wrong-wheel", change(cuda_box(), hardware={"torch": wheel("xpu")}), "built for Intel GPUs", Level.ERROR),
    ("wrong-wheel", change(cuda_box(), hardware={"gpus": (H200, RX7900)}), None, None),
    ("wrong-wheel", change(amd_box(), hardware={"gpus": (RAPHAEL,), "torch": wheel("cpu")}), None, None),
    ("driver-too-old", untried(change(cuda_box(), nvidia={"driver": "580.65.06"})), None, None),
    ("card-not-covered", with_gpus(cuda_box(), V100, SECOND), "Tesla V100", Level.WARNING),
    (
        "card-not-covered",
        untried(with_gpus(change(cuda_box(), hardware={"torch": wheel("cu126")}), RTX5090)),
        "12.0",
        None,
    ),
    (
        "card-not-covered",
        untried(with_gpus(change(cuda_box(), hardware={"torch": wheel("cu128", "2.10.0")}), V100)),
        None,
        None,
    ),
    (
        "card-not-covered",
        change(with_gpus(cuda_box(), RTX5090), child={"arch_list": ["sm_90", "compute_90"]}),
        None,
        None,
    ),
    (
        "card-not-covered",
        change(with_gpus(cuda_box(), RTX5090), child={"arch_list": ["sm_90"]}),
        "RTX 5090",
        Level.ERROR,
    ),
    (
        "gfx-not-in-wheel",
        change(with_gpus(amd_box(), replace(RX7900, arch="gfx1103")), env={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),
        "HSA_OVERRIDE_GFX_VERSION=11.0.0",
        Level.WARNING,
    ),
    ("gfx-not-in-wheel", with_gpus(amd_box(), RX7900, RAPHAEL), "gfx1036", Level.WARNING),
    (
        "gfx-not-in-wheel",
        change(with_gpus(amd_box(), replace(RX7900, arch="gfx1103")), child={"arch_list": ["gfx11-generic"]}),
        None,
        None,
    ),
    (
        "container-without-gpu",
        change(amd_box(), machine={"container": "podman"}, hardware={"nodes": ()}),
        "/dev/kfd",
        None,
    ),
    (
        "container-without-gpu",
        change(cpu_box(), machine={"container": "docker"}, hardware={"gpus": (RAPHAEL, UHD630)}),
        None,
        None,
    ),
    (
        "nvidia-module-not-loaded",
        change(cuda_box(), nvidia={"kernel_version": None, "nvml_code": 9}, hardware={"nodes": ()}),
        "kernel module is not loaded",
        Level.ERROR,
    ),
    (
        "driver-library-missing",
        change(cuda_box(), nvidia={"nvml_found": False, "nvml_code": None}),  # libcuda is there: CUDA works
        "libnvidia-ml.so.1",
        Level.WARNING,
    ),
    ("driver-library-conflict", cuinit(803), "another version than the loaded kernel module", Level.ERROR),
    ("uvm-broken", cuinit(999), "after a suspend", Level.ERROR),
    ("cuda-init-failed", cuinit(100), "CUDA_ERROR_NO_DEVICE", Level.ERROR),
    ("cuda-init-failed", cuinit(999), None, None),
    ("mask-hides-devices", change(cuda_box(), env={"CUDA_VISIBLE_DEVICES": "0,0"}), "named twice", Level.ERROR),
    (
        "mask-hides-devices",
        change(cuda_box(), env={"CUDA_VISIBLE_DEVICES": "0,7"}),
        "device 7 does not exist",
        Level.WARNING,
    ),
    ("mask-hides-devices", change(cuda_box(), env={"CUDA_VISIBLE_DEVICES": "MIG-x"}), None, None),
    ("mask-hides-devices", change(amd_box(), env={"HIP_VISIBLE_DEVICES": "3"}), "device 3 does not exist", Level.ERROR),
    ("mask-hides-devices", change(ascend_box(), env={"ASCEND_RT_VISIBLE_DEVICES": "-1"}), "npu device", Level.ERROR),
    ("mask-hides-devices", change(cpu_box(), env={"CUDA_VISIBLE_DEVICES": ""}), None, None),
    (
        "no-permission",
        change(
            intel_box(),
            machine={"container": "docker"},
            hardware={"nodes": (node("/dev/dri/renderD128", True, False, None, 44),)},
        ),
        "(gid 44)",
        Level.ERROR,
    ),
    ("npu-wheel-conflict", change(ascend_box(), hardware={"torch": wheel("cu130")}), "built for cuda", Level.ERROR),
    ("mps-unavailable", change(apple_box(), child={"mps_available": False}), "virtual machine", Level.ERROR),
    (
        "mps-unavailable",
        change(apple_box(), report=BackendReport("mps", code="failed", error=MPS_OOM)),
        "MPS backend out of memory",
        Level.ERROR,
    ),
    # A working vendor device makes a missing Vulkan a note; asking for WebGPU makes it an error.
    ("vulkan-loader-missing", change(cuda_box(), packages={"wgpu": "0.32.0"}), "libvulkan.so.1", Level.NOTE),
    (
        "vulkan-loader-missing",
        change(cuda_box(), packages={"wgpu": "0.32.0"}, settings={"backend": "webgpu:0"}),
        "libvulkan.so.1",
        Level.ERROR,
    ),
    ("vulkan-loader-missing", change(apple_box(), packages={"wgpu": "0.32.0"}), None, None),
    ("software-vulkan-only", webgpu(cpu_box(), LLVMPIPE, icds=(LAVAPIPE_ICD,)), "llvmpipe", Level.NOTE),
    ("vulkan-driver-missing", webgpu(plain_amd(), icds=(LAVAPIPE_ICD,)), "Radeon RX 580", Level.ERROR),
    ("headless-nvidia-vulkan", webgpu(cuda_box(), LLVMPIPE, icds=(GLX_ICD, EGL_ICD)), None, None),
    (
        "cpu-quota",
        untried(change(cpu_box(), cpu={"quota": 0.5})),
        "0.5 CPUs, but torch will see 16 CPUs",
        Level.NOTE,  # nobody has said how many threads there will be
    ),
    ("cpu-quota", change(cpu_box(), cpu={"quota": 2.0}), "torch.get_num_threads() is 16", Level.WARNING),
    ("memory-limit", change(cpu_box(), memory={"limit": 8 * GIB}), "8.0 GiB of", Level.NOTE),
    ("memory-limit", change(cpu_box(), memory={"limit": GIB}), "1.0 GiB of", Level.WARNING),
    ("backend-failed", change(cpu_box(), report=BackendReport("cpu", code="failed", error="x")), "cpu is", Level.ERROR),
    ("cpu-quota", untried(change(cpu_box(), cpu={"quota": 4.0}, env={"OMP_NUM_THREADS": "4"})), None, None),
    ("hybrid-cpu", untried(apple_box()), None, None),
    (
        "slow-half-on-cpu",
        untried(change(cpu_box(), settings={"cpu_dtype": "bfloat16"}, cpu={"features": frozenset({"avx512_bf16"})})),
        None,
        None,
    ),
    ("slow-half-on-cpu", untried(change(cpu_box(), settings={"cpu_dtype": "float16"})), "float16", Level.WARNING),
    (
        "too-little-memory",
        change(
            cpu_box(),
            report=BackendReport("webgpu", (DeviceReport(0, "Mali-G57", total=GIB),)),
            memory={"total": 16 * GIB},
        ),
        "Mali-G57 has 1.0 GiB",
        Level.NOTE,
    ),
    ("too-little-memory", change(apple_box(), memory={"total": 4 * GIB}), "Apple M2 Pro has 4.0 GiB", Level.NOTE),
    ("wgpu-missing", with_gpus(cpu_box(), UHD630), "Intel UHD Graphics 630", Level.NOTE),
    ("wgpu-missing", with_gpus(intel_box(), ARC), None, None),
    (
        "wgpu-missing",
        change(cuda_box(), hardware={"torch": wheel("cpu")}),
        None,
        None,
    ),  # the CUDA wheel is better advice
    ("wgpu-missing", change(cpu_box(), settings={"backend": "webgpu"}), "you asked for webgpu", Level.NOTE),
    # Graphics units that the wheel beside them cannot drive.
    ("wrong-wheel", change(cuda_box(), hardware={"torch": wheel("xpu"), "gpus": (H200, UHD630)}), "Intel GPUs", None),
    (
        "wrong-wheel",
        change(cuda_box(), hardware={"torch": wheel("rocm7.2"), "gpus": (H200, RAPHAEL)}),
        "AMD GPUs",
        None,
    ),
    (
        "unexplained",
        change(
            intel_box(),
            hardware={"gpus": (UHD630,)},
            report=BackendReport("xpu", code="no-device", error="torch.xpu.is_available() is False"),
        ),
        None,
        None,
    ),
    (
        "two-torches",
        change(cpu_box(), hardware={"torch": wheel("cpu", others=("/opt/conda/torch",))}),
        "/opt/conda",
        None,
    ),
)
