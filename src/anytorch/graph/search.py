"""The search: variants of a graph by rewrites, cut into kernels, each kernel cut into tiles; checked, timed, remembered.

    variants     what is fused, what is left to the library, which rewrites are used; the first gate proves each (`field`)
    kernels      every kernel's schedules are compiled, compared with float64 and timed (`measured`)
    by hand      where registered kernels (`handwritten`) beat torch, variants that have them (`racing`)
    programs     each variant with its best schedules passes the second gate (`verify`) and is timed beside eager torch

Eager torch is always a candidate, so the result is never slower. What was chosen is remembered by graph, sizes and machine;
a program that is built again from memory is checked again before it is used.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from anytorch import logs
from anytorch.devices.memory import synchronize
from anytorch.errors import WrongAnswer
from anytorch.graph import field as finite_field
from anytorch.graph import handwritten, racing, verify
from anytorch.graph.backs import Back, back_of
from anytorch.graph.clock import Clock, unobserved
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.ir import Graph
from anytorch.graph.loops import Kernel
from anytorch.graph.lower import lowered
from anytorch.graph.partition import Group, Partition, moved_bytes, partition, subgraph
from anytorch.graph.patterns import OP, PREFIX, Match
from anytorch.graph.program import Program, Step, all_by_torch
from anytorch.graph.rewrite import rewritten, split_products, split_softmax
from anytorch.graph.shrink import shrunk
from anytorch.measured.engine import ROUNDS, Candidate, Ready, measure
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import NO_TIME, Question, Verdict, duration, fastest
from anytorch.native.compiler import SHARED

log = logs.logger(__name__)

EAGER = "eager torch"
KIND, KERNEL_KIND = "kernel graph", "kernel of a graph"
MANY_ROUNDS = 12  # of schedules that are close to one another
AT_ONCE = 8  # schedules that are compiled before the clock is looked at
QUICK, FEW, MANY = 3, 12, 40  # schedules of a kernel: in a quick search, when half of the time is gone, and before
NOISE = 0.02  # what a program must gain on eager torch
HOPELESS = 1.5  # times what eager torch takes for the whole graph: a program whose kernels take more is not finished
GLANCES = 4  # at eager torch, the first of which warms it up
Tell = Callable[[str, float], None]  # what is being done, and the share of the time limit that is used


@dataclass(frozen=True)
class Found:
    """What a search found. `program` is None where eager torch won."""

    program: Program | None
    verdict: Verdict | None
    kernels: tuple[Verdict, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Variant:
    name: str
    graph: Graph
    library: frozenset[int] = frozenset()
    repeats: bool = False  # narrow products are computed again beside every tile of a wider one


def variants(graph: Graph, back: Back) -> Iterator[Variant]:
    """Graphs of primitive ops for the same function, the boldest first."""
    attention = any(node.op == "attention" for _, node in graph)
    for keep, said in (((), ""), (("attention",), ", attention by torch")):
        if keep and not attention:
            continue
        low = lowered(graph, keep)
        products = frozenset(number for number, node in low if node.op == "matmul")
        found: dict[Graph, str] = {}
        better = rewritten(low)
        found.setdefault(better, f"all fused, scales after products{said}")
        if not back.splits:
            for parts in (4, 16, 32, 64):
                found.setdefault(rewritten(better, split_softmax(parts)), f"softmax in {parts} parts{said}")
            for parts in (2, 4, 8):
                found.setdefault(rewritten(better, split_products(parts)), f"sums in {parts} parts{said}")
        for made, name in found.items():
            if back.repeats and len(products) > 1:
                yield Variant(f"{name}, narrow products again", made, repeats=True)
            yield Variant(name, made)
        if products and (keep or not attention):
            yield Variant(f"products by torch{said}", low, products)
        if low not in found:
            yield Variant(f"all fused{said}", low)


@lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of what makes and checks kernels: what another version of it found is not believed."""
    found = hashlib.blake2b(digest_size=8)
    folder = Path(__file__).parent
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cpp"), *SHARED.glob("*.h")]):
        found.update(path.read_bytes())
    return found.hexdigest()


def question(graph: Graph, known: Mapping[str, int], device: torch.device, quick: bool, back: Back) -> Question:
    sizes = ", ".join(f"{name}={known[name]}" for name in sorted(known))
    ops = len([node for _, node in graph if node.op != "input"])
    title = f"{graph.key[:8]}: {ops} ops{f', {sizes}' if sizes else ''}"
    facts = {
        "graph": graph.key,
        "sizes": dict(known),
        "threads": torch.get_num_threads(),
        "code": code_version(),
        "handwritten": handwritten.version(back.name),
        "target": back.target,
        "quick": quick,
    }
    return Question.of(KIND, title, str(device), **facts)


@dataclass
class Search:
    graph: Graph
    known: Mapping[str, int]
    device: torch.device
    time_limit_s: float
    tell: Tell = lambda what, share: None
    plain: Callable[[Sequence[torch.Tensor]], Any] | None = None  # what it must beat; by default the graph op by op
    quick: bool = False  # the likeliest variants and schedules only: for many graphs, as in torch.compile
    began: float = field(default_factory=time.perf_counter)
    kernels: list[Verdict] = field(default_factory=list)
    passing: set[str] = field(default_factory=set)  # variants that were refused for want of memory
    judges: dict[str, verify.Judge] = field(default_factory=dict)  # of the whole graph, by the kind of inputs
    digests: dict[str, str] = field(default_factory=dict)  # of what the programs that passed the gates computed

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.device)  # asks the machine what it is, which a recall need not wait for

    @property
    def left_s(self) -> float:
        return self.time_limit_s - (time.perf_counter() - self.began)

    def run(self) -> Found:
        """Recall or search. Ctrl-C ends the search with the best found so far."""
        # An error of earlier work, such as an index out of range, is the program's: nothing below may take it for its own.
        synchronize(self.device)
        # A graph says what dtype every op has: autocast would compare it with something else.
        with unobserved(), torch._C._DisableAutocast():
            try:
                return self._run()
            except IndexError as exc:  # of torch's own ops: ids that the graph computes itself, of made inputs
                log.info("the graph runs op by op through torch: made inputs lead beyond a table (%s)", exc)
                return Found(None, None, why="on made inputs an index that it computes is beyond its table")

    def _run(self) -> Found:
        back, why = back_of(self.device)
        if back is None:
            _say_once(why)
            return Found(None, None, why=why)
        asked = question(self.graph, self.known, self.device, self.quick, back)
        verdict = recall(asked, budget_s=self.time_limit_s)  # if it was cut short, for calls without more time
        if verdict is not None:
            found = self._again(back, verdict)
            if found is not None:
                return found
        programs: dict[str, Program] = {}
        refused: dict[str, str] = {}
        self.digests.clear()
        self.kernels.clear()
        budget_s = self.time_limit_s
        verify.lookups(self.graph, self.known, self.device)
        try:
            by_hand = list(self._by_hand(back, self._winners(back, refused)))
            ready = [
                one for one in by_hand if all(group.library for group in self._cut(back, one).groups)
            ]  # not compiled
            first, *others = self._variants(back)
            for variant in (*ready, first, *(one for one in by_hand if one not in ready), *others):
                self._try(back, variant, programs, refused)
        except KeyboardInterrupt:
            log.warning("the search was stopped; what was found so far is used")
            budget_s = min(budget_s, time.perf_counter() - self.began)  # a call with more time than that searches again
            for variant in self._variants(back):
                if variant.name not in programs:
                    refused.setdefault(variant.name, NO_TIME)
        try:
            hurried = any(one.cut_short for one in self.kernels)
            verdict = remember(replace(self._race(asked, programs, refused), budget_s=budget_s, hurried=hurried))
        except KeyboardInterrupt:
            log.warning("the search was stopped; the first program that passed all checks is used")
            return Found(next(iter(programs.values()), None), None, why="the search was stopped")
        except Exception as exc:
            if not self.clock.plain.is_passing(exc):
                raise
            log.warning(
                "the graph runs op by op through torch: no memory to search with (%s)", str(exc).splitlines()[0]
            )
            return Found(None, None, why="there was no memory to search with")
        return Found(programs.get(verdict.chosen), verdict, tuple(self.kernels))

    def _variants(self, back: Back) -> list[Variant]:
        found = [
            one
            for one in variants(self.graph, back)
            if not (one.repeats and self._cut(back, one).groups == self._cut(back, replace(one, repeats=False)).groups)
        ]
        return [found[0], *found[1:][-1:]] if self.quick else found

    def _winners(self, back: Back, refused: dict[str, str]) -> list[handwritten.Site]:
        """The places where a hand-written kernel is faster than torch, each with the fastest. This takes little time: they
        are compiled once for all graphs."""
        winners: list[handwritten.Site] = []
        places = handwritten.sites(self.graph, self.known, back.name, self.device)[: racing.MOST_PLACES]
        for site in places:
            if self.left_s <= 0:
                refused[racing.words(places)] = NO_TIME
                return []
            asked = self._place_question(back, site.part, site.what)
            self.tell(asked.title, 1 - self.left_s / self.time_limit_s)
            try:
                verdict = racing.race(site, self.known, self.device, asked, self.clock, self.left_s)
            except Exception as exc:  # noqa: BLE001  (as in `_try`: a lack of memory must not end the search)
                log.warning("%s: not raced: %s", asked.title, (str(exc).splitlines() or [type(exc).__name__])[0])
                continue
            self.kernels.append(verdict)
            if (winner := site.only(verdict.chosen)) is not None:
                winners.append(winner)
        return winners

    def _by_hand(self, back: Back, winners: Sequence[handwritten.Site]) -> Iterator[Variant]:
        for said, graph in racing.graphs(self.graph, winners)[: 1 if self.quick else None]:
            found = [replace(one, name=f"{one.name}, {said}") for one in variants(graph, back)]
            yield from found[:1] if self.quick else found

    def _try(self, back: Back, variant: Variant, programs: dict[str, Program], refused: dict[str, str]) -> None:
        if programs and self.left_s <= 0:
            refused[variant.name] = NO_TIME
            return
        try:
            self._prove(variant)
            program = self._built(back, variant)
            if not any(step.ours for step in program.steps):
                return  # nothing of ours in it
            verify.check(self.graph, self.known, partial(program, poison=True), self.device, judges=self.judges)
            self.digests[variant.name] = verify.digest(program, self.graph, self.known, self.device)
            programs[variant.name] = program
        except Exception as exc:  # noqa: BLE001  (a compiler, a driver or a lack of memory: torch can compute it all the same)
            refused[variant.name] = (str(exc).splitlines() or [type(exc).__name__])[0]
            if self.clock.plain.is_passing(exc):
                self.passing.add(variant.name)
            log.info("the variant %s is not used: %s", variant.name, refused[variant.name])

    def _cut(self, back: Back, variant: Variant) -> Partition:
        return partition(variant.graph, self.known, variant.library, variant.repeats, back.most_buffers)

    def _prove(self, variant: Variant) -> None:
        """Check on small sizes that this variant is the same function: the first gate."""
        small = shrunk(lowered(self.graph), lowered(handwritten.inlined(variant.graph)))
        try:
            finite_field.check_same(*small)
        except finite_field.Unfit as exc:
            log.info("the variant %s is not judged in whole numbers: %s", variant.name, exc)

    def _built(self, back: Back, variant: Variant, then: Sequence[str] | None = None) -> Program:
        """A variant as a program, every kernel with its best schedule, or with those of another time."""
        cut = self._cut(back, variant)
        if then is not None and len(then) != len(cut.groups):
            raise WrongAnswer("the number of its kernels has changed")
        steps, took_s = [], 0.0
        for group, name in zip(cut.groups, then or [""] * len(cut.groups), strict=True):
            count = len(self.kernels)
            steps.append(self._step(back, cut, group, name))
            if then is None:
                took_s += sum(one.seconds(one.chosen) or 0.0 for one in self.kernels[count:])
                if took_s > HOPELESS * self._eager_s:
                    raise _Hopeless(
                        f"{len(steps)} of its {len(cut.groups)} kernels take {duration(took_s)}; "
                        f"eager torch takes {duration(self._eager_s)} for all"
                    )
        return Program(cut, steps)

    @cached_property
    def _eager_s(self) -> float:
        """What eager torch takes, at a glance: the race times it again, in turns with what is left to choose from."""
        sets = self.clock.copies(verify.example(self.graph, self.known, "normal", self.device))
        timed = self.clock.timed([partial(self._eager, one) for one in sets])
        return min(self.clock.stopwatch.seconds(timed, 1) for _ in range(GLANCES))

    @cached_property
    def _eager(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        return self.plain or all_by_torch(self.graph)

    def _step(self, back: Back, cut: Partition, group: Group, then: str) -> Step:
        if group.library:
            node = cut.graph.nodes[group.outputs[0]]
            if node.op != OP:
                return Step(group)
            made = handwritten.ready_for(node, self.known, back.name, self.device)
            asked = self._place_question(back, node["part"], made.kernel.what)
            if then and (known := recall(asked, budget_s=0.0)) is not None:
                self.kernels.append(known)
            return Step(group, schedule=made.kernel.said, by_hand=made)
        kernel = cut.kernel(group)
        asked = self._kernel_question(back, group, kernel)
        if then:
            schedule = back.schedule(kernel, self.known, then)
            if schedule is None:
                raise WrongAnswer(f"the schedule that was stored for a kernel does not fit: {then}")
            if (known := recall(asked, budget_s=0.0)) is not None:
                self.kernels.append(known)
        else:
            schedules = {one.name: one for one in back.candidates(kernel, self.known, self._most())}
            schedule = schedules[self._tuned(back, cut, group, kernel, schedules, asked)]
        return Step(group, kernel, back.prepare(kernel, schedule), schedule.name, back.render(kernel, schedule))

    def _kernel_question(self, back: Back, group: Group, kernel: Kernel) -> Question:
        facts = {"kernel": str(kernel), "buffers": str(kernel.buffers), "sizes": dict(self.known)}
        return self._asked(back, f"{len(group.nodes)} ops, {moved_bytes(kernel, self.known) / 2**20:.3g} MiB", facts)

    def _place_question(self, back: Back, part: Match, what: str) -> Question:
        facts = {"kernel": f"{PREFIX}{part.graph.key}", "sizes": dict(self.known)}
        title = f"{len(part.work)} ops by hand, {what}"
        return self._asked(back, title, {**facts, "sources": handwritten.version(back.name)})

    def _asked(self, back: Back, title: str, facts: Mapping[str, Any]) -> Question:
        more = {"back": back.name, "target": back.target, "threads": torch.get_num_threads(), "code": code_version()}
        return Question.of(KERNEL_KIND, title, str(self.device), **facts, **more)

    def _tuned(
        self,
        back: Back,
        cut: Partition,
        group: Group,
        kernel: Kernel,
        schedules: Mapping[str, Schedule],
        asked: Question,
    ) -> str:
        """The name of the best schedule of a kernel, measured unless all of these were."""
        verdict = recall(asked, budget_s=0.0, names=schedules)
        # One that there was no time for then is tried now, if there is.
        tried = {one.name for one in verdict.trials if one.refused != NO_TIME or self.left_s <= 0} if verdict else set()
        if verdict is None or not set(schedules) <= tried:
            self.tell(asked.title, 1 - self.left_s / self.time_limit_s)
            verdict = self._measured(back, cut, group, kernel, schedules, asked)
            if verdict.chosen:  # where nothing could be used, that may have been an accident of this moment
                remember(verdict)
        self.kernels.append(verdict)
        if not verdict.chosen:
            raise WrongAnswer(f"no schedule of a kernel can be used: {verdict.why}")
        return verdict.chosen

    def _most(self) -> int:
        """How many schedules of a kernel there is time for: compiling one cannot be interrupted."""
        if self.quick or self.left_s <= 0:
            return QUICK
        return FEW if self.left_s < self.time_limit_s / 2 else MANY

    def _measured(
        self,
        back: Back,
        cut: Partition,
        group: Group,
        kernel: Kernel,
        schedules: Mapping[str, Schedule],
        asked: Question,
    ) -> Verdict:
        part = subgraph(cut, kernel, group)
        inputs = verify.example(part, self.known, "normal", self.device)
        judge = verify.Judge(part, inputs)
        read = [buffer.node for buffer in kernel.buffers if not buffer.written]
        sets = [dict(zip(read, copy, strict=True)) for copy in self.clock.copies(inputs)]

        def results() -> list[torch.Tensor]:
            return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in judge.eager]

        def in_order(made: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            written = dict(zip(group.outputs, made, strict=True))
            return [[{**given, **written}[buffer.node] for buffer in kernel.buffers] for given in sets]

        ready = self._compiled(back, kernel, list(schedules.values()), in_order(results())[0])

        def prepare(schedule: Schedule) -> Ready:
            launch = back.prepare(kernel, schedule)
            made = results()
            ordered = in_order(made)

            def run() -> list[torch.Tensor]:
                for one in made:
                    one.fill_(torch.nan if one.is_floating_point() else 113)
                launch(ordered[0], self.known)
                return made

            return Ready(run, timed=lambda: self.clock.timed([partial(launch, one, self.known) for one in ordered]))

        return measure(
            asked,
            [
                Candidate(name, partial(prepare, schedule), refused="" if name in ready else NO_TIME)
                for name, schedule in schedules.items()
            ],
            judge,
            most_error=verify.TIMES_EAGER,
            error_unit=verify.UNIT,
            stopwatch=self.clock.stopwatch,
            budget_s=max(1.0, self.left_s / 3),
            rounds=ROUNDS if self.quick else MANY_ROUNDS,
            quiet=True,
        )

    def _compiled(
        self, back: Back, kernel: Kernel, schedules: Sequence[Schedule], tensors: Sequence[torch.Tensor]
    ) -> set[str]:
        """The names of those that there was time to compile, a few at once; the first few in any case."""
        done: set[str] = set()
        for first in range(0, len(schedules), AT_ONCE):
            if done and self.left_s <= 0:
                break
            some = schedules[first : first + AT_ONCE]
            back.compile_ahead(kernel, some, tensors, self.known)
            done.update(one.name for one in some)
        return done

    def _race(self, asked: Question, programs: Mapping[str, Program], refused: Mapping[str, str]) -> Verdict:
        """Every program beside eager torch, in turns."""
        inputs = verify.example(self.graph, self.known, "normal", self.device)
        judge = self.judges.get("normal") or verify.Judge(self.graph, inputs)
        self.tell("whole programs", 1 - self.left_s / self.time_limit_s)

        sets = self.clock.copies(inputs)

        def ready(run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], facts: Mapping[str, Any]) -> Ready:
            timed = partial(self.clock.timed, [partial(run, one) for one in sets])
            return Ready(partial(run, inputs), timed=timed, facts=facts)

        def steps(program: Program) -> list[dict[str, Any]]:
            return [_step_facts(program.partition.graph, step) for step in program.steps]

        refused = {**refused, **self._slow_when_called(programs, self._eager, inputs)}
        programs = {name: one for name, one in programs.items() if name not in refused}
        runs = [Candidate(EAGER, partial(ready, self._eager, {}))]
        for name, program in programs.items():
            facts = {"steps": steps(program), "digest": self.digests[name]}
            runs.append(Candidate(name, partial(ready, program, facts)))
        runs += [Candidate(name, _never, refused=why, passing=name in self.passing) for name, why in refused.items()]
        return measure(
            asked,
            runs,
            judge,
            most_error=verify.TIMES_EAGER,
            error_unit=verify.UNIT,
            stopwatch=self.clock.stopwatch,
            budget_s=max(2.0, self.left_s),
            decide=partial(fastest, noise=NOISE),
            quiet=True,
        )

    def _slow_when_called(
        self, programs: Mapping[str, Program], plain: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> dict[str, str]:
        """Programs that take longer than eager torch when not recorded, as under torch.compile, and by how much."""
        if not self.quick:
            return {}
        runs = {name: partial(program, inputs) for name, program in programs.items()}
        times = self.clock.times_when_called(runs, partial(plain, inputs))
        return {
            name: f"{ratio:.2f} times eager torch's time, launches and all"
            for name, ratio in times.items()
            if ratio > 1
        }

    def _again(self, back: Back, verdict: Verdict) -> Found | None:
        """The program that was chosen another time, built from the cache and checked once more; None if it cannot be.

        It passed the gates then: now it must give the same bits, or else pass the second gate again.
        """
        if verdict.chosen == EAGER:
            return Found(None, verdict)
        try:
            facts = next(one.facts for one in verdict.trials if one.name == verdict.chosen)
            made = [("", self.graph), *racing.again(self.graph, self.known, back.name, self.device, facts["steps"])]
            named = {f"{v.name}, {said}" if said else v.name: v for said, graph in made for v in variants(graph, back)}
            if (variant := named.get(verdict.chosen)) is None:
                return None
            program = self._built(back, variant, [step["schedule"] for step in facts["steps"]])
            run = partial(program, poison=True)
            if verify.digest(run, self.graph, self.known, self.device) != facts["digest"]:
                verify.check(self.graph, self.known, run, self.device)
        except Exception as exc:  # noqa: BLE001  (another compiler, another driver, a damaged file: it is searched for again)
            log.warning("a remembered program is not used, and searched for again: %s", exc)
            return None
        return Found(program, verdict, tuple(self.kernels))


@lru_cache(maxsize=64)
def _say_once(why: str) -> None:
    log.warning("kernel graphs run op by op through torch: %s", why)


class _Hopeless(Exception):
    """A program that is too slow already."""


def _step_facts(graph: Graph, step: Step) -> dict[str, Any]:
    """What is remembered of a step: `at` is the node of the searched graph that a hand-written kernel computes."""
    facts = {"nodes": sorted(step.group.nodes), "schedule": step.schedule}
    return facts if step.by_hand is None else {**facts, "at": graph.nodes[step.group.outputs[0]]["at"]}


def _never() -> Any:
    raise AssertionError("a refused candidate is not prepared")
