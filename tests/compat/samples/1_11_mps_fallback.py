# 1-ai-os-diffusion.md, python block 11 (Apple MPS 问题)
# 使用 CPU �退
import os
os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"
