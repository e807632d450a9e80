"""Who computes what in one launch, in which order, and what it waits for: the CUDA kernel's plan as plain data.

The kernel has no scheduler: every block goes through the same phases, and which rows of a phase are its own follows from its
number (`share`, the source's `first_of`). Here the same is written down, so that a test can say without a device that every
number is computed once, and that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anytorch.text.decoders.spec import DecoderSpec
from anytorch.text.persistent.cuda_weights import row_of

SLOT, SPLIT = 4096, 128  # CHUNK and SPLIT of the source


@dataclass(frozen=True)
class Span:
    """Numbers from `begin` to `end` of one layer's vector, or of the words'."""

    what: str
    layer: int
    begin: int
    end: int


@dataclass(frozen=True)
class Task:
    """A block's part of a phase: it begins when all it reads is there."""

    phase: str
    layer: int
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


def share(units: int, block: int, blocks: int) -> tuple[int, int]:
    """The first unit of a block and the one after its last."""
    return units * block // blocks, units * (block + 1) // blocks


def rows_at_once(columns: int, bits: int = 16) -> int:
    """Rows of a matrix that go through a slot together."""
    nbytes = 2 * columns if bits == 16 else row_of(columns, bits).nbytes
    return 4 if 4 * nbytes <= SLOT else 2 if 2 * nbytes <= SLOT else 1


def plan(spec: DecoderSpec, blocks: int, place: int, bits: int = 16) -> list[list[Task]]:
    """One token's tasks of every block, in its order. `place`: of the token."""
    return [list(_tasks(spec, block, blocks, place, bits)) for block in range(blocks)]


def _tasks(spec: DecoderSpec, block: int, blocks: int, place: int, bits: int) -> Iterator[Task]:
    single = rows_at_once(spec.width, bits)
    back = max(rows_at_once(spec.q_width, bits), rows_at_once(spec.inner, bits))
    pair = max(2, single)
    qkv_rows = spec.q_width + 2 * spec.kv_width

    def rows(count: int, unit: int) -> tuple[int, int]:
        begin, end = share(-(-count // unit), block, blocks)
        return min(count, begin * unit), min(count, end * unit)

    for layer, window in enumerate(spec.windows):
        x = (Span("end", layer - 1, 0, spec.width),) if layer else (Span("word", 0, 0, spec.width),)
        yield Task("qkv", layer, x, (Span("qkv", layer, *rows(qkv_rows, single)),))
        yield from _attention(spec, block, blocks, place, layer, window)
        yield Task(
            "out", layer, (Span("mixed", layer, 0, spec.q_width),), (Span("middle", layer, *rows(spec.width, back)),)
        )
        gate_up = rows(2 * spec.inner, pair)
        inner = Span("inner", layer, gate_up[0] // 2, gate_up[1] // 2)
        yield Task("gate and up", layer, (Span("middle", layer, 0, spec.width),), (inner,))
        yield Task(
            "down", layer, (Span("inner", layer, 0, spec.inner),), (Span("end", layer, *rows(spec.width, back)),)
        )
    last = (Span("end", spec.layers - 1, 0, spec.width),)
    yield Task("head", spec.layers, last, (Span("logits", 0, *rows(spec.vocabulary, single)),))


def _attention(spec: DecoderSpec, block: int, blocks: int, place: int, layer: int, window: int) -> Iterator[Task]:
    """Attention of the heads that share keys to some of the positions; the task of the first of these joins all results."""
    most = max(1, min(64, blocks // spec.kv_heads))
    begin = place + 1 - window if 0 < window <= place else 0
    splits, (kv, split) = min(most, (place - begin) // SPLIT + 1), divmod(block, most)
    if kv >= spec.kv_heads or split >= splits:
        return
    group, head = spec.heads // spec.kv_heads, spec.head_width
    reads = [Span("qkv", layer, kv * group * head, (kv + 1) * group * head)]
    if split == splits - 1:  # the newest position's key and value are not in the cache yet
        for behind in (spec.q_width, spec.q_width + spec.kv_width):
            reads.append(Span("qkv", layer, behind + kv * head, behind + (kv + 1) * head))
    part = kv * most
    yield Task("attention", layer, tuple(reads), (Span("parts", layer, part + split, part + split + 1),))
    if split == 0:
        mixed = Span("mixed", layer, kv * group * head, (kv + 1) * group * head)
        yield Task("join", layer, (Span("parts", layer, part, part + splits),), (mixed,))


def played(tasks: Sequence[Sequence[Task]], given: Sequence[Span]) -> dict[tuple[str, int], list[int]]:
    """Let every block do its tasks as soon as what they read is there; gives how often each number was written.

    Raises RuntimeError where blocks are left that wait for one another."""
    written: dict[tuple[str, int], list[int]] = {}
    for every in tasks:
        for task in every:
            for span in (*task.reads, *task.writes):
                known = written.setdefault((span.what, span.layer), [])
                known.extend([0] * (span.end - len(known)))
    for span in given:
        written[span.what, span.layer][span.begin : span.end] = [1] * (span.end - span.begin)
    at = [0] * len(tasks)
    while True:
        ready = [
            block
            for block, every in enumerate(tasks)
            if at[block] < len(every)
            and all(all(written[one.what, one.layer][one.begin : one.end]) for one in every[at[block]].reads)
        ]
        if not ready:
            break
        for block in ready:
            for span in tasks[block][at[block]].writes:
                known = written[span.what, span.layer]
                for place in range(span.begin, span.end):
                    known[place] += 1
            at[block] += 1
    left = [block for block, every in enumerate(tasks) if at[block] < len(every)]
    if left:
        task = tasks[left[0]][at[left[0]]]
        raise RuntimeError(f"{len(left)} blocks wait for ever; block {left[0]} at {task.phase} of layer {task.layer}")
    return written
