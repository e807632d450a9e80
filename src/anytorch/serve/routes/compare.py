"""POST /v1/similarity and /v1/search: texts compared with texts, by the loaded embedding model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Response

from anytorch.serve import schemas
from anytorch.serve.limits import JsonRoute
from anytorch.serve.loaders import EmbeddingModel
from anytorch.serve.problems import Problem, json_answer, problems
from anytorch.serve.state import Service, State
from anytorch.text.embed.compare import nearest, prepared, scores
from anytorch.text.embed.projection import project_to_plane
from anytorch.text.embed.tokens import Tokens

router = APIRouter(tags=["embeddings"], route_class=JsonRoute)
CELLS = 4_000_000  # of a similarity matrix: 32 MB of JSON
HITS = 100_000  # of all queries of a search together


@router.post(
    "/v1/similarity",
    responses={200: {"model": schemas.SimilarityAnswer}, **problems(401, 404, 413, 422, 429, 503, 504)},
)
async def similarity(asked: schemas.SimilarityRequest, service: Service) -> Response:
    """Similarity of each of `a` with each of `b` (`a` itself when left out), by the model's own measure."""
    began = time.perf_counter()
    if len(asked.a) * len(asked.b or asked.a) > CELLS:
        raise too_many(
            f"the matrix would have {len(asked.a)} × {len(asked.b or asked.a)} numbers; the limit is {CELLS}"
        )
    async with encoding_with(service, asked.model) as encoding:
        left = await encoding.vectors(asked.a)
        right = None if asked.b is None else await encoding.vectors(asked.b)
        kind = encoding.model.engine.recipe.similarity

        def compute() -> dict[str, Any]:
            ready = prepared(left, kind, "float32")
            other = ready if right is None else prepared(right, kind, "float32")
            document: dict[str, Any] = {"similarity": scores(ready, other, kind)}
            if asked.map:
                document["map"] = project_to_plane(left)
            return document

        document = await asyncio.to_thread(compute)
        return json_answer({**document, **encoding.facts(), "seconds": round(time.perf_counter() - began, 4)})


@router.post(
    "/v1/search", responses={200: {"model": schemas.SearchAnswer}, **problems(401, 404, 413, 422, 429, 503, 504)}
)
async def search(asked: schemas.SearchRequest, service: Service) -> Response:
    """The `k` texts of the corpus that are nearest in meaning to each query, best first."""
    began = time.perf_counter()
    hits = min(asked.k, len(asked.corpus))
    if len(asked.queries) * hits > HITS:
        raise too_many(f"the answer would have {len(asked.queries)} × {hits} texts; the limit is {HITS}")
    # Every hit carries its text, so a few long texts found by every query make an answer many times the question.
    longest = sum(sorted((len(text) for text in asked.corpus), reverse=True)[:hits])
    if len(asked.queries) * longest > service.options.max_body_nbytes:
        raise too_many(
            f"the answer could hold {len(asked.queries)} × {longest} characters of text; the limit is "
            f"{service.options.max_body_nbytes}; ask for fewer with k"
        )
    async with encoding_with(service, asked.model) as encoding:
        queries = await encoding.vectors(asked.queries, "query")
        corpus = await encoding.vectors(asked.corpus, "passage")
        kind = encoding.model.engine.recipe.similarity

        def compute() -> list[list[dict[str, Any]]]:
            found = nearest(prepared(queries, kind, "float32"), prepared(corpus, kind, "float32"), asked.k, kind)
            return [[{"index": int(n), "score": float(s), "text": asked.corpus[n]} for n, s in hits] for hits in found]

        results = await asyncio.to_thread(compute)
        return json_answer({"results": results, **encoding.facts(), "seconds": round(time.perf_counter() - began, 4)})


@asynccontextmanager
async def encoding_with(service: State, name: str | None) -> AsyncIterator[Encoding]:
    """The embedding model a request means, held while it is used."""
    slot = service.models.slot("embeddings", name)
    with service.models.use(slot):
        model = await service.models.ready(slot)
        assert isinstance(model, EmbeddingModel)
        yield Encoding(service, model)


class Encoding:
    """A model at work for one request, and the tokens it has cost so far."""

    def __init__(self, service: State, model: EmbeddingModel) -> None:
        self._service, self.model = service, model
        self.tokens = 0

    async def vectors(self, texts: list[str], prompt: str | None = None) -> Any:
        options = self._service.options
        if len(texts) > options.max_texts:
            raise too_many(f"{len(texts)} texts; the limit is {options.max_texts}")
        tokens: Tokens = await asyncio.to_thread(self.model.engine.tokenize, texts, prompt=prompt)
        count = int(tokens.starts[-1])
        self.tokens += count
        if self.tokens > options.max_request_tokens:
            raise too_many(f"{self.tokens} tokens; the limit is {options.max_request_tokens}")
        found = await asyncio.wrap_future(self.model.queue.submit_tokens(tokens))
        self._service.metrics.tokens("embeddings", count)
        return found

    def facts(self) -> dict[str, Any]:
        return {"model": self.model.info.id, "usage": {"prompt_tokens": self.tokens, "total_tokens": self.tokens}}


def too_many(words: str) -> Problem:
    return Problem(413, "too-much", "The request is too large", words, hint="send it in several requests")
