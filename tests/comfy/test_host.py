"""The host itself: it must refuse, run and cache as ComfyUI does, or the other tests prove nothing."""

from __future__ import annotations

import sys

import pytest

contract = sys.modules["anytorch_tests_comfy_contract"]
host = sys.modules["anytorch_tests_comfy_host"]


@pytest.mark.parametrize("name", contract.CASES)
def test_contract(name: str) -> None:
    server = host.Host(contract.NODE_CLASS_MAPPINGS)
    for run in contract.CASES[name]:
        made = server.run(run.prompt)
        assert (run.refused in str(made.refused)) if run.refused else not made.refused
        if run.error is not None:
            assert (made.error["node"], made.error["message"]) == run.error
        else:
            assert made.error is None
        if run.ui is not None:
            assert {key: ui["text"] for key, ui in made.ui.items()} == run.ui
        if run.cached is not None:
            assert made.cached == run.cached
