# 1-ai-os-diffusion.md, python block 6
from ai_os_diffusion.inference import ArrowEngine, get_best_device

# 自动选择最佳设备
device = get_best_device()
print(f"Using device: {device}")

# �始化引�
engine = ArrowEngine(
    model_path="./models/minilm",
    device=device
)

# ��
embeddings = engine.encode(["Hello, world!"])
