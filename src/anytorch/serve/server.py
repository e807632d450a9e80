"""Serving: the port, then one process (`running`) or several (`supervisor`)."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace

from anytorch.errors import UsageError
from anytorch.serve.app import create_app
from anytorch.serve.options import ServeOptions
from anytorch.serve.running import run_app
from anytorch.serve.start import BACKLOG, Told
from anytorch.serve.supervisor import check, supervise


def serve(options: ServeOptions, told: Told) -> int:
    """Serve until a signal arrives; return the exit status. `told` is called once, after the first answer.

    SIGTERM and Ctrl-C drain: no new connections, requests under way finish within `drain_s`. A second Ctrl-C ends at once.
    """
    options.require_safe()
    if options.workers > 1:
        check(options)
        listening = bind(options)
        return supervise(replace(options, port=listening.getsockname()[1]), listening, told)
    app = create_app(options)  # before the port is taken: what cannot work is told first
    listening = bind(options)
    return run_app(app, replace(options, port=listening.getsockname()[1]), listening, told)


def bind(options: ServeOptions) -> socket.socket:
    """Open the listening socket. Raises UsageError if the port is in use or the address is not ours."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would let two services share the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host.strip("[]"), options.port))
        made.listen(BACKLOG)
    except OSError as exc:
        made.close()
        raise UsageError(
            f"cannot listen on {options.host}:{options.port}: {exc.strerror or exc}",
            hint="name another --port (0: any free one), or stop what uses it",
        ) from exc
    made.setblocking(False)
    return made
