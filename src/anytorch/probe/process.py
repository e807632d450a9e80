"""How much memory this process holds."""

from __future__ import annotations

import sys


def resident_bytes() -> tuple[int | None, int | None]:
    """Resident size now and at its highest, in bytes; None where the system does not tell."""
    now = peak = None
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("VmRSS:"):
                    now = int(line.split()[1]) * 1024
                elif line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a sandbox without it: asked of getrusage below
    if peak is None and sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS and kilobytes elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return now, peak
