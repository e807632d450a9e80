"""tools/device_session.py: the steps can be run as they are written, and one that fails costs none of the others."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import module_at
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "device_session.py"
SLOW_S = 30


@pytest.fixture(scope="module")
def tool() -> Any:
    return module_at(TOOL)


def test_every_step_is_a_script_that_writes_a_file_of_its_own(tool: Any) -> None:
    for name, step in tool.STEPS.items():
        script, *rest = step.command.split()
        assert (ROOT / script).is_file(), name
        assert "{}" in rest or "OUTPUT" in (ROOT / script).read_text("utf-8"), name
    assert len({step.file for step in tool.STEPS.values()}) == len(tool.STEPS)


@pytest.mark.long
def test_every_step_has_options_that_its_script_knows(tool: Any) -> None:
    asked: dict[str, set[str]] = {}
    for step in tool.STEPS.values():
        script, *rest = step.command.split()
        asked.setdefault(script, set()).update(part for part in rest if part.startswith("--"))
    for script, options in asked.items():
        if options:
            told = subprocess.run(
                [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            assert {option for option in options if not re.search(rf"{option}\b", told.stdout)} == set(), script


def test_what_fails_or_takes_too_long_costs_no_other_step(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = {
        "good": "import sys; open(sys.argv[1], 'w').write('{}')",
        "bad": "raise SystemExit('no such card')",
        # Interrupted, it writes what it has.
        "slow": (
            f"import sys, time\ntry:\n  open({str(tmp_path / 'begun')!r}, 'w').close()\n  time.sleep(600)\n"
            "except KeyboardInterrupt:\n  open(sys.argv[1], 'w').write('half')"
        ),
        "last": "import sys; open(sys.argv[1], 'w').write('{}')",
    }

    class Impatient(subprocess.Popen[bytes]):
        """Whose wait for the slow one is over as soon as there is something to interrupt."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == 2.0 * SLOW_S:
                until((tmp_path / "begun").exists)
                raise subprocess.TimeoutExpired("slow", timeout)
            return super().wait(timeout)

    monkeypatch.setattr(tool.subprocess, "Popen", Impatient)
    monkeypatch.setattr(tool, "PAUSE_S", 100)
    steps = {}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
        steps[name] = tool.Step("", f"{tmp_path / name}.py {{}}", f"{name}-result", SLOW_S if name == "slow" else 100)
    steps["long"] = tool.Step("", "none.py", "long-result", 10_000)
    monkeypatch.setattr(tool, "STEPS", steps)
    output = tmp_path / "out"
    arguments = ["--commit", "abc", "--output", str(output), "--seconds", "3000", "good", "bad", "slow", "long", "last"]
    monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert tool.main() == 1
    told = capsys.readouterr().out
    assert "no such card" in told and "cut off after 60 s" in told and "left out" in told
    with tarfile.open(output / "results.tar.gz") as packed:
        names = set(packed.getnames())
        half = packed.extractfile("slow-result.json")
        assert half is not None and half.read() == b"half"
    assert {"good-result.json", "last-result.json", "bad.log"} <= names


@pytest.mark.parametrize("arguments", [[], ["--commit", "a", "--output", "b", "none"]], ids=["nothing", "unknown"])
def test_what_cannot_be_run_is_told(tool: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2
