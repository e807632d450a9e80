"""The environment variables that hide, reorder or steer devices. The probe keeps those that are set."""

from __future__ import annotations

from collections.abc import Mapping

from anytorch.probe.tree import clean

NAMES = (
    # NVIDIA
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_HOME",
    "CUDA_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    # AMD: ROCR_ is applied below HIP_, which numbers what ROCR_ has left
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
    "HSA_ENABLE_SDMA",
    "ROCM_PATH",
    "ROCM_HOME",
    # Huawei
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    # Intel
    "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY",
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
    "ONEAPI_DEVICE_SELECTOR",
    "SYCL_DEVICE_FILTER",
    # Apple
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_MPS_LOW_WATERMARK_RATIO",
    # threads
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    # torch
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_CUDA_ARCH_LIST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    # loaders
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "DYLD_LIBRARY_PATH",
    "XDG_DATA_DIRS",
    "WGPU_BACKEND_TYPE",
    "WGPU_ADAPTER_NAME",
)
PREFIXES = ("VK_", "OCL_ICD_", "MESA_", "LIBGL_", "ANYTORCH_")
LONGEST = 4096  # of one value; nobody reads further


def read_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `NAMES` and `PREFIXES` that are set, in alphabetical order; an empty value is kept: it masks."""
    return {
        clean(name): clean(env[name])[:LONGEST] for name in sorted(env) if name in NAMES or name.startswith(PREFIXES)
    }
