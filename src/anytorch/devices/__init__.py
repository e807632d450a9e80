"""The device layer: one small file per back end, and the code that finds, explains, chooses and measures devices.

Importing this package imports nothing else. The way data flows: `gather` (with `doctor`) → `ranking` → `choose`.
`anytorch.devices()` lists every device: the package is the layer's name *and* its first question, so it can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, **options: Any) -> Any:
        """See `anytorch.devices.choose.devices`."""
        from anytorch.devices.choose import devices

        return devices(**options)


sys.modules[__name__].__class__ = _CallablePackage
