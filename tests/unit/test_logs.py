"""Messages reach standard error at the level that was asked for, and cost nothing until there is one."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

CODE = """
    import sys
    from anytorch import logs

    log = logs.logger("anytorch.somewhere")
    logs.configure({level!r})
    before = "logging" in sys.modules
    log.debug("a %s", "detail")
    log.info("a fact")
    middle = "logging" in sys.modules
    log.warning("careful with %d", 5)
    log.error("no")
    answer(before=before, middle=middle, after="logging" in sys.modules)
"""


@pytest.mark.parametrize(
    ("level", "lines", "loaded_early"),
    [
        (None, ["WARNING anytorch.somewhere: careful with 5", "ERROR anytorch.somewhere: no"], False),
        ("ERROR", ["ERROR anytorch.somewhere: no"], False),
        (
            "DEBUG",
            [
                "DEBUG anytorch.somewhere: a detail",
                "INFO anytorch.somewhere: a fact",
                "WARNING anytorch.somewhere: careful with 5",
                "ERROR anytorch.somewhere: no",
            ],
            True,
        ),
    ],
)
def test_levels(level: str | None, lines: list[str], loaded_early: bool, run_python: Callable[..., Any]) -> None:
    code = "def answer(**values): print(values)\n" + dedent(CODE.format(level=level))
    done = run_python(code)
    assert done.stderr.splitlines() == [f"anytorch {line}" for line in lines]
    assert done.stdout.strip() == str({"before": loaded_early, "middle": loaded_early, "after": True})


def test_the_applications_own_set_up_is_left_alone(run_python: Callable[..., Any]) -> None:
    done = run_python(
        """
        import logging
        logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
        from anytorch import logs
        logs.logger("anytorch.x").info("hello")
        """
    )
    assert done.stderr == "mine: hello\n"
