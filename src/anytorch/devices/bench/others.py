"""What else the machine does while a device is measured."""

from __future__ import annotations

from time import perf_counter, process_time

from anytorch.probe.activity import Activity


class OtherWork:
    """How many cores other processes keep busy from `begin` on. Made when it is first needed: it opens files."""

    def __init__(self) -> None:
        self._activity: Activity | None = None
        self._wall = self._own = 0.0

    def begin(self) -> None:
        self._activity = Activity()
        self._wall, self._own = perf_counter(), process_time()

    def cores(self) -> float | None:
        """Cores, 0.0 for an idle machine; None where the system does not tell, or nothing was begun."""
        if self._activity is None:
            return None
        found = self._activity.other_cores(process_time() - self._own, perf_counter() - self._wall)
        return None if found is None else round(found, 2)
