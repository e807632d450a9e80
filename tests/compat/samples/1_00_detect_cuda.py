# 1-ai-os-diffusion.md, python block 0 (1. NVIDIA GPU (CUDA) ✅)
import torch
if torch.cuda.is_available():
    print(f"CUDA Device: {torch.cuda.get_device_name(0)}")
