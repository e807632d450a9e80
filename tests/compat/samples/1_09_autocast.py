# 1-ai-os-diffusion.md, python block 9
# 自动混�精度（CUDA/ROCm/XPU）
with torch.autocast(device_type=device, dtype=torch.float16):
    embeddings = engine.encode(texts)
