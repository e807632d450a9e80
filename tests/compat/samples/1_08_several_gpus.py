# 1-ai-os-diffusion.md, python block 8 (多 GPU 支�)
import torch

# CUDA/ROCm 多 GPU
if torch.cuda.device_count() > 1:
    print(f"Using {torch.cuda.device_count()} GPUs")
    # DataParallel 或 DistributedDataParallel
