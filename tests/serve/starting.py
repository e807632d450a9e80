"""What a service that was started with --json says once it answers."""

from __future__ import annotations

import json
import subprocess
from typing import Any


def start_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the first document on the standard output of `process`; fail with what it said if there is none."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.rstrip() == "}":
            break
    assert text, process.communicate()[1]
    started: dict[str, Any] = json.loads(text)
    return started
