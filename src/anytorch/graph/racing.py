"""Which hand-written kernels are worth a program: at every place the registered ones are raced beside torch.

A place where none of them is right, or torch is as fast, is left to the generated kernels and to torch. The places that
remain become graphs with nodes for these kernels: one with all of them, and one for each kind where there are several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from anytorch.errors import WrongAnswer
from anytorch.graph import handwritten, verify
from anytorch.graph.clock import Clock
from anytorch.graph.handwritten import Handwritten, Site
from anytorch.graph.ir import Graph
from anytorch.graph.patterns import PREFIX
from anytorch.graph.program import all_by_torch
from anytorch.measured.engine import Candidate, Ready, measure
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Verdict, fastest

TORCH = "torch"
NOISE = 0.0  # what a kernel must gain on torch, whose op may be a kernel of ours: the webgpu device's are
MOST_PLACES = 24  # that are raced in one graph; those that are alike are raced once
MOST_KINDS = 3  # that get a program of their own beside the one with all


def race(
    site: Site,
    known: Mapping[str, int],
    device: torch.device,
    asked: Question,
    clock: Clock,
    left_s: float,
) -> Verdict:
    """The kernels of a place and torch, on the same inputs: the verdict that is remembered, or a new one."""
    names = [TORCH, *(kernel.name for kernel in site.kernels)]
    verdict = recall(asked, budget_s=max(0.0, left_s), names=names)
    if verdict is not None and all(verdict.trial(name) is not None for name in names):
        return verdict
    part = site.part.graph
    inputs = verify.example(part, known, "normal", device)
    judge = verify.Judge(part, inputs)
    sets = clock.copies(inputs)

    def by_torch() -> Ready:
        run = all_by_torch(part)
        return Ready(partial(run, inputs), timed=partial(clock.timed, [partial(run, one) for one in sets]))

    def by_hand(kernel: Handwritten) -> Ready:
        run = handwritten.ready(kernel, site.part, known, device)
        (like,) = judge.eager
        out = torch.empty_like(like, memory_format=torch.contiguous_format)

        def answer() -> list[torch.Tensor]:
            out.fill_(torch.nan if out.is_floating_point() else 113)
            before = [tensor.clone() for tensor in inputs]
            run(inputs, out)
            for place, (old, now) in enumerate(zip(before, inputs, strict=True)):
                if not torch.equal(old, now):
                    now.copy_(old)  # the others read it, too
                    raise WrongAnswer(f"it changed its input {place}")
            return [out]

        return Ready(answer, timed=lambda: clock.timed([partial(run, one, out) for one in sets]))

    candidates = [Candidate(TORCH, by_torch), *(Candidate(one.name, partial(by_hand, one)) for one in site.kernels)]
    verdict = measure(
        asked,
        candidates,
        judge,
        most_error=verify.TIMES_EAGER,
        stopwatch=clock.stopwatch,
        budget_s=max(1.0, left_s / 3),
        decide=partial(fastest, noise=NOISE),
        quiet=True,
    )
    return remember(verdict) if verdict.chosen else verdict


def graphs(graph: Graph, winners: Sequence[Site]) -> list[tuple[str, Graph]]:
    """The graph with these places by hand: all that do not overlap, then each kind alone; with words for it."""
    kinds = list(dict.fromkeys(site.what for site in winners))
    chosen = [handwritten.apart(winners)]
    if len(kinds) > 1:
        alone = [[site for site in winners if site.what == what] for what in kinds[:MOST_KINDS]]
        chosen += [handwritten.apart(some) for some in alone]
    found: dict[tuple[int, ...], tuple[str, Graph]] = {}
    for places in chosen:
        if places:
            found.setdefault(
                tuple(site.match.output for site in places), (words(places), handwritten.replaced(graph, places))
            )
    return list(found.values())


def words(places: Iterable[Site]) -> str:
    return f"handwritten {' and '.join(sorted({site.what for site in places}))}"


def again(
    graph: Graph, known: Mapping[str, int], back: str, device: torch.device, steps: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Graph]]:
    """The graph with the places by hand that a remembered program had; none if it had none, or they are no more."""
    wanted = {int(step["at"]): str(step["schedule"]).removeprefix(PREFIX) for step in steps if "at" in step}
    if not wanted:
        return []
    found: dict[int, Site] = {}
    for site in handwritten.sites(graph, known, back, device):
        only = site.only(wanted.get(site.match.output, ""))
        if only is not None:
            found.setdefault(site.match.output, only)
    if set(found) != set(wanted):
        return []
    places = list(found.values())
    return [(words(places), handwritten.replaced(graph, places))]
