"""GET /v1/graphs: the choices made by measurement on this machine so far."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from anytorch.serve import schemas
from anytorch.serve.answers import problems
from anytorch.serve.tuned import tuned

router = APIRouter(tags=["devices"])


@router.get("/v1/graphs", responses=problems(401))
async def graphs() -> schemas.Graphs:
    """Kernels and layouts that were measured against each other, with what was chosen. An empty list is a normal answer."""
    return schemas.Graphs(graphs=await asyncio.to_thread(tuned))
