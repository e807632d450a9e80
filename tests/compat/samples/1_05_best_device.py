# 1-ai-os-diffusion.md, python block 5 (自动设备选择)
from ai_os_diffusion.inference import get_best_device

device = get_best_device()
# 优先级: CUDA/ROCm > XPU > MPS > Vulkan > CPU
