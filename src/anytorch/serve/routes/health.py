"""/v1/readyz, /v1/healthz, /metrics and the models: is the service ready, does it still work, what can it do."""

from __future__ import annotations

import platform
import sys
import time
from typing import Any

from fastapi import APIRouter, Response

from anytorch._version import __version__
from anytorch.devices.choose import device_info
from anytorch.serve import schemas
from anytorch.serve.bodies import JsonRoute
from anytorch.serve.loaders import EMBEDDED
from anytorch.serve.metrics import CONTENT_TYPE
from anytorch.serve.models import JOBS, Slot, failure
from anytorch.serve.problems import Problem, problems
from anytorch.serve.state import Service, State

router = APIRouter(tags=["health"])
models = APIRouter(tags=["models"], route_class=JsonRoute)
UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": schemas.Health, "description": "not available now; `detail` says why"}
}


@router.head("/v1/readyz", include_in_schema=False)  # what some load balancers send
@router.get("/v1/readyz", responses=UNREADY)
async def readyz(service: Service, response: Response) -> schemas.Health:
    """200 if the service is ready for requests; 503 while it starts or drains."""
    health = health_of(service)
    response.status_code = 200 if health.status == "ready" else 503
    return health


@router.head("/v1/healthz", include_in_schema=False)
@router.get("/v1/healthz", responses=UNREADY)
async def healthz(service: Service, response: Response) -> schemas.Health:
    """200 if the service works; 503 if an engine stopped answering or the service has not started."""
    health = health_of(service)
    response.status_code = 200 if health.status in ("ready", "draining") else 503
    return health


def health_of(service: State) -> schemas.Health:
    # No key is asked for here, so no paths are told; /api/models has them.
    infos = [info.model_copy(update={"path": None}) for info in service.models.infos()]
    first = next((info for info in infos if info.loaded), None)
    status, detail = status_of(service)
    return schemas.Health(
        status=status,  # type: ignore[arg-type]
        device=first.device if first else None,
        device_warning=next((info.device_warning for info in infos if info.device_warning), None),
        models=schemas.ModelsByJob(**{job: [info for info in infos if info.job == job] for job in JOBS}),
        versions=schemas.Versions(anytorch=__version__, python=platform.python_version(), torch=torch_version()),
        uptime_seconds=round(time.monotonic() - service.started, 3),
        detail=detail or None,
        hint=hint_of(service) if detail else None,
    )


def status_of(service: State) -> tuple[str, str]:
    """The service's status. A model that does not load fails it only if it is required; the others are listed."""
    needed = service.needed()
    beside = []
    for job in JOBS:
        for slot in service.models.slots(job):
            if slot.model is not None and (why := slot.model.alive()):
                return "failed", f"{slot.wanted.id}: {why}"
            if slot.error is not None:
                said = why_failed(service, slot)
                if slot in needed:
                    return "failed", said
                beside.append(said)
    if why := service.pools.stuck():
        return "failed", why
    if service.draining:
        return "draining", "the service is stopping"
    # Those that are loaded in the background later do not keep the rest waiting.
    missing = [slot.wanted.id for slot in needed if slot.model is None]
    return ("starting", f"loading {', '.join(missing)}") if missing else ("ready", "; ".join(beside))


def why_failed(service: State, slot: Slot) -> str:
    """Why a model failed; without details for unauthenticated clients, since an error may name folders and users."""
    name, error = slot.wanted.id, slot.error
    assert error is not None
    if not service.options.loopback:
        return f"{name} cannot be loaded; the service's log says why"
    said = failure(error)
    return said if said.startswith(name) else f"{name}: {said}"


def hint_of(service: State) -> str | None:
    """The hint for the first model that cannot be loaded; required ones come first."""
    if not service.options.loopback:
        return None
    slots = [*service.needed(), *(slot for job in JOBS for slot in service.models.slots(job))]
    return next((hint for slot in slots if (hint := getattr(slot.error, "hint", ""))), None)


def torch_version() -> str | None:
    """The version of the installed torch, without importing it."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "__version__"):
        return str(torch.__version__)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


@router.get(
    "/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}, response_class=Response
)
async def metrics(service: Service) -> Response:
    """Requests, latencies, queues, batches, tokens and memory."""
    return Response(await service.pools.questions.run(service.metrics.text), media_type=CONTENT_TYPE)


# --- models ----------------------------------------------------------------------------------------------------------


@models.get("/v1/models", responses=problems(401))
async def listed(service: Service) -> schemas.OpenAIModels:
    """The loaded models, in OpenAI's format."""
    return schemas.OpenAIModels(
        data=[schemas.OpenAIModel(id=info.id, created=service.created) for info in service.models.infos()]
    )


@models.get("/v1/models/{name:path}", responses=problems(401, 404))
async def one(name: str, service: Service) -> schemas.OpenAIModel:
    """One of the loaded models, in OpenAI's format."""
    there = (await listed(service)).data
    for model in there:
        if model.id == name:
            return model
    raise Problem(
        404, "model-not-found", "Unknown model",
        f"{name[:200]!r} is not loaded; loaded: {', '.join(model.id for model in there) or 'none'}", param="model",
    )  # fmt: skip


@models.get("/api/models", responses=problems(401))
async def known(service: Service) -> schemas.Models:
    """The loaded models, and those that `POST /api/load-model` would load."""
    infos = service.models.infos()
    have: set[tuple[str, str]] = {(info.job, info.id) for info in infos}
    for found in (await service.pools.questions.run(service.models.loadable)).values():
        if (found.job, found.id) not in have and not found.refused:
            infos.append(schemas.ModelInfo(id=found.id, job=found.job, path=str(found.path)))  # type: ignore[arg-type]
            have.add((found.job, found.id))
    for job, name in EMBEDDED.items():
        if (job, name) not in have:
            infos.append(schemas.ModelInfo(id=name, job=job))  # type: ignore[arg-type]
    return schemas.Models(models=infos)


@models.post("/api/load-model", responses=problems(400, 401, 404, 422, 429, 503))
async def load(asked: schemas.LoadModelRequest, service: Service) -> schemas.LoadModelAnswer:
    """Load a model of the configured folders, or load one again on another device; it becomes its job's default.

    Requests under way finish on the engine they began with, and new ones use it until the new engine is ready.
    """
    began = time.perf_counter()
    slot = await service.models.load(asked.model, asked.job, asked.device, asked.quantization, done=service.tell_others)
    info = slot.info(default=True)
    facts = await service.pools.questions.run(device_info)
    return schemas.LoadModelAnswer(
        model=info,
        device=info.device or "",
        device_warning=info.device_warning,
        device_info=facts,
        seconds=round(time.perf_counter() - began, 3),
    )
