"""What was chosen by measuring, as the page shows it: searched kernel graphs with their records, and all other choices."""

from __future__ import annotations

from collections.abc import Iterable

from anytorch.devices import oom
from anytorch.graph import records
from anytorch.graph.records import Record, record_of
from anytorch.measured import store
from anytorch.measured.verdict import Verdict
from anytorch.serve import schemas


def graphs() -> list[schemas.Graph]:
    """Every remembered choice that was timed, the newest first; sizes of batches have titles that are the user's own.

    Of a kernel graph with a record, the kernels' own choices are left out: they belong to the graph (`graph`).
    """
    kept = records.records()
    shown = {one.key for one in kept}
    parts = {key for one in kept for key in one.kernel_keys}
    found = [summary_of(one) for one in kept]
    found += [choice_of(one) for one in _verdicts() if one.question.key not in shown | parts]
    return sorted(found, key=lambda one: one.when or "", reverse=True)


def graph(key: str) -> schemas.WholeGraph | None:
    """All that is known of one choice; None if there is none of that key."""
    record = record_of(key)
    if record is not None:
        return whole(record)
    verdict = store.stored(key)
    if verdict is None or verdict.question.kind == oom.KIND:
        return None
    return schemas.WholeGraph(**choice_of(verdict).model_dump(), why=verdict.why)


def picture(key: str) -> str | None:
    """The picture of a kernel graph, as SVG."""
    record = record_of(key)
    return None if record is None else record.picture


def whole(record: Record) -> schemas.WholeGraph:
    steps = [
        schemas.GraphStep(
            ops=list(one.ops),
            schedule=one.schedule or None,
            nbytes=one.nbytes,
            seconds=one.seconds,
            language=one.language or None,
            text=one.text or None,
            source=one.source or None,
        )
        for one in record.steps
    ]
    told = summary_of(record).model_dump() | {"picture_svg": record.picture}
    kernels = [choice_of(one) for key in record.kernel_keys if (one := store.stored(key)) is not None]
    return schemas.WholeGraph(
        **told,
        why=record.verdict.why,
        graph=dict(record.graph),
        least_nbytes=record.least_nbytes,
        steps=steps,
        kernel_choices=kernels,
    )


def summary_of(record: Record) -> schemas.Graph:
    told = choice_of(record.verdict)
    told.title, told.sizes = record.title, record.sizes
    told.speedup = round(record.speedup, 2) if record.speedup else None
    told.kernels = sum(bool(one.text or one.source) for one in record.steps)
    told.picture = f"/v1/graphs/{record.key}/picture.svg"
    return told


def choice_of(found: Verdict) -> schemas.Graph:
    question = found.question
    return schemas.Graph(
        id=question.key,
        title=question.title,
        device=question.device,
        kind=question.kind,
        candidates=[
            schemas.Candidate(
                name=one.name,
                seconds=one.seconds,
                correct=not one.wrong,
                chosen=one.name == found.chosen,
                error=one.error,
                reason=one.refused or None,
            )
            for one in found.trials
        ],
        speedup=round(found.speedup, 2) if found.speedup else None,
        when=found.when,
    )


def _verdicts() -> Iterable[Verdict]:
    return (one for one in store.verdicts() if one.question.kind != oom.KIND)
