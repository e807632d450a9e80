# 1-ai-os-diffusion.md, python block 7
# 强制使用特定设备
engine = ArrowEngine(
    model_path="./models/minilm",
    device="cuda"  # 或 "xpu", "mps", "vulkan", "cpu"
)
