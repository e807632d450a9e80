"""Our C++ code: compiled once by the machine's own compiler, kept in the cache folder, loaded with ctypes. No torch.

    library = native.load("packed", [HERE / "encoder.cpp"])      # a ctypes.CDLL; raises NativeUnavailable

A caller that gets NativeUnavailable (CompilerMissing, CompilerFailed) takes another path and says so.
"""

from __future__ import annotations

from anytorch.native.library import build, load
from anytorch.native.numbers import Int32
from anytorch.native.simd import LEVELS, Level, level, supported

__all__ = ["LEVELS", "Int32", "Level", "build", "level", "load", "supported"]
