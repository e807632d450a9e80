"""The newer ways to name a device: contexts, defaults, meta tensors, factories, generators, queries."""

import copy
import os

import torch
import torch.nn as nn

assert torch.cuda.is_available() and torch.cuda.device_count() >= 1
torch.manual_seed(0)
print("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"), "version", torch.version.cuda)
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(i, p.name, p.total_memory / 1024**3, p.major, p.minor, p.multi_processor_count)
    assert p.total_memory > 0 and p.name == torch.cuda.get_device_name(i)
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total and torch.cuda.memory_allocated() >= 0 and isinstance(torch.cuda.memory_summary(), str)
assert torch.cuda.max_memory_allocated() >= 0 and torch.cuda.memory_stats()["allocated_bytes.all.current"] >= 0
torch.cuda.reset_peak_memory_stats()
torch.cuda.empty_cache()
with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    a = torch.zeros(2, 3)
    assert a.is_cuda and torch.arange(3).device.type == "cuda"
assert all(p.is_cuda and p.device == torch.device("cuda:0") for p in model.parameters())
with torch.device("meta"):
    empty = nn.Linear(3, 3)
empty = empty.to_empty(device="cuda")
with torch.no_grad():
    for p in empty.parameters():
        p.fill_(0.5)
assert empty(a + 1).sum().item() == 12.0
torch.set_default_device("cuda")
assert torch.rand(2).is_cuda and torch.get_default_device().type == "cuda"
torch.set_default_device("cpu")
assert not torch.rand(2).is_cuda
x = torch.arange(6.0, device="cuda").view(2, 3)
assert x.to(0).device == torch.device("cuda", 0) and x.to(device="cuda:0", dtype=torch.float64).dtype == torch.float64
assert x.device.type == "cuda" and x.device.index == 0 and str(x.device) == "cuda:0" and x.is_cuda
assert torch.device("cuda").type == "cuda" and torch.device("cuda", 0) == torch.device("cuda:0") == x.device
for like in (torch.zeros_like(x), torch.empty_like(x, device="cuda"), x.new_ones(2), torch.tensor([1], device=x.device), x.clone(), x[0], x.t(), x.sum()):
    assert like.is_cuda and like.device == x.device
host = x.cpu()
assert not host.is_cuda and host.device.type == "cpu" and host.numpy().sum() == 15
assert copy.deepcopy(model)[0].weight.is_cuda and {x.device: 1}[torch.device("cuda:0")] == 1
g = torch.Generator(device="cuda")
g.manual_seed(3)
first = torch.randn(4, generator=g, device="cuda")
g.manual_seed(3)
assert torch.equal(first, torch.randn(4, generator=g, device="cuda"))
torch.cuda.manual_seed_all(5)
state = torch.cuda.get_rng_state()
b = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(b, torch.rand(3, device="cuda"))
with torch.random.fork_rng(devices=[0]):
    torch.rand(3, device="cuda")
buffer = nn.BatchNorm1d(3).cuda(0)
assert buffer.running_mean.is_cuda
try:
    torch.ones(2, device="cuda:7")
except RuntimeError as error:
    assert "invalid device ordinal" in str(error)
else:
    raise AssertionError("there is no eighth device")
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True
print(torch.backends.cudnn.version(), torch.backends.cudnn.is_available(), torch.backends.cuda.is_built(), torch.cuda.get_arch_list())
with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=True, enable_mem_efficient=False):
    q = torch.randn(1, 2, 4, 8, device="cuda")
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).is_cuda
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.is_bf16_supported() in (True, False)
assert torch.cuda.is_initialized() and torch.cuda.current_device() == 0
print("= devices 1.0")
