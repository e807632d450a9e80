"""POST /v1/embeddings, compatible with OpenAI, /v1/similarity and /v1/search.

The first is the hot path: parsed and written directly, without pydantic or a thread.

A short request is tokenized on the event loop (tens of microseconds) and handed to the engine's queue, whose worker
computes it together with what else is there; the answer's bytes are written from the array at once.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import orjson
from fastapi import APIRouter, Response

from anytorch.serve import schemas
from anytorch.serve.bodies import JsonRoute, parse_json
from anytorch.serve.limits import SECURITY, Call, ClientGone, Guard, within
from anytorch.serve.loaders import EmbeddingModel
from anytorch.serve.metrics import Metrics
from anytorch.serve.models import Registry
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem, json_answer, problems, reading
from anytorch.serve.state import Service, State
from anytorch.serve.threads import Pools, go_on
from anytorch.text.embed.compare import nearest, prepared, project_to_plane, scores
from anytorch.text.embed.cutting import WINDOW
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.tokens import Tokens, pack_ids

T = TypeVar("T")
PATH = "/v1/embeddings"
ON_LOOP_CHARACTERS = 4_000  # more than that is tokenized in a thread: others must not wait for it
AT_ONCE_CHARACTERS = 250_000  # that are tokenized in one call: it takes half a kilobyte for each
LONGEST_TEXT = 400_000  # characters of a text that cannot be cut before it is tokenized
LONGEST_PROMPT = 10_000  # characters; the prompt is put before every text
WATCH_AFTER_S = 0.02  # an answer that comes sooner needs nobody to watch whether the client has gone
PRECISIONS = ("float32", "float16", "int8", "binary", "ubinary")
JSON = (b"content-type", b"application/json")
TAIL = [JSON, *SECURITY]


class Asked(NamedTuple):
    texts: list[str] | None
    ids: list[list[int]] | None
    model: str | None
    dim: int | None
    base64: bool
    prompt: str | None
    precision: str


FIELDS = frozenset(schemas.EmbeddingsRequest.model_fields)


def parse(body: bytes, options: ServeOptions) -> Asked:
    """The request in a body. Raises a Problem that names the field."""
    try:
        data = parse_json(body)
    except orjson.JSONDecodeError as exc:
        raise Problem(400, "not-json", "The body is not JSON", f"the body is not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise _invalid("input", "the body must be a JSON object with the field `input`")
    if "input" not in data:
        raise _invalid("input", "the field `input` is missing")
    if unknown := data.keys() - FIELDS:
        name = min(unknown)
        raise _invalid(name[:60], f"`{name[:60]}` is not a field of this end point")
    texts, ids = _input(data["input"], options.max_texts)
    model, prompt, precision = data.get("model"), data.get("prompt"), data.get("precision") or "float32"
    dim, form = data.get("dimensions"), data.get("encoding_format") or "float"
    if model is not None and not isinstance(model, str):
        raise _invalid("model", "`model` must be text")
    if prompt is not None and not isinstance(prompt, str):
        raise _invalid("prompt", "`prompt` must be text")
    if prompt is not None and len(prompt) > LONGEST_PROMPT:
        raise _invalid("prompt", f"`prompt` has {len(prompt)} characters; the limit is {LONGEST_PROMPT}")
    if dim is not None and (type(dim) is not int or dim < 1):
        raise _invalid("dimensions", "`dimensions` must be a whole number above 0")
    if form not in ("float", "base64"):
        raise _invalid("encoding_format", "`encoding_format` must be float or base64")
    if precision not in PRECISIONS:
        raise _invalid("precision", f"`precision` must be one of {', '.join(PRECISIONS)}")
    if ids is not None and prompt:
        raise _invalid("prompt", "`prompt` works with texts only; token ids are used as they are")
    return Asked(texts, ids, model, dim, form == "base64", prompt, precision)


def _input(given: Any, most: int) -> tuple[list[str] | None, list[list[int]] | None]:
    if isinstance(given, str):
        return [given], None
    if not isinstance(given, list) or not given:
        raise _invalid("input", "`input` must be a text, a list of texts, token ids, or a list of lists of token ids")
    kind = type(given[0])
    if kind is int:
        given, kind = [given], list
    if len(given) > most:
        raise Problem(
            413, "too-many-texts", "Too many texts", f"`input` has {len(given)} texts; the limit is {most}",
            hint="send them in several requests: the service batches waiting ones", param="input",
        )  # fmt: skip
    if kind is str and all(type(text) is str for text in given):
        return given, None
    if kind is list and all(type(row) is list for row in given):
        return None, given
    raise _invalid("input", "`input` mixes kinds: use only texts or only lists of token ids")


def _invalid(field: str, words: str) -> Problem:
    return Problem(422, "invalid-body", "The body is invalid", words, param=field)


def answer(vectors: Any, asked: Asked, model: str, tokens: int) -> bytes:
    """The JSON of an answer. orjson writes NumPy rows itself: ten times faster than a list of floats."""
    # OpenAI's clients ask for base64 unasked and take what comes for float32; numbers they leave as they are.
    if asked.base64 and asked.precision == "float32":
        rows: list[Any] = [base64.b64encode(row).decode() for row in vectors]
    else:
        rows = list(vectors)
    return orjson.dumps(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


class Embeddings:
    """The end point. One per app; called with the Call that `Guard` made."""

    def __init__(self, models: Registry, options: ServeOptions, metrics: Metrics, pools: Pools) -> None:
        self._models, self._options, self._metrics, self._pools = models, options, metrics, pools
        self.guard: Guard  # set by the app: it reads bodies

    async def __call__(self, call: Call) -> None:
        body = await self.guard.read(call)
        with reading("the body"):
            asked = parse(body, self._options)
        slot = self._models.slot("embeddings", asked.model)
        with self._models.use(slot):
            model = slot.model or await before_queueing(self._models.ready(slot), call)
            assert isinstance(model, EmbeddingModel)
            tokens = await self.tokens(model, asked, call)
            count = int(tokens.starts[-1])
            if count > self._options.max_request_tokens:
                raise Problem(
                    413, "too-many-tokens", "Too many tokens",
                    f"`input` has {count} tokens; the limit is {self._options.max_request_tokens}",
                    hint="send it in several requests", param="input",
                )  # fmt: skip
            left = call.timeout_s - (time.perf_counter() - call.started)
            if left <= 0:
                raise late(call)
            future = model.queue.submit_tokens(tokens, dim=asked.dim, precision=asked.precision, timeout_s=left)
            vectors = await awaited(future, call, left)
            made = answer(vectors, asked, model.info.id, count)
        self._metrics.embedding_tokens.inc(count)
        call.status = 200
        extra = TAIL if b"origin" not in call.headers else [JSON, *self.guard.extra_headers(call)]
        await call.send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(made)), *extra]}
        )
        await call.send({"type": "http.response.body", "body": made})

    async def tokens(self, model: EmbeddingModel, asked: Asked, call: Call) -> Tokens:
        began = time.perf_counter()
        if asked.ids is not None:
            return pack_ids(asked.ids, vocabulary=model.vocabulary, max_length=model.engine.max_length)
        texts = asked.texts or []
        if sum(map(len, texts)) + len(asked.prompt or "") * len(texts) <= ON_LOOP_CHARACTERS:
            made: Tokens = model.engine.tokenize(texts, prompt=asked.prompt)
        else:
            made = await before_queueing(self._pools.texts.run(tokenize, model.engine, texts, asked.prompt), call)
        self._metrics.tokenized(time.perf_counter() - began)
        return made


def tokenize(engine: ArrowEngine, texts: list[str], prompt: str | None) -> Tokens:
    """The texts' tokens, made of some texts at a time: what the tokenizer needs meanwhile is bounded, and a request that
    nobody waits for any more ends between them. Call it in a thread."""
    made: list[Tokens] = []
    begin = characters = 0
    most = WINDOW * engine.max_length  # of a text, as a rule: see `cutting`
    for place, text in enumerate(texts):
        characters += min(len(prompt or "") + len(text), most)
        if characters >= AT_ONCE_CHARACTERS or place + 1 == len(texts):
            go_on()
            made.append(engine.tokenize(texts[begin : place + 1], prompt=prompt, first=begin, longest=LONGEST_TEXT))
            begin, characters = place + 1, 0
    return made[0] if len(made) == 1 else Tokens.joined(made)


def late(call: Call) -> TimeoutError:
    return TimeoutError(f"not computed within {call.timeout_s:g} s")


async def before_queueing(work: Coroutine[Any, Any, T], call: Call) -> T:
    """Await slow work for as long as the request's time lasts."""
    left = call.timeout_s - (time.perf_counter() - call.started)
    return await within(work, call, max(0.0, left), "computed")


async def awaited(future: Future[Any], call: Call, timeout_s: float) -> Any:
    """Await the queue's answer on the event loop; withdraw the request when its time is up or the client has gone."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    watcher: asyncio.Future[Any] | None = None
    gone = False

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def done(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            pass

    def left(watched: asyncio.Future[Any]) -> None:
        nonlocal gone
        if not watched.cancelled() and watched.exception() is None and watched.result()["type"] == "http.disconnect":
            gone = True
            wake()

    def watch() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(call.receive())
        watcher.add_done_callback(left)

    future.add_done_callback(done)
    watching = loop.call_later(min(WATCH_AFTER_S, timeout_s), watch)
    timer = loop.call_later(max(0.0, timeout_s), wake)
    try:
        await waiter
    finally:
        watching.cancel()
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
        if not future.done():
            future.cancel()
    if gone:
        raise ClientGone
    if future.cancelled():
        raise late(call)
    return future.result()


# --- texts compared with texts, by the loaded embedding model ---------------------------------------------------------

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

        document = await service.pools.texts.run(compute)
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

        results = await service.pools.texts.run(compute)
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
        tokens = await self._service.pools.texts.run(tokenize, self.model.engine, texts, prompt)
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
