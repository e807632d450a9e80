"""Whole numbers on their way into C++. ctypes cuts off what does not fit; these raise instead."""

from __future__ import annotations

import ctypes
from typing import Any


class Int32:
    """For `argtypes`, in place of `ctypes.c_int`: an int that does not fit in 32 bits raises ctypes.ArgumentError."""

    @staticmethod
    def from_param(value: Any) -> ctypes.c_int32:
        number = int(value)
        if not -(2**31) <= number < 2**31:
            raise OverflowError(f"{number} does not fit in the 32 bits that C++ has for it")
        return ctypes.c_int32(number)
