"""The options of `anytorch serve`, checked in one place."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, fields
from pathlib import Path

from anytorch import limits
from anytorch.errors import UsageError

HOST, PORT = "127.0.0.1", 8765
MIB = 2**20


LIMITS: dict[str, limits.Limit] = {
    "port": limits.PORT,
    "workers": limits.PROCESSES,
    "threads": limits.THREADS,
    "rate_limit": limits.REQUESTS_PER_SECOND,
    **dict.fromkeys(("drain_s", "drain_delay_s"), limits.SECONDS_OR_NONE),
    **dict.fromkeys(
        ("timeout_s", "max_waiting_s", "header_timeout_s", "body_timeout_s", "keep_alive_s"), limits.SECONDS
    ),
    **dict.fromkeys(
        ("max_body_nbytes", "max_texts", "max_request_tokens", "max_waiting_tokens", "max_forecast_rows",
         "max_forecast_samples", "max_forecast_steps", "max_new_tokens", "max_connections"), limits.COUNT,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ServeOptions:
    """How the service runs. Every field is a flag of `anytorch serve`; the defaults suit one person on one machine."""

    host: str = HOST
    port: int = PORT
    # models
    models: tuple[str, ...] = ()  # folders or names; each finds its own job. Empty: the embedded ones
    text_model: str | None = None  # a folder with a causal language model
    tokenizer: str | None = None  # of the forecasting model of `models`, where its folder does not say
    model_folders: tuple[Path, ...] = ()  # what /api/load-model may load from; nothing else
    device: str = "auto"
    quantization: str | None = None
    threads: int | None = None  # of the CPU, of each worker
    forecast: bool = True  # load the embedded forecasting model (after the page answers)
    text: bool = True  # answer by the embedded language model where no other is named; loaded by the first request
    # processes
    workers: int = 1
    drain_s: float = 30.0  # how long requests under way may still take after SIGTERM
    drain_delay_s: float = 0.0  # how long readyz says "draining" before the port is closed
    # who may ask
    api_key_file: Path | None = None
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    rate_limit: float | None = None  # requests a second, per key (without keys: per address)
    # how much
    max_body_nbytes: int = 16 * MIB
    max_texts: int = 2048
    max_request_tokens: int = 300_000
    max_waiting_tokens: int = 400_000
    max_waiting_s: float = 10.0  # what waits may take so long to compute, as measured; then 429
    max_forecast_rows: int = 20_000
    max_forecast_samples: int = 200
    max_forecast_steps: int = 1_000
    max_new_tokens: int = 4_096
    timeout_s: float = 60.0  # of a request; a client may ask for less with X-Request-Timeout
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    max_connections: int = 2048
    # the rest
    page: bool = True
    run_folder: Path | None = None  # set by the supervisor: what its workers share
    access_log: bool = False

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            if (value := getattr(self, name)) is not None:
                limit.check(name, value)
        for folder in self.model_folders:
            if not folder.is_dir():
                raise UsageError(f"--model-folder {folder}: there is no such folder")
        for origin in self.allow_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise UsageError(f"--allow-origin {origin}: write it whole, as https://example.org")

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the host address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        host = self.host if self.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def require_safe(self) -> None:
        """Raise UsageError where the service would be open to the network without a key."""
        if not self.loopback and self.api_key_file is None:
            raise UsageError(
                f"--host {self.host} admits other machines without an API key",
                hint="make keys with `anytorch serve --new-key keys.txt`, then --api-key-file keys.txt; "
                "or leave --host at 127.0.0.1",
            )


PATHS = ("model_folders", "api_key_file", "run_folder")


def to_json(options: ServeOptions) -> str:
    """For a worker's command line; `from_json` is the way back."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return json.dumps(values, default=str)


def from_json(text: str) -> ServeOptions:
    values = json.loads(text)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(Path(item) if name in PATHS else item for item in value)
        elif name in PATHS and value is not None:
            values[name] = Path(value)
    return ServeOptions(**values)
