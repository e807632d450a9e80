"""Count the modules that six everyday journeys lead through: how much of the house one must know to follow each.

    python tools/journeys.py               the counts
    python tools/journeys.py fit --names   one journey, its modules in the order they are entered

A module counts once, when the first of its functions is called on the journey (in any thread); what runs only while a
module is imported does not count. The journey of a service begins with the request, of `x + y` and `fit` with the call.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{os.sep}anytorch{os.sep}"


class Watch:
    """The modules of ours whose functions are called inside `with`, in the order they are entered."""

    def __init__(self, modules: dict[str, None] | None = None) -> None:
        self.modules = dict(modules or {})

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith("anytorch."):
                self.modules.setdefault(name)

    def __enter__(self) -> Watch:
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def command(*words: str) -> Watch:
    from anytorch.cli.main import main

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), Watch() as watch:
        main(list(words))
    return watch


def info() -> Watch:
    return command("info")


def search() -> Watch:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.txt"
        file.write_text("a cat\na dog\na house\n")
        return command("embed", str(file), "--search", "an animal", "--k", "1")


def post() -> Watch:
    from fastapi.testclient import TestClient

    from anytorch.serve.app import create_app

    # Watched from the start, since the service's threads are: what counts is the second request.
    with Watch() as watch, TestClient(create_app(), base_url="http://127.0.0.1") as client:
        body = {"input": ["a cat", "a dog"]}
        client.post("/v1/embeddings", json=body).raise_for_status()
        watch.modules.clear()
        client.post("/v1/embeddings", json=body).raise_for_status()
        return Watch(watch.modules)


def add() -> Watch:
    import torch

    import anytorch.webgpu  # noqa: F401

    x, y = (torch.ones(8, device="webgpu") for _ in range(2))
    x + y
    with Watch() as watch:
        x + y
    return watch


def fit() -> Watch:
    import torch

    from anytorch import memory

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    with Watch() as watch:
        memory.fit(model, "cpu", device_budget=512 << 10, host_budget=8 << 20, disk=False)(torch.ones(1, 256))
    return watch


def forecast() -> Watch:
    return command("forecast", "--sample", "--horizon", "4", "--samples", "2", "--seed", "1")


JOURNEYS: dict[str, Callable[[], Watch]] = {
    "info": info,
    "embed --search": search,
    "POST embeddings": post,
    "x + y on webgpu": add,
    "fit": fit,
    "forecast --sample": forecast,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journey", nargs="?", choices=[*JOURNEYS])
    parser.add_argument("--names", action="store_true", help="also the modules' names")
    options = parser.parse_args()
    if options.journey is None:  # each in a process of its own: what one has imported and kept shortens the next
        for name in JOURNEYS:
            subprocess.run([sys.executable, __file__, name, *["--names"] * options.names], check=True)
        return 0
    watch = JOURNEYS[options.journey]()
    print(f"{options.journey:20} {len(watch.modules):4} modules")
    if options.names:
        print("".join(f"    {name}\n" for name in watch.modules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
