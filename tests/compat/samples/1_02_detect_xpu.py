# 1-ai-os-diffusion.md, python block 2 (3. Intel GPU (XPU) ✅)
import torch
import intel_extension_for_pytorch as ipex

if torch.xpu.is_available():
    print(f"Intel GPU: {torch.xpu.get_device_name(0)}")
