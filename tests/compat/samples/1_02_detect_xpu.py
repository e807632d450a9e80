# 1-ai-os-diffusion.md, python block 2, the device part (3. Intel GPU (XPU) ✅)
import torch

if torch.xpu.is_available():
    print(f"Intel GPU: {torch.xpu.get_device_name(0)}")
