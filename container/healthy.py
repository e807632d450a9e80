"""The container's health check: status 0 while the service is alive and answers, 1 otherwise. Standard library only."""

from __future__ import annotations

import sys
from urllib.error import URLError
from urllib.request import urlopen


def main(url: str = "http://127.0.0.1:8765/v1/healthz") -> int:
    try:
        with urlopen(url, timeout=4) as answer:
            return 0 if answer.status == 200 else 1
    except (URLError, OSError) as exc:
        sys.stderr.write(f"{url}: {exc}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
