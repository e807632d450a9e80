# 1-ai-os-diffusion.md, python block 1 (2. AMD GPU (ROCm) ✅)
import torch
if torch.cuda.is_available():
    if hasattr(torch.version, "hip") and torch.version.hip:
        print(f"ROCm Device: {torch.cuda.get_device_name(0)}")
        print(f"HIP Version: {torch.version.hip}")
