"""Messages reach standard error at the level that was asked for, and cost nothing until there is one."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

from anytorch import logs

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


# --- in somebody's program -------------------------------------------------------------------------------------------

CHOOSE = """
    import anytorch
    print(anytorch.resolve("cpu").chosen.id)
"""


def test_a_named_level_shows_the_lines_on_standard_error(run_python: Callable[..., Any]) -> None:
    for variable in ("YIRAGE_LOG_LEVEL", "ANYTORCH_LOG_LEVEL"):
        done = run_python(CHOOSE, env={variable: "DEBUG"}, warm=True)
        assert done.stdout == "cpu\n"
        assert "anytorch DEBUG anytorch.devices.choose: asked for 'cpu', chose cpu (" in done.stderr
    assert run_python(CHOOSE, warm=True).stderr == ""
    assert run_python(CHOOSE, env={"YIRAGE_LOG_LEVEL": "WARNING"}, warm=True).stderr == ""


def test_a_fallback_is_told_at_info(run_python: Callable[..., Any]) -> None:
    code = """
        import warnings, anytorch
        warnings.simplefilter("ignore")
        anytorch.resolve("mps")
        """
    done = run_python(code, env={"ANYTORCH_LOG_LEVEL": "INFO"}, warm=True)
    assert "anytorch INFO anytorch.devices.choose: device 'mps' cannot be used" in done.stderr
    assert "DEBUG" not in done.stderr


def test_basic_config_alone_shows_our_lines(run_python: Callable[..., Any]) -> None:
    code = """
        import logging
        logging.basicConfig(level=logging.DEBUG, format="mine %(name)s %(message)s")
        import anytorch
        anytorch.resolve("cpu")
        """
    assert "mine anytorch.devices.choose asked for 'cpu', chose cpu" in run_python(code, warm=True).stderr
    # With a level named as well: the program's handlers get each line, and nobody else prints it again.
    both = run_python(code, env={"ANYTORCH_LOG_LEVEL": "DEBUG"}, warm=True).stderr
    assert both.count("asked for 'cpu', chose cpu") == 1 and "anytorch DEBUG" not in both


def test_a_program_that_sets_logging_up_later_gets_each_line_once(run_python: Callable[..., Any]) -> None:
    done = run_python(
        """
        from anytorch import logs
        log = logs.logger("anytorch.x")
        log.debug("first")
        import logging
        logging.basicConfig(format="mine: %(message)s")
        log.debug("second")
        """,
        env={"ANYTORCH_LOG_LEVEL": "DEBUG"},
    )
    assert done.stderr == "anytorch DEBUG anytorch.x: first\nmine: second\n"


def test_a_level_the_program_chose_for_us_stays(run_python: Callable[..., Any]) -> None:
    done = run_python(
        """
        import logging
        logging.getLogger("anytorch").setLevel(logging.ERROR)
        from anytorch import logs
        logs.logger("anytorch.x").warning("no")
        """,
        env={"ANYTORCH_LOG_LEVEL": "DEBUG"},
    )
    assert done.stderr == ""


def test_a_with_block_names_a_level_for_its_time(run_python: Callable[..., Any]) -> None:
    done = run_python(
        """
        import anytorch
        from anytorch import logs
        log = logs.logger("anytorch.x")
        log.debug("before")
        with anytorch.use(log_level="DEBUG"):
            log.debug("inside")
        log.debug("after")
        """
    )
    assert done.stderr == "anytorch DEBUG anytorch.x: inside\n"


def test_a_level_that_makes_no_sense_does_not_stop_a_message(run_python: Callable[..., Any]) -> None:
    code = "from anytorch import logs\nlogs.logger('anytorch.x').warning('careful')\n"
    assert "careful" in run_python(code, env={"ANYTORCH_LOG_LEVEL": "LOUD"}).stderr


@pytest.mark.long
def test_the_child_and_the_cache_are_logged(run_python: Callable[..., Any]) -> None:
    code = """
        from anytorch.devices.choose import survey
        survey("always")
        survey("always")
        """
    lines = run_python(code, env={"ANYTORCH_LOG_LEVEL": "DEBUG"}).stderr
    for words in ("child: starting", "-c START", "ended after", "nothing in", "under the key", "stored in"):
        assert words in lines, words
    assert lines.count("child: starting") == 1 and lines.count("using the cached result") == 1


def test_reasons_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    from anytorch import logs
    from anytorch.devices.doctor import diagnose
    from anytorch.devices.types import Facts
    from tests.devices.machines import hardware

    monkeypatch.setattr(logs, "_configured", [])
    monkeypatch.setattr(logging.getLogger("anytorch"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "anytorch"):
        diagnose(Facts(hardware(wheel=None)))
    assert any("error: torch-missing: torch is not installed" in line for line in caplog.messages)


def test_plugins_loaded_and_left_out_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from anytorch import logs
    from anytorch.devices import registry
    from anytorch.probe.facts import EntryPoint

    monkeypatch.setattr(logs, "_configured", [])
    monkeypatch.setattr(logging.getLogger("anytorch"), "propagate", True)
    # Our own back end under a stranger's name stands for one that loads; its name is taken, so it is left out as well.
    points = tuple(
        EntryPoint("anytorch.backends", name, "anytorch.devices.cpu:CpuBackend", "strange") for name in ("one", "two")
    )
    with caplog.at_level(logging.DEBUG, "anytorch"):
        registry._load.__wrapped__(points, ("one",))
        registry.load([("three", "anytorch.devices.cpu:CpuBackend", "strange")])
    assert "plug-in two of strange: left out by the setting plugins" in caplog.messages
    assert "plug-in three of strange: loaded from anytorch.devices.cpu:CpuBackend" in caplog.messages
    assert any("back end one is left out" in line for line in caplog.messages)


def test_asides_are_dropped_by_their_words(caplog: pytest.LogCaptureFixture) -> None:
    torchao, child = logging.getLogger("torchao"), logging.getLogger("torchao.kernel")

    def heard() -> list[str]:
        caplog.clear()
        torchao.warning("Failed to load _C_cutlass_90a.abi3.so: no such symbol")
        torchao.warning("this format is deprecated")
        child.warning("no kernel")
        return [record.getMessage() for record in caplog.records]

    everything, rest = heard(), ["this format is deprecated", "no kernel"]
    assert len(everything) == 3
    with logs.asides_unheard():
        assert heard() == rest
        with pytest.raises(KeyError), logs.asides_unheard():
            raise KeyError
        assert heard() == rest
    assert heard() == everything


def test_silencing_warnings_in_overlapping_threads_leaves_the_filters_alone() -> None:
    """Left in the order they were entered, two blocks of `catch_warnings` would restore each other's filters."""
    before, first_is_in, second_tries = list(warnings.filters), threading.Event(), threading.Event()

    def first() -> None:
        with logs.warnings_unheard():
            first_is_in.set()
            assert second_tries.wait(120)

    def second() -> None:
        assert first_is_in.wait(120)
        second_tries.set()
        with logs.warnings_unheard():
            warnings.warn("not shown, and no error here", stacklevel=1)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert list(warnings.filters) == before
