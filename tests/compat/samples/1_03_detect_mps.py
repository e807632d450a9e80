# 1-ai-os-diffusion.md, python block 3 (4. Apple Silicon (MPS) ✅)
import torch
if torch.backends.mps.is_available():
    print("Apple Silicon MPS available")
