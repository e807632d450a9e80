"""Packages of CUDA's world, imported as programs import them: with a fallback where they are missing."""

import shutil
import subprocess

import torch

found = {}
try:
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    found["flash_attn"] = True
except ImportError:
    flash_attn_func = None
try:
    import xformers
    import xformers.ops as xops

    found["xformers"] = True
except ImportError:
    xops = None
for name in ("apex", "cupy", "bitsandbytes", "pynvml", "triton", "tensorrt", "deepspeed", "nvidia_smi", "GPUtil"):
    try:
        __import__(name)
        found[name] = True
    except (ImportError, ModuleNotFoundError) as error:
        found[name] = False
        assert name in str(error), error
try:
    from apex import amp
    from apex.normalization import FusedLayerNorm as LayerNorm
except ImportError:
    from torch.nn import LayerNorm
q, k, v = (torch.randn(2, 5, 3, 4, device="cuda") for _ in range(3))
causal = torch.ones(5, 5, dtype=torch.bool).tril().cuda()
expected = torch.nn.functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), attn_mask=causal).transpose(1, 2)
assert torch.allclose(flash_attn_func(q, k, v, causal=True), expected, atol=1e-4)
assert torch.allclose(xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask()), expected, atol=1e-4)
mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], device="cuda")
unpadded, indices, cu_seqlens, longest, *_ = unpad_input(q, mask)
assert unpadded.shape[0] == 8 and longest == 5 and torch.equal(pad_input(unpadded, indices, 2, 5)[1], q[1])
out = flash_attn_varlen_func(unpadded, index_first_axis(k.reshape(10, 3, 4), indices), index_first_axis(v.reshape(10, 3, 4), indices), cu_seqlens, cu_seqlens, longest, longest, causal=True)
assert torch.allclose(out[3:], expected[1], atol=1e-4)
layer = LayerNorm(4).cuda()
assert layer(q).is_cuda
if found["pynvml"]:
    import pynvml

    try:
        pynvml.nvmlInit()
        print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    except pynvml.NVMLError as error:
        print("no NVML:", error)
if shutil.which("nvidia-smi"):
    print(subprocess.check_output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv"]))
else:
    try:
        subprocess.check_output(["nvidia-smi"])
    except FileNotFoundError:
        pass
print(found)
print("= optional 1.0")
