"""`anytorch serve`: the service and its web page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import add_options

PACKAGES = {
    *("fastapi", "starlette", "uvicorn", "httptools", "orjson", "prometheus_client", "pydantic", "numpy", "tokenizers"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        "where",
        ("--host ADDRESS", "127.0.0.1", "address to listen on (default: 127.0.0.1, this machine only)"),
        ("--port N", 8765, limits.PORT, "port; 0: any free one (default: 8765)"),
        ("--workers N", 1, limits.PROCESSES, "processes that share the port (default: 1)"),
        ("--no-browser", "do not open the page in a browser"),
        "models",
        (
            "--model NAME",
            {"action": "append", "default": []},
            "a folder or a name, for embeddings, forecasts or text; may be repeated (default: the built-in models)",
        ),
        ("--text-model FOLDER", "a causal language model for /v1/completions (default: the built-in one)"),
        ("--tokenizer NAME", "tokenizer of the forecasting model (default: the one its folder names)"),
        (
            "--model-folder FOLDER",
            {"action": "append", "default": [], "type": Path},
            "a folder POST /api/load-model may load from; may be repeated (default: none)",
        ),
        ("--no-forecast", "do not load the built-in forecasting model"),
        ("--no-text", "do not offer the built-in language model"),
        ("--device DEVICE", "auto", "where to run (default: the best one)"),
        ("--quantization FORMAT", "format of the embedding model's weights: int8, int4, int2, fp4"),
        ("--threads N", limits.THREADS, "CPU threads of each process (default: all cores, shared)"),
        "access",
        ("--api-key-file FILE", Path, "API keys, one per line (`name:key`); required unless the address is loopback"),
        ("--new-key FILE", Path, "append a new key to this file, print it, and exit"),
        (
            "--allow-origin URL",
            {"action": "append", "default": []},
            "a web origin whose pages may send requests (CORS)",
        ),
        ("--allow-host NAME", {"action": "append", "default": []}, "another host name of this service"),
        ("--rate-limit N", limits.REQUESTS_PER_SECOND, "requests per second and key (default: no limit)"),
        "limits",
        ("--max-body SIZE", "16MB", "largest request body (default: 16MiB)"),
        ("--max-texts N", 2048, limits.COUNT, "most texts in a request (default: 2048)"),
        ("--max-tokens N", 300_000, limits.COUNT, "most tokens in a request (default: 300000)"),
        ("--max-waiting-tokens N", 400_000, limits.COUNT, "most tokens in the queue; then 429 (default: 400000)"),
        ("--max-waiting SECONDS", 10.0, limits.SECONDS, "most seconds of work in the queue; then 429 (default: 10)"),
        ("--timeout SECONDS", 60.0, limits.SECONDS, "time limit of a request (default: 60)"),
        ("--drain SECONDS", 30.0, limits.SECONDS_OR_NONE, "time to finish running requests at shutdown (default: 30)"),
        (
            "--drain-delay SECONDS",
            0.0,
            limits.SECONDS_OR_NONE,
            "seconds to report `draining` before the port closes, for a load balancer (default: 0)",
        ),
        "scaling out",
        (
            "--ray ADDRESS",
            {"nargs": "?", "const": "local"},
            "run on Ray Serve, on this cluster (auto, ray://host:10001) or on a new local one",
        ),
        ("--replicas N|MIN:MAX", "with --ray: number of replicas (default: 1:, up to the number of devices)"),
    )
    parser.add_argument("--access-log", action="store_true", help="log every request on standard error")


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.errors import UsageError
    from anytorch.serve.keys import add_key

    if options.new_key is not None:
        key = add_key(options.new_key)
        output.answer({"key": key, "file": str(options.new_key)}, key)
        if not output.json:
            output.note(f"appended to {options.new_key}; start with --api-key-file {options.new_key}")
        return 0
    try:
        from anytorch.serve.server import serve
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in PACKAGES:
            raise
        raise UsageError(f"the service needs the package {exc.name}", hint="pip install 'anytorch[serve]'") from exc
    chosen = serve_options(options)

    def told(started: Any) -> None:
        show(started, options, output)

    if options.replicas is not None and options.ray is None:
        raise UsageError("--replicas needs --ray", hint="on one machine, --workers shares the port among processes")
    if options.ray is not None:
        from anytorch.serve.ray.deploy import parse_scale, serve_on_ray

        scale = parse_scale(options.replicas)
    if not output.json:
        output.note(f"starting on {chosen.url if chosen.port else chosen.host} …")
    if options.ray is not None:
        return serve_on_ray(chosen, told, address=options.ray, scale=scale)
    return serve(chosen, told)


def serve_options(options: argparse.Namespace) -> Any:
    from anytorch import settings
    from anytorch.cli.requests import named_device
    from anytorch.errors import UsageError
    from anytorch.serve.options import ServeOptions

    try:
        nbytes = settings.parse_nbytes(options.max_body)
    except ValueError as exc:
        raise UsageError(f"--max-body {options.max_body}: {exc}", hint="write it as 16MiB") from exc
    named = settings.get("api_key_file")
    same = (
        "host",
        "port",
        "text_model",
        "tokenizer",
        "quantization",
        "threads",
        "workers",
        "rate_limit",
        "max_texts",
        "access_log",
    )
    return ServeOptions(
        **{name: getattr(options, name) for name in (*same, "max_waiting_tokens")},
        models=tuple(options.model),
        model_folders=tuple(options.model_folder),
        device=named_device(options.device, "--device"),
        forecast=not options.no_forecast,
        text=not options.no_text,
        drain_s=options.drain,
        drain_delay_s=options.drain_delay,
        api_key_file=options.api_key_file or (Path(named).expanduser() if named else None),
        allow_origins=tuple(options.allow_origin),
        allow_hosts=tuple(options.allow_host),
        max_body_nbytes=nbytes,
        max_request_tokens=options.max_tokens,
        max_waiting_s=options.max_waiting,
        timeout_s=options.timeout,
    )


def show(started: Any, options: argparse.Namespace, output: Output) -> None:
    """The start line, once the first request has been answered."""
    if output.json:
        output.data(
            {
                "url": started.url,
                "device": started.device,
                "device_warning": started.device_warning,
                "models": started.models,
                "workers": started.workers,
                "seconds_to_first_answer": started.seconds,
                "pid": os.getpid(),
            }
        )
    else:
        models = ", ".join(f"{job}: {', '.join(names)}" for job, names in started.models.items() if names)
        output.text(f"anytorch is ready at {started.url}")
        output.text(f"  device {started.device}; {models}")
        output.text(f"  first request answered {started.seconds:.2f} s after the process started; Ctrl-C stops it")
        if started.device_warning:
            output.warn(started.device_warning)
    if sys.stdout is not None:
        sys.stdout.flush()
    if not options.no_browser and has_display():
        import webbrowser

        webbrowser.open(started.url)


def has_display() -> bool:
    """True if a browser can be shown: standard output is a terminal and there is a display."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ
