"""`uvicorn services.kronos_fastapi.main:app`, or `python -m services.kronos_fastapi.main --model kronos-small --port 8000`.

The anytorch service with a forecasting model, and the paths of the original web page beside its own. What it serves comes
from KRONOS_MODEL, KRONOS_TOKENIZER, KRONOS_MODEL_FOLDER, KRONOS_DATA_FOLDER, KRONOS_DEVICE and KRONOS_API_KEY_FILE (see
`config`), or from arguments of the same names. Without keys it answers to this machine's own names alone, whatever address
uvicorn listens on.
"""

import os
import sys

from services.kronos_fastapi.config import KronosOptions, parse
from services.kronos_fastapi.page import page_routes

from anytorch.serve.app import Service, create_app


def application(options: KronosOptions) -> Service:
    return create_app(options.serve, routers=[page_routes(options.data_folder)])


if __name__ == "__main__":
    import uvicorn

    from anytorch.errors import AnytorchError

    try:
        chosen = parse(sys.argv[1:], os.environ)
        served = application(chosen)
    except AnytorchError as exc:
        sys.exit(f"{exc.message}\n{exc.hint}" if exc.hint else exc.message)
    uvicorn.run(served, host=chosen.serve.host, port=chosen.serve.port)
else:
    app = application(parse([], os.environ))
