"""`/v1/readyz` and the forecast's end point."""

from anytorch.serve.routes.forecast import router as forecast_router
from anytorch.serve.routes.health import router

__all__ = ["forecast_router", "router"]
