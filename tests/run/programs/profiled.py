"""Profilers, ranges and memory notes, as training scripts have them behind a flag."""

import time

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
x = torch.randn(4, 8).to(device)
activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
with profile(activities=activities, record_shapes=True, profile_memory=True, schedule=schedule(wait=1, warmup=1, active=1)) as prof:
    for _ in range(3):
        with record_function("step"):
            model(x).sum().backward()
        prof.step()
table = prof.key_averages().table(sort_by="cuda_time_total" if torch.cuda.is_available() else "cpu_time_total", row_limit=5)
assert len(prof.key_averages()) > 0 and table
with torch.autograd.profiler.profile(use_cuda=torch.cuda.is_available()) as p:
    model(x)
assert len(p.key_averages()) > 0
if torch.cuda.is_available():
    torch.cuda.nvtx.range_push("forward")
    model(x)
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("again"), torch.autograd.profiler.emit_nvtx():
        model(x)
    with torch.cuda.profiler.profile():
        model(x)
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.cudart().cudaProfilerStop()
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.synchronize()
    begun = time.time()
    model(x)
    torch.cuda.synchronize()
    assert time.time() >= begun
print(f"= {model(x).sum().item():.4f}")
