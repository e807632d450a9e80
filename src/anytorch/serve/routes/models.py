"""GET /v1/models, GET /api/models and POST /api/load-model."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request

from anytorch.devices.choose import device_info
from anytorch.serve import schemas
from anytorch.serve.limits import JsonRoute
from anytorch.serve.loaders import EMBEDDED
from anytorch.serve.problems import Problem, problems
from anytorch.serve.state import Service

router = APIRouter(tags=["models"], route_class=JsonRoute)


@router.get("/v1/models", responses=problems(401))
async def listed(service: Service) -> schemas.OpenAIModels:
    """The loaded models, in OpenAI's format."""
    return schemas.OpenAIModels(
        data=[schemas.OpenAIModel(id=info.id, created=service.created) for info in service.models.infos()]
    )


@router.get("/v1/models/{name:path}", responses=problems(401, 404))
async def one(name: str, request: Request) -> schemas.OpenAIModel:
    """One of the loaded models, in OpenAI's format."""
    there = (await listed(request)).data
    for model in there:
        if model.id == name:
            return model
    raise Problem(
        404, "model-not-found", "Unknown model",
        f"{name!r} is not loaded; loaded: {', '.join(model.id for model in there) or 'none'}", param="model",
    )  # fmt: skip


@router.get("/api/models", responses=problems(401))
async def known(service: Service) -> schemas.Models:
    """The loaded models, and those that `POST /api/load-model` would load."""
    infos = service.models.infos()
    have: set[tuple[str, str]] = {(info.job, info.id) for info in infos}
    for found in (await asyncio.to_thread(service.models.loadable)).values():
        if (found.job, found.id) not in have and not found.refused:
            infos.append(schemas.ModelInfo(id=found.id, job=found.job, path=str(found.path)))  # type: ignore[arg-type]
            have.add((found.job, found.id))
    for job, name in EMBEDDED.items():
        if (job, name) not in have:
            infos.append(schemas.ModelInfo(id=name, job=job))  # type: ignore[arg-type]
    return schemas.Models(models=infos)


@router.post("/api/load-model", responses=problems(400, 401, 404, 422, 429, 503))
async def load(asked: schemas.LoadModelRequest, service: Service) -> schemas.LoadModelAnswer:
    """Load a model of the configured folders, or load one again on another device; it becomes its job's default.

    Requests under way finish on the engine they began with, and new ones use it until the new engine is ready.
    """
    began = time.perf_counter()
    slot = await service.models.load(asked.model, asked.job, asked.device, asked.quantization, done=service.tell_others)
    info = slot.info(default=True)
    facts = await asyncio.to_thread(device_info)
    return schemas.LoadModelAnswer(
        model=info,
        device=info.device or "",
        device_warning=info.device_warning,
        device_info=facts,
        seconds=round(time.perf_counter() - began, 3),
    )
