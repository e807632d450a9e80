"""`uvicorn services.kronos_fastapi.main:app`: the anytorch service with the embedded forecasting model.

KRONOS_DEVICE names the device ("auto" by default). Without keys it answers on this machine's own names alone, whatever
address uvicorn listens on: set ANYTORCH_API_KEY_FILE to let others in.
"""

from pathlib import Path

from anytorch import settings
from anytorch.serve.app import create_app
from anytorch.serve.options import ServeOptions

_named = settings.get("api_key_file")
_keys = Path(_named).expanduser() if _named else None
app = create_app(ServeOptions(models=("tiny",), host="0.0.0.0" if _keys else "127.0.0.1", api_key_file=_keys))
