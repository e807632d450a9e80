"""Programs written for CUDA, unmodified, on whatever device is there: `anytorch run` and `anytorch.stand_in`.

launch.py site/ hooks.py      `anytorch run`: the same interpreter again, with a hook that waits for `import torch`
stand_in.py place.py          the stand-in: what is put in place of what, and the device that does the work
tensors.py factories.py       tensors: `.to("cuda")`, `.is_cuda`, `torch.zeros(…, device="cuda")`
cuda_module.py accelerator.py defaults.py streams.py graphs.py precision.py loading.py parallel.py batch_norm.py
    compiling.py              torch.cuda and the rest
equivalents.py flash_attention.py xformers_ops.py    packages of CUDA's world, as far as torch has the same
refusals.py                   what nobody else has
ledger.py report.py           what was redirected, ignored and refused, and where the program asked for it
"""
