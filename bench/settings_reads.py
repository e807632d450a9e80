"""Microseconds of processor time of one setting, one unheard log line and one look at the registry, with and without a file.

python bench/settings_reads.py
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import timeit
from pathlib import Path

from anytorch import logs, settings
from anytorch.devices.registry import registry

FILE = """[settings]
backend = "cpu"
threads = 2
cpu_dtype = "float32"
matmul_precision = "high"

[tuned."cpu"]
device = "cpu"
batch_size = 32
autocast_dtype = "float32"
date = "2026-11-01"
"""


def main() -> None:
    log = logs.logger("anytorch.bench")
    logging.getLogger("anytorch")  # a program that logs: lines below a warning are looked at
    questions = {
        'get("backend")': lambda: settings.get("backend"),
        'get("simd")': lambda: settings.get("simd"),
        "log.debug": lambda: log.debug("unheard"),
        "registry()": registry,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("ANYTORCH_CONFIG", None)
        os.environ["XDG_CONFIG_HOME"] = folder
        path = Path(folder, "anytorch", "config.toml")
        for there in (False, True):
            if there:
                path.parent.mkdir()
                path.write_text(FILE)
                time.sleep(4)  # a younger file is read anew: its time stamp does not tell a change for sure
            print(f"settings file: {'12 lines' if there else 'none'}")
            for name, ask in questions.items():
                ask()
                best = min(timeit.repeat(ask, timer=time.process_time, number=300, repeat=9)) / 300
                print(f"  {name:16} {best * 1e6:7.1f} µs")


if __name__ == "__main__":
    main()
