"""Which kernel graphs were searched and what came of it: a file for each beside its verdict, for people to look at.

    graph/records/KEY.json in the cache folder    the graph, its verdict, the chosen kernels with their text, a picture

KEY is that of the verdict. Written after a search, or when a remembered program has no record; the search reads none of
them. Whoever reads them (`anytorch graph`, the service) needs no torch. A file that cannot be understood counts as missing,
and beyond `MOST` the oldest go.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch import logs, settings
from anytorch.errors import GraphError
from anytorch.files import replace_file
from anytorch.graph import patterns
from anytorch.graph.back import saving
from anytorch.graph.ir import Graph
from anytorch.graph.partition import least_bytes, moved_bytes
from anytorch.graph.picture import draw
from anytorch.measured import store
from anytorch.measured.verdict import Verdict
from anytorch.values import LARGEST, checked

if TYPE_CHECKING:
    from anytorch.graph.search import Found, Search

log = logs.logger(__name__)

FORMAT = 1
MOST = 200  # files
NAMED_OPS = 60  # characters of a title
# As `search` and `verify` have them, which need torch; a test compares.
EAGER, KIND, KERNEL_KIND = "eager torch", "kernel graph", "kernel of a graph"
MOST_ERROR = 8


@dataclass(frozen=True)
class Step:
    """A step of the chosen program: a generated kernel; a hand-written one (then `text` is empty and `source` its file below
    src/anytorch); or an op that torch computes (then both are empty)."""

    ops: tuple[str, ...]
    schedule: str = ""
    nbytes: int | None = None  # read and written
    seconds: float | None = None
    language: str = ""
    text: str = ""
    source: str = ""


@dataclass(frozen=True)
class Record:
    title: str
    graph_key: str
    graph: Mapping[str, Any]  # as `Graph.to_json` gives it
    verdict: Verdict
    steps: tuple[Step, ...]  # of the chosen program; none where eager torch won
    least_nbytes: int  # inputs and outputs: what any program must move
    kernel_keys: tuple[str, ...]  # of the verdicts about single kernels
    picture: str  # SVG

    @cached_property
    def key(self) -> str:
        return self.verdict.question.key

    @property
    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = self.verdict.question.facts.get("sizes", {})
        return found

    @property
    def seconds(self) -> float | None:
        return self.verdict.seconds(self.verdict.chosen)

    @property
    def eager_s(self) -> float | None:
        return self.verdict.seconds(EAGER)

    @property
    def speedup(self) -> float | None:
        """How many times faster than eager torch; None if either was not timed."""
        return self.eager_s / self.seconds if self.eager_s and self.seconds else None

    def as_json(self) -> dict[str, Any]:
        # Not asdict for all of it: a verdict has a form of its own.
        plain = {name: getattr(self, name) for name in ("title", "graph_key", "graph", "least_nbytes", "picture")}
        steps = [asdict(step) for step in self.steps]
        verdict = self.verdict.as_json()
        return {"format": FORMAT, **plain, "verdict": verdict, "steps": steps, "kernel_keys": list(self.kernel_keys)}

    @classmethod
    def from_json(cls, body: Any) -> Record:
        """The record that `as_json` made. Raises ValueError, TypeError or KeyError for anything else."""
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}, not {FORMAT}")
        texts = [body[name] for name in ("title", "graph_key", "picture")] + list(body["kernel_keys"])
        steps = tuple(checked(Step(**{**one, "ops": tuple(one["ops"])})) for one in body["steps"])
        texts += [op for one in steps for op in one.ops]
        if not all(isinstance(text, str) for text in texts) or not isinstance(body["graph"]["nodes"], list):
            raise TypeError("a field of the wrong kind")
        named = {name: body[name] for name in ("title", "graph_key", "graph", "least_nbytes", "picture")}
        verdict = Verdict.from_json(body["verdict"])
        sizes = verdict.question.facts.get("sizes", {})
        if not isinstance(sizes, dict) or not all(type(size) is int and abs(size) < LARGEST for size in sizes.values()):
            raise TypeError("sizes that are not whole numbers, or too large")
        return checked(cls(**named, verdict=verdict, steps=steps, kernel_keys=tuple(body["kernel_keys"])))


# --- writing -----------------------------------------------------------------------------------------------------------


def searched(search: Search) -> Found:
    """Run a search, or recall what an earlier one found, and keep a record of it."""
    sizes = "".join(f", {name}={size}" for name, size in sorted(search.known.items()))
    with saving.kernels_of(f"graph {search.graph.key}{sizes}, {title_of(search.graph)}"):
        found = search.run()
    if found.verdict is not None:
        try:
            _keep(search.graph, search.known, found, found.verdict)
        except Exception as exc:  # noqa: BLE001  (a picture of the work must not cost anybody the work)
            log.warning("no record of the kernel graph is kept in %s: %s: %s", folder(), type(exc).__name__, exc)
    return found


def _keep(graph: Graph, known: Mapping[str, int], found: Found, verdict: Verdict) -> None:
    path = folder() / f"{verdict.question.key}.json"
    if verdict.remembered and _is_true(_read(path), found, verdict):
        return
    record = Record(
        title_of(graph),
        graph.key,
        graph.to_json(),
        verdict,
        _steps(found, known),
        least_bytes(graph, known),
        tuple(dict.fromkeys(one.question.key for one in found.kernels)),
        draw(graph, found.program),
    )
    replace_file(path, json.dumps(record.as_json(), default=str, allow_nan=False).encode())
    _bound(path.parent)


def _is_true(record: Record | None, found: Found, verdict: Verdict) -> bool:
    """Whether the record says what was found now."""
    if record is None or record.verdict.when != verdict.when:
        return False
    steps = () if found.program is None else found.program.steps
    return [(one.schedule, one.text) for one in record.steps] == [(one.schedule, one.text) for one in steps]


def _steps(found: Found, known: Mapping[str, int]) -> tuple[Step, ...]:
    if found.program is None:
        return ()
    nodes = found.program.partition.graph.nodes
    by_kernel = {verdict.question.facts["kernel"]: verdict for verdict in found.kernels}
    made = []
    for step in found.program.steps:
        ops = tuple(op for number in sorted(step.group.nodes) for op in patterns.ops_of(nodes[number]))
        if step.by_hand is not None:
            node, kernel = nodes[step.group.outputs[0]], step.by_hand.kernel
            verdict = by_kernel.get(f"{patterns.PREFIX}{node['part'].graph.key}")
            seconds = None if verdict is None else verdict.seconds(kernel.name)
            nbytes = patterns.moved_bytes(node, known)
            made.append(Step(ops, step.schedule, nbytes, seconds, kernel.back, source=kernel.source))
            continue
        if step.kernel is None:
            made.append(Step(ops))
            continue
        verdict = by_kernel.get(str(step.kernel))
        seconds = None if verdict is None else verdict.seconds(verdict.chosen)
        language = "" if verdict is None else str(verdict.question.facts["back"])
        made.append(Step(ops, step.schedule, moved_bytes(step.kernel, known), seconds, language, step.text))
    return tuple(made)


def title_of(graph: Graph) -> str:
    """The ops in the order in which they first stand in the graph: "rms_norm, matmul × 2, silu, …"."""
    counts: dict[str, int] = {}
    for _, node in graph:
        if node.op not in ("input", "constant"):
            counts[node.op] = counts.get(node.op, 0) + 1
    said = ""
    for op, count in counts.items():
        more = f"{', ' if said else ''}{op}{f' × {count}' if count > 1 else ''}"
        if len(said) + len(more) > NAMED_OPS:
            return f"{said}, …"
        said += more
    return said or "no ops"


def _bound(where: Path) -> None:
    paths = list(where.glob("*.json"))
    if len(paths) > MOST:
        for path in sorted(paths, key=_written)[: len(paths) - MOST]:
            path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    """When it was written; 0 for a file that has gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# --- reading -----------------------------------------------------------------------------------------------------------


def folder() -> Path:
    return settings.cache_folder() / "graph" / "records"


def records() -> list[Record]:
    """Every record that can be understood, the newest first."""
    found = [record for path in folder().glob("*.json") if (record := _read(path)) is not None]
    return sorted(found, key=lambda record: (record.verdict.when, record.key), reverse=True)


def record_of(key: str) -> Record | None:
    """The record with exactly this key."""
    return _read(folder() / f"{key}.json") if key.isalnum() else None


def find(prefix: str, among: Sequence[Record]) -> Record:
    """The one record whose key, or else whose graph's key, begins like this. Raises GraphError for none or several."""
    asked = prefix.strip().lower()
    found = [one for one in among if one.key.startswith(asked)] or [
        one for one in among if one.graph_key.startswith(asked)
    ]
    if asked and len(found) == 1:
        return found[0]
    if not asked or not found:
        hint = "run `anytorch graph list` to see the keys" if among else "search one first, with superoptimize()"
        raise GraphError(f"no searched kernel graph has the key {prefix!r}", hint=hint)
    raise GraphError(
        f"the key {prefix!r} is ambiguous: {len(found)} kernel graphs begin like that",
        hint=f"type more of it: {', '.join(one.key[: len(asked) + 8] for one in found[:4])}{', …' * (len(found) > 4)}",
    )


def _read(path: Path) -> Record | None:
    try:
        found = Record.from_json(json.loads(path.read_bytes()))
        if found.key != path.stem:
            raise ValueError(f"it is the record of {found.key}")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        log.warning("%s cannot be read and is written again when its graph is used next: %s", path, exc)
        return None


# --- forgetting --------------------------------------------------------------------------------------------------------


def forget(chosen: Iterable[Record]) -> int:
    """Remove these records and what was measured for them; how many verdicts that were. Raises OSError.

    A kernel that another recorded graph has, too, keeps its verdict.
    """
    going = {one.key: one for one in chosen}
    shared = {key for one in records() if one.key not in going for key in one.kernel_keys}
    for key in going:
        (folder() / f"{key}.json").unlink(missing_ok=True)
    kernels = {key for one in going.values() for key in one.kernel_keys}
    return store.drop([*going, *(kernels - shared)])


def clear() -> tuple[Path | None, int]:
    """Remove every record, damaged ones too, and every verdict about kernel graphs.

    The folder that was removed, None if there was none, and the number of verdicts. Raises OSError.
    """
    count = store.drop([one.question.key for one in store.verdicts() if one.question.kind in (KIND, KERNEL_KIND)])
    where = folder()
    if not where.exists():
        return None, count
    for path in [*where.glob("*.json"), *where.glob(".*.json.*")]:
        path.unlink(missing_ok=True)
    where.rmdir()
    return where, count
