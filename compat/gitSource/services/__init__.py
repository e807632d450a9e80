"""The document starts the service from this folder; its code lies beside it, in `services/`."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "services")]
