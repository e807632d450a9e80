"""Python imports this at its start, because `anytorch run` puts its folder on PYTHONPATH.

It makes way for the sitecustomize that would have been imported without it, and begins the stand-in.
"""

import importlib
import os
import sys

_mine = sys.modules["sitecustomize"]
_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (pathlib takes 5 ms to import)
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]  # noqa: PTH100
del sys.modules["sitecustomize"]
try:
    importlib.import_module("sitecustomize")
except ModuleNotFoundError as _missing:
    if _missing.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _mine  # there is no other, and whoever imports this one wants to find it
if os.environ.get("ANYTORCH_STAND_IN"):
    try:
        from anytorch.run.child import begin
    except ModuleNotFoundError as _missing:  # another Python, without anytorch: it has no torch of ours, either
        if (_missing.name or "").partition(".")[0] != "anytorch":
            raise
    else:
        begin()
