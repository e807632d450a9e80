"""Finding by measurement what is faster on this machine, storing it with its provenance, and obeying it later.

The way data flows: `search` measures (`anytorch.measured`) and decides → `TunePlan`; `store` has its rules (pure), writes it
beside the key of the machine and reads it back only on that machine. Importing this package imports no torch.
"""

from __future__ import annotations

from anytorch.devices.tune.search import tune as tune
from anytorch.devices.tune.store import Applied as Applied
from anytorch.devices.tune.store import Item as Item
from anytorch.devices.tune.store import Tuned as Tuned
from anytorch.devices.tune.store import TunePlan as TunePlan
from anytorch.devices.tune.store import apply as apply
from anytorch.devices.tune.store import trusted_setting as trusted_setting
from anytorch.devices.tune.store import tuned_for as tuned_for
from anytorch.devices.tune.store import use_tuned as use_tuned
from anytorch.measured.machine import machine_key as machine_key
