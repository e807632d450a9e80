"""One worker of `anytorch serve --workers N`: `main([options, socket, beats])`. Its parent is `supervisor`.

The listening socket and a pipe for heartbeats are inherited. Standard input is a pipe that ends when the parent does, and
then so does the worker: none is left behind on the port.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading

from anytorch import logs
from anytorch.serve.app import create_app
from anytorch.serve.options import from_json
from anytorch.serve.running import run_app


def main(arguments: list[str]) -> int:
    options = from_json(arguments[0])
    logs.configure()
    listening = socket.socket(fileno=int(arguments[1]))
    listening.setblocking(False)
    beats = int(arguments[2])
    os.set_blocking(beats, False)
    alone = threading.Event()
    threading.Thread(target=_end_with_parent, args=(alone,), name="anytorch-parent", daemon=True).start()
    app = create_app(options)

    def beat() -> None:
        app.state.service.on_beat()
        try:
            os.write(beats, b".")
        except BlockingIOError:  # the parent has enough of them
            pass

    try:
        return run_app(app, options, listening, None, beat)
    finally:
        if alone.is_set() and options.run_folder is not None:  # who would have removed it was killed
            shutil.rmtree(options.run_folder, ignore_errors=True)


def _end_with_parent(alone: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)
