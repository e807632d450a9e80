"""What YiRage's and Mirage's programs name beside `new_kernel_graph`, which is anytorch's own."""

from __future__ import annotations

from typing import Any, NoReturn

from anytorch.graph.kernel_graph import HAND_WRITTEN

# For `new_input(…, dtype=yr.float16)`; torch's own dtypes are taken there too.
float16, bfloat16, float32 = "float16", "bfloat16", "float32"


def new_threadblock_graph(*args: Any, **kwargs: Any) -> NoReturn:
    """Not supported: a thread-block graph written by hand. Raises NotImplementedError, which says what to do instead."""
    raise NotImplementedError(HAND_WRITTEN)
