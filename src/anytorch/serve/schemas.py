"""The bodies of every end point; those that write text are in `text_schemas`. /v1/embeddings only documents itself with
them: its bytes are read and written directly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from anytorch import limits

JobName = Literal["embeddings", "forecast", "text"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=2_000_000)]
# Where reading a list ends, whatever the options allow: millions of tiny items would hold up the event loop.
MOST_TEXTS = 65_536
MOST_ROWS = 1_000_000
MOST_WORDS = 256  # of a list that people write: stops, workloads


class Body(BaseModel):
    """A request body. An unknown field is refused by its name: it may be a misspelt one that was meant to act."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


# --- errors ------------------------------------------------------------------------------------------------------------


class OpenAIError(Answer):
    message: str
    type: str
    code: str | None = None
    param: str | None = None


class Problem(Answer):
    """application/problem+json (RFC 9457). The OpenAI end points also carry `error`."""

    type: str = Field(examples=["urn:anytorch:problem:queue-full"])
    title: str
    status: int
    detail: str
    hint: str | None = None
    instance: str | None = None
    error: OpenAIError | None = None


# --- health and models -------------------------------------------------------------------------------------------------


class ModelInfo(Answer):
    id: str
    job: JobName
    device: str | None = None
    device_warning: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    path: str | None = None
    parameters: int | None = None
    dim: int | None = None
    max_length: int | None = None
    chat: bool | None = None  # of a text model: it has a chat template
    default: bool = False
    loaded: bool = False


class ModelsByJob(Answer):
    embeddings: list[ModelInfo] = []
    forecast: list[ModelInfo] = []
    text: list[ModelInfo] = []


class Versions(Answer):
    anytorch: str
    python: str
    torch: str | None = None


class Health(Answer):
    status: Literal["starting", "ready", "draining", "failed"]
    device: str | None
    device_warning: str | None = None
    models: ModelsByJob
    versions: Versions
    uptime_seconds: float
    detail: str | None = None  # why it is not ready, or no longer healthy
    hint: str | None = None  # what to do about it


class OpenAIModel(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "anytorch"


class OpenAIModels(Answer):
    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class Models(Answer):
    models: list[ModelInfo]


class LoadModelRequest(Body):
    model: str = Field(min_length=1, max_length=400, description="an id of /api/models")
    job: JobName | None = None
    device: str | None = Field(None, max_length=100)
    quantization: str | None = Field(None, max_length=40)


class LoadModelAnswer(Answer):
    model: ModelInfo
    device: str
    device_warning: str | None = None
    device_info: dict[str, Any]
    seconds: float


# --- devices -----------------------------------------------------------------------------------------------------------


class Fact(Answer):
    label: str
    value: str


class Memory(Answer):
    used: int | None = None
    total: int | None = None
    source: str = ""


class Reason(Answer):
    code: str
    severity: Literal["error", "warning", "note"]
    title: str
    detail: str = ""
    fix: list[str] = []
    page: str | None = None


class Device(Answer):
    id: str
    backend: str
    title: str
    state: str
    best: bool = False
    usable: bool = False
    facts: list[Fact] = []
    memory: Memory | None = None
    utilisation: float | None = None
    reasons: list[Reason] = []


class ChosenDevice(Answer):
    device: str | None
    why: str


class Devices(Answer):
    devices: list[Device]
    choice: ChosenDevice
    tried: bool = True  # False: only what files tell so far; they are being tried, so ask again in a moment


class LiveDevice(Answer):
    id: str
    memory: Memory | None = None
    utilisation: float | None = None


class LiveDevices(Answer):
    devices: list[LiveDevice]


class Findings(Answer):
    findings: list[Reason]
    tried: bool = True


# --- embeddings --------------------------------------------------------------------------------------------------------


class EmbeddingsRequest(Body):
    input: str | list[str] | list[int] | list[list[int]] = Field(
        description="one text, texts, or token ids of the model's own tokenizer (special tokens included)"
    )
    model: str | None = Field(None, description="an id of /v1/models; default: the default model")
    dimensions: int | None = Field(
        None, ge=1, le=limits.DIMENSIONS.most, description="keep only the first N dimensions, normalised again"
    )
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    prompt: str | None = Field(
        None, description='one of the model\'s prompts by name ("query"), or a text to put before each'
    )
    precision: Literal["float32", "float16", "int8", "binary", "ubinary"] = "float32"


class Usage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(Answer):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class SimilarityRequest(Body):
    a: list[Text] = Field(min_length=1, max_length=MOST_TEXTS)
    b: list[Text] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
    map: bool = Field(False, description="also place the texts of `a` on a plane")
    model: str | None = None


class SimilarityAnswer(Answer):
    similarity: list[list[float]]
    map: list[tuple[float, float]] | None = None
    model: str
    seconds: float
    usage: Usage


class SearchRequest(Body):
    queries: list[Text] = Field(min_length=1, max_length=MOST_TEXTS)
    corpus: list[Text] = Field(min_length=1, max_length=MOST_TEXTS)
    k: int = Field(10, ge=1, le=1000)
    model: str | None = None


class SearchHit(Answer):
    index: int
    score: float
    text: str


class SearchAnswer(Answer):
    results: list[list[SearchHit]]
    model: str
    seconds: float
    usage: Usage


# --- forecasts ---------------------------------------------------------------------------------------------------------

Column = Annotated[list[Finite], Field(max_length=MOST_ROWS)]


class Candles(Body):
    timestamps: list[str] = Field(min_length=2, max_length=MOST_ROWS)
    open: Column
    high: Column
    low: Column
    close: Column
    volume: Column | None = None
    amount: Column | None = None


class ForecastRequest(Body):
    """Forecast exactly one of `candles`, `values`, `csv` and `sample`."""

    candles: Candles | None = None
    values: Column | None = Field(None, min_length=2, description="a series of single values; its forecast is `close`")
    timestamps: list[str] | None = Field(None, max_length=MOST_ROWS, description="of `values`; without them, days")
    csv: str | None = None
    sample: bool = False
    horizon: int = Field(24, ge=1, le=limits.STEPS.most)
    samples: int = Field(20, ge=1, le=limits.PATHS.most)
    quantiles: list[Annotated[float, Field(ge=0, le=1)]] = Field([0.1, 0.5, 0.9], max_length=20)
    seed: int | None = Field(None, ge=0, lt=2**63)
    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    lookback: int | None = Field(None, ge=2, le=limits.WINDOW.most)
    return_samples: bool = False
    repair: bool = Field(False, description="repair faulty data, and report each repair")
    symbol: str | None = None
    timezone: str | None = Field(None, min_length=1, max_length=64)
    model: str | None = None


class Series(Answer):
    timestamps: list[str]
    open: list[float]
    high: list[float]
    low: list[float]
    close: list[float]
    volume: list[float] | None = None
    amount: list[float] | None = None


class Columns(Answer):
    open: list[float]
    high: list[float]
    low: list[float]
    close: list[float]
    volume: list[float]
    amount: list[float]


class ForecastAnswer(Answer):
    name: str
    history: Series
    forecast: Series
    quantiles: dict[str, Columns]
    samples: list[Columns] | None = None
    device: str
    device_warning: str | None = None
    model: str
    seconds: float
    guessed: list[str]
    warnings: list[str] = []


# --- measuring ---------------------------------------------------------------------------------------------------------


class BenchmarkRequest(Body):
    devices: list[str] | None = Field(None, min_length=1, max_length=32)
    seconds: float = Field(10.0, gt=0, le=600)
    workloads: list[str] | None = Field(None, max_length=MOST_WORDS)
    keep_s: float = Field(0.0, ge=0, le=60, description="seconds it keeps running without a reader, who may reconnect")


class RunningBenchmark(Answer):
    """`seconds` is null where none runs."""

    seconds: float | None = None
    devices: list[str] | None = None


class BenchmarkRow(Answer):
    """The data of a `result` event, and a row of an earlier run."""

    device: str
    test: str
    rate: float
    unit: str
    limit: float | None = None
    share: float | None = None


class BenchmarkRun(Answer):
    run_id: str
    when: str
    seconds: float
    partial: bool = False
    torch: str | None = None
    rows: list[BenchmarkRow]
    problems: list[str] = []


class BenchmarkRuns(Answer):
    runs: list[BenchmarkRun]


class Candidate(Answer):
    name: str
    seconds: float | None = None
    chosen: bool = False
    correct: bool = True
    error: float | None = None
    reason: str | None = None  # why it was not timed


class Graph(Answer):
    id: str
    title: str
    device: str
    kind: str
    picture_svg: str | None = None  # in the answer about one graph alone
    candidates: list[Candidate] = []
    speedup: float | None = None  # of a kernel graph: over eager torch; else over the slowest right candidate
    when: str | None = None
    # Of a kernel graph:
    sizes: dict[str, int] | None = None
    kernels: int | None = None  # that were generated
    picture: str | None = None  # where it is


class GraphStep(Answer):
    """A generated kernel, a hand-written one (a source file, no text), or ops that torch computes (neither)."""

    ops: list[str]
    schedule: str | None = None
    nbytes: int | None = None
    seconds: float | None = None
    language: str | None = None
    text: str | None = None
    source: str | None = None


class WholeGraph(Graph):
    why: str = ""
    graph: dict[str, Any] | None = None  # as KernelGraph.to_json writes it
    least_nbytes: int | None = None
    steps: list[GraphStep] = []
    kernel_choices: list[Graph] = []  # what was measured for single kernels


class Graphs(Answer):
    graphs: list[Graph]
