"""A plug-in that cannot be used becomes a reason that is told, never an exception, and takes nothing down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKING = """
from anytorch.devices.base import TorchBackend

class Backend(TorchBackend):
    name, torch_type, title, priority = {name!r}, {torch_type!r}, "a test", 10
"""

# name of the plug-in: (its code, the attribute of its entry point, words its reason must have)
BROKEN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "raises": ("raise ValueError('no licence file')", "Backend", ("ValueError: no licence file",)),
    "unimportable": (
        "import a_module_that_is_not_there",
        "Backend",
        ("ModuleNotFoundError",),
    ),
    "syntax": ("def (:", "Backend", ("SyntaxError",)),
    "absent": ("x = 1", "Backend", ("AttributeError", "Backend")),
    "constructor": (
        "class Backend:\n    def __init__(self): raise OSError('no device')",
        "Backend",
        ("OSError: no device",),
    ),
    "wrong": ("def Backend(): return 42", "Backend", ("not a back end", "try_out", "memory")),
    "partial": (
        "class Backend:\n    name = torch_type = 'partial'; title = 'x'; priority = 1; aliases = ()\n"
        "    def seen(self, hardware): return []",
        "Backend",
        ("not a back end", "try_out", "memory"),
    ),
    "clash": (WORKING.format(name="cuda", torch_type="cpu"), "Backend", ("'cuda' is taken by the back end 'cuda'",)),
    "alias": (
        WORKING.format(name="alias", torch_type="cpu") + "    aliases = ('vulkan',)\n",
        "Backend",
        ("'vulkan' is taken by the back end 'webgpu'",),
    ),
    "upper": (WORKING.format(name="UPPER", torch_type="cpu"), "Backend", ("must be a lower-case word",)),
}

ASK = """
import json, sys, warnings
import anytorch
from anytorch.devices.registry import registry
errors = dict(registry().errors)
found = anytorch.devices(tried="never")
choice = anytorch.resolve("auto")
told = {{}}
for name in {names!r}:
    try:
        anytorch.resolve(name)
    except anytorch.AnytorchError as exc:
        told[name] = [type(exc).__name__, str(exc)]
answer(errors=errors, backends=[c.backend for c in found], chosen=choice.name, told=told,
       words=anytorch.explain(tried="never"))
"""


@pytest.fixture(scope="module")
def told(plugin: Callable[..., Path], run_script: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What a process says that has all of them installed at once."""
    folders = [plugin(name, code, attribute) for name, (code, attribute, _) in BROKEN.items()]
    answers: dict[str, Any] = run_script(ASK.format(names=list(BROKEN)), path=folders)
    return answers


@pytest.mark.parametrize("name", BROKEN)
def test_becomes_a_reason(name: str, told: dict[str, Any]) -> None:
    words = BROKEN[name][2]
    reason = told["errors"][name]
    for word in words:
        assert word in reason, reason
    assert f"package {name}-plugin" in reason  # whose fault it is
    assert name not in told["backends"] and "cpu" in told["backends"]
    assert told["chosen"] == "cpu"
    assert f"no {name}: its plug-in could not be loaded" in told["words"]
    kind, message = told["told"][name]
    assert kind == "UnknownDevice" and words[0] in message


def test_doctor_and_info_name_it(plugin: Callable[..., Path], run_python: Callable[..., Any]) -> None:
    folder = plugin("raises", BROKEN["raises"][0])
    for command, status in ((["--json", "doctor", "--no-probe"], 1), (["--json", "info"], 0)):
        code = f"import sys; from anytorch.cli.main import main; sys.exit(main({command!r}))"
        done = run_python(code, path=[folder], check=False)
        assert done.returncode == status, done.stderr
        assert "no licence file" in json.dumps(json.loads(done.stdout)), command


@pytest.mark.long
def test_one_that_breaks_when_tried(plugin: Callable[..., Path], run_script: Callable[..., dict[str, Any]]) -> None:
    """It loads, and then its device raises: a reason of that device, and the others are tried all the same."""
    code = WORKING.format(name="fragile", torch_type="cpu") + (
        "    def seen(self, hardware):\n"
        "        from anytorch.devices.types import Candidate, State\n"
        "        return [Candidate('fragile', 'cpu', 0, 'fragile card', State.SEEN, 10)]\n"
        "    def try_out(self): raise RuntimeError('the card is on fire')\n"
    )
    told = run_script(
        """
        import warnings, anytorch
        listed = {c.id: [c.state.value, *(r.text for r in c.reasons)] for c in anytorch.devices()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            device = str(anytorch.resolve("fragile").device)
        answer(listed=listed, device=device, warned=[f"{w.category.__name__}: {w.message}" for w in caught])
        """,
        path=[plugin("fragile", code)],
    )
    assert told["listed"]["fragile:0"][0] == "unusable"
    assert "the card is on fire" in " ".join(told["listed"]["fragile:0"])
    assert told["listed"]["cpu"][0] == "usable"
    assert told["device"] == "cpu"
    (warning,) = told["warned"]
    assert warning.startswith("DeviceFallbackWarning") and "the card is on fire" in warning


@pytest.mark.long
def test_one_that_kills_the_process_when_tried(
    plugin: Callable[..., Path], run_script: Callable[..., dict[str, Any]]
) -> None:
    code = WORKING.format(name="deadly", torch_type="cpu") + "    def try_out(self):\n        import os; os.abort()\n"
    told = run_script(
        """
        import anytorch
        from anytorch_compat.selection import get_available_backends
        from anytorch.devices.gather import gather
        report = gather("always").torch.backends["deadly"]
        answer(code=report.code, error=report.error, usable=[b.value for b in get_available_backends()])
        """,
        path=[plugin("deadly", code)],
    )
    assert told["code"] == "crashed" and "signal 6" in told["error"]
    assert "cpu" in told["usable"] and "deadly" not in told["usable"]
