"""Kronos's device check: what each request becomes on this machine, and why.

python compat/services/test_device_resolution.py
"""

import sys
import warnings

import anytorch

REQUESTS = ("auto", "cpu", "cuda", "cuda:0", "mps")


def main() -> int:
    print("=" * 60, "Testing Device Resolution", "=" * 60, sep="\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anytorch.DeviceFallbackWarning)  # the reason is printed below instead
        for request in REQUESTS:
            found = anytorch.resolve(request)
            print(f"  {request:8} -> {found.device}" + (f"  ({found.warning})" if found.fell_back else ""))
    assert str(anytorch.resolve("cpu").device) == "cpu"
    print("✓ Device resolution module working correctly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
