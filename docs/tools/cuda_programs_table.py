"""The table of docs/guide/run-cuda-programs.md, from tools/cuda_programs.py."""

from __future__ import annotations

from typing import Any

from results_files import origin, part, read, table, there

FILE = "cuda-programs"
HEAD = [
    "program",
    "lines with cuda",
    "`--device cpu`",
    "`--device webgpu`",
    "ported, CPU",
    "ported, webgpu",
    "ported again",
]


def cell(found: dict[str, Any], told: dict[str, Any] | None, device: str, *, ported: bool = False) -> str:
    """What became of a run: its losses beside the plain one's, or why it did not get through."""
    reason = found["why"].get(device, "")
    if told is None:
        return f"no: {reason}" if reason else "not tried"
    if told["status"] == 124:
        far = "same losses as far as it came" if told["losses"] == "same" else "in part, other losses"
        return f"{far}; {reason or 'stopped'}"
    if found["plain"]["status"]:
        return "fails under plain Python, too"
    if told["status"]:
        last = [line for line in told["end"].splitlines() if line.strip()][-1:]
        return f"failed: `{last[0][:90]}`" if last else "failed"
    if told["losses"] == "same":
        return "same losses"
    if not found["plain"]["numbers"]:
        return "ran; it prints no losses"
    if told["losses"] != "apart":
        return f"same losses, {told['losses']}"
    if found["cpu_draws"] and not (ported and device == "cpu"):
        return f"ran ({found['cpu_draws']})"
    if found["draws"] and device != "cpu":
        return "ran; draws random numbers on the device"
    return "ran, other losses"


def again(port: dict[str, Any] | None) -> str:
    if port is None:
        return "not tried"
    return "unchanged" if not port["second_run_changes"] else f"{port['second_run_changes']} files changed"


@part(FILE)
def programs() -> str:
    if not there(FILE):
        return "Not run yet: `tools/cuda_programs.py` has written no file."
    results = read(FILE)
    rows = []
    for name, found in results["programs"].items():
        port = found.get("port")
        row = [name, str(found["cuda_lines"])]
        if "problem" in found:
            row += [f"failed before it began: `{found['problem'].splitlines()[-1][:90]}`", "", "", "", ""]
        else:
            row += [cell(found, found.get(device), device) for device in ("cpu", "webgpu")]
            row += [cell(found, (port or {}).get(device), device, ported=True) for device in ("cpu", "webgpu")]
            row += [again(port)]
        rows.append(row)
    return f"{table(HEAD, rows)}\n\ntorch {results['torch']}, {origin(FILE)}; `bench/results/{FILE}.json`."
