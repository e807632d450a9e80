"""The one-launch kernel under compute-sanitizer: races in shared memory, wrong addresses, barriers that not all reach.

    python tests/device/sanitize.py                       racecheck and memcheck; a few minutes
    python tests/device/sanitize.py --tools synccheck

A model of two layers, bfloat16 and packed weights, a few tokens each, on a GPU of compute capability 9.0 or more. Ends with
status 1 where the sanitizer finds something, 2 where there is no sanitizer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
FOUND = 9  # the sanitizer's exit status where it has found something


def child() -> None:
    import torch

    from anytorch.text.decoders import Decoder
    from anytorch.text.decoders.spec import read_spec
    from anytorch.text.persistent.cuda import CudaKernel

    shape = {
        "model_type": "qwen3", "vocab_size": 1003, "hidden_size": 264, "intermediate_size": 520, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(read_spec(shape, "a config.json")).eval().requires_grad_(False).to("cuda", torch.bfloat16)
    for weights in (None, "int8", "int4"):
        # Those who wait are not slowed down by the sanitizer, and would lose their patience with those who compute.
        kernel = CudaKernel(decoder, 300, weights=weights, constants={"PATIENCE_BITS": 31})  # type: ignore[arg-type]
        made = kernel.generate(list(range(3, 143)), 4)
        print(weights or "bfloat16", made, flush=True)
        assert len(made) == 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="racecheck,memcheck")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    sanitizer = shutil.which("compute-sanitizer") or next((one for one in PLACES if Path(one).exists()), None)
    if sanitizer is None:
        print("compute-sanitizer was not found: it comes with the CUDA toolkit")
        sys.exit(2)
    child()  # compiled, and right without the sanitizer
    failed = False
    for tool in options.tools.split(","):
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", "kns=decode"]
        done = subprocess.run([*command, sys.executable, __file__, "--child"], check=False)
        print(f"{tool}: {'clean' if done.returncode == 0 else f'status {done.returncode}'}", flush=True)
        failed |= done.returncode != 0
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
