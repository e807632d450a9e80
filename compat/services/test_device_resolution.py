"""Kronos's device check: what each request becomes on this machine, and why.

cd compat/services && python test_device_resolution.py
"""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gitSource"))
from model import resolve_device

import anytorch

REQUESTS = ("auto", "cpu", "cuda", "cuda:0", "mps")


def main() -> int:
    print("=" * 60, "Testing Device Resolution", "=" * 60, sep="\n")
    found = {}
    for request in REQUESTS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[request] = resolve_device(request)
        said = [str(w.message) for w in caught if issubclass(w.category, anytorch.DeviceFallbackWarning)]
        print(f"  {request:8} -> {found[request]}" + (f"  ({said[0]})" if said else ""))
        assert isinstance(found[request], torch.device)
        # A request that cannot be met is answered with another device, and never in silence.
        assert bool(said) == (request not in ("auto", "cpu") and found[request].type != request.partition(":")[0])
    assert found["cpu"] == torch.device("cpu")
    print("✓ Device resolution module working correctly")
    assert all(device.type != "meta" and torch.ones(2, device=device).sum() == 2 for device in found.values())
    print("✓ CPU fallback logic implemented")
    assert (found["cuda"].type == "cuda") == torch.cuda.is_available()
    print("✓ CUDA availability detection working")
    return 0


if __name__ == "__main__":
    sys.exit(main())
