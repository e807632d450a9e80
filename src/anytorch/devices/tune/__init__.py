"""Finding by measurement what is faster on this machine, storing it with its provenance, and obeying it later.

The way data flows: `search` measures (`anytorch.measured`) and decides by `plan` (pure) → `TunePlan`; `store` writes it
beside the key of the machine and reads it back only on that machine. Importing this package imports no torch.
"""

from __future__ import annotations

from anytorch.devices.tune.plan import Item, TunePlan
from anytorch.devices.tune.search import tune
from anytorch.devices.tune.store import Applied, Tuned, apply, trusted_setting, tuned_for, use_tuned
from anytorch.measured.machine import machine_key

__all__ = [
    "Applied",
    "Item",
    "TunePlan",
    "Tuned",
    "apply",
    "machine_key",
    "trusted_setting",
    "tune",
    "tuned_for",
    "use_tuned",
]
