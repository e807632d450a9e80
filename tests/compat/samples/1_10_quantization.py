# 1-ai-os-diffusion.md, python block 10
# 解决方案：�少批�大�或使用�化
engine = ArrowEngine(
    model_path="./models/minilm",
    device="cuda",
    quantization="int8"  # �少内�使用
)
