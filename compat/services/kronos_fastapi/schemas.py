"""The bodies of the service; `ReadyResponse` has the device's fields."""

from anytorch.serve.schemas import ForecastAnswer, ForecastRequest
from anytorch.serve.schemas import Health as ReadyResponse

__all__ = ["ForecastAnswer", "ForecastRequest", "ReadyResponse"]
