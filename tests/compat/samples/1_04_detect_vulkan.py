# 1-ai-os-diffusion.md, python block 4 (5. Vulkan (跨平�) ?���)
import torch
if hasattr(torch, "vulkan") and torch.vulkan.is_available():
    print("Vulkan backend available")
