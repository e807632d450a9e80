"""Our Triton kernels, by Triton's own interpreter on the CPU: what they compute, not how fast.

Where Triton is not installed the tests are skipped, or fail if ANYTORCH_TEST_REQUIRE names triton, as `make test` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

# Triton's interpreter makes a loop's bound an int by int(array), which NumPy 2.4 allows only without dimensions.
INDEX = """
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def with_index(tensor, *more):
    patch(tensor, *more)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
interpreter._patch_lang_tensor = with_index
"""

SCRIPT = (
    INDEX
    + """
import torch
from anytorch.text.encoders.kernels import add_norm, attend_short, fits, tile_for
from anytorch.text.encoders.layouts import OneByOne

torch.manual_seed(0)
worst, tried = 0.0, 0
for lengths, heads, kv_heads, width, window, causal in [
    ((7, 1, 30, 13, 32), 4, 4, 32, 0, False),
    ((7, 60, 64, 33), 4, 2, 16, 0, True),
    ((100, 128, 3), 2, 2, 64, 5, False),
    ((40, 20), 4, 1, 32, 6, True),
    ((150, 65, 1, 129), 2, 2, 32, 0, False),
    ((140, 3), 2, 1, 16, 70, True),
    ((200, 70), 1, 1, 32, 20, False),
]:
    total = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    starts = torch.tensor([0, *ends, total, total], dtype=torch.int32)  # room for two texts that are not there
    qkv = torch.randn(total + 9, heads + 2 * kv_heads, width)  # and tokens that belong to nobody
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    layout = OneByOne(starts, total + 9, max(lengths), starts.tolist())
    wanted = layout.attend(q, k, v, window=window, causal=causal, bias=None)
    for blocks in (0, 2):
        if fits(max(lengths), width, blocks):
            found = attend_short(q, k, v, starts, max(lengths), window=window, causal=causal, blocks=blocks)
            worst = max(worst, (found[:total] - wanted[:total]).abs().max().item())
            tried += 1
norms = 0.0
for width, bias in ((384, True), (48, False), (768, True)):
    x, y, norm = torch.randn(37, width), torch.randn(37, width), torch.nn.LayerNorm(width, bias=bias)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(width))
        norms = max(norms, (add_norm(x, y, norm) - norm(x + y)).abs().max().item())
answer(attention=worst, norm=norms, tried=tried, tiles=[tile_for(n) for n in (1, 32, 33, 128)])
"""
)


def test_kernels_compute_what_torch_computes(
    run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]
) -> None:
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    found = run_script(SCRIPT, {"TRITON_INTERPRET": "1"}, warm=True)
    assert found["attention"] < 1e-5 and found["norm"] < 1e-5
    assert found["tiles"] == [32, 32, 64, 128] and found["tried"] == 11


WHOLE = (
    INDEX
    + """
import json, os
from pathlib import Path

import numpy as np

from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.encoders.encoder import TorchEncoder
from anytorch.text.encoders.strategy import EncoderPlan, worst_cosine
from anytorch.text.checkpoints.spec import read_spec

found = {}
for family, folder in json.loads(os.environ["FOLDERS"]).items():
    spec = read_spec(json.loads((Path(folder) / "config.json").read_text()))
    starts = np.array([0, 5, 6, 40, 57], np.int32)
    ids = np.random.default_rng(0).integers(5, 120, 57).astype(np.int32)
    encoder = TorchEncoder(spec, Checkpoint(folder), device="cpu", layout="rows")
    wanted = encoder.run(ids, starts)
    encoder.use(EncoderPlan("float32", "packed", False, kernels=True, blocks=2))
    found[family] = worst_cosine(wanted, encoder.run(ids, starts))
answer(**found)
"""
)


def test_a_whole_encoder_with_them(
    run_script: Callable[..., Any],
    missing: Callable[[str, str], NoReturn],
    checkpoint_folder: Callable[[str], Path],
) -> None:
    """BERT with both kernels; a causal decoder with shared keys, whose norms are of another kind, with one."""
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    folders = json.dumps({family: str(checkpoint_folder(family)) for family in ("bert", "qwen3")})
    found = run_script(WHOLE, {"TRITON_INTERPRET": "1", "FOLDERS": folders}, warm=True)
    assert found["bert"] > 0.99999 and found["qwen3"] > 0.99999
