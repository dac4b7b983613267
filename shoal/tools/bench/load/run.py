"""`shoal load`: stages of load on one or several servers. Servers alternate, so that disturbances affect all."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from shoal.errors import GenerationFailed
from shoal.gc_pause import resume_full_gc, skip_existing_objects
from shoal.tools.bench.document import INTERRUPTS, Document, new_document
from shoal.tools.bench.load.client import LoadOutcome, LoadTarget, send_request
from shoal.tools.bench.load.http import HttpClient, open_client
from shoal.tools.bench.load.search import MAX_TRIALS, highest_rate
from shoal.tools.bench.load.stage import LoadStage, run_stage
from shoal.tools.bench.load.summary import Objective, summarize_stage
from shoal.tools.bench.machine import describe_client
from shoal.tools.bench.progress import BenchProgress, progress_bar
from shoal.tools.bench.texts import SENTENCES, texts

TICK = 0.25


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Stages to run on every target. With `search`, instead search for the highest rate, from the first stage's on."""

    stages: list[LoadStage]
    objective: Objective = field(default_factory=Objective)
    search: bool = False
    warm_up: int = 2  # requests before the measured ones
    sentences: int = 1  # sentences per text
    timeout: float = 60.0
    seed: int = 0


@dataclass(slots=True)
class TargetRun:
    """Results of one target."""

    target: LoadTarget
    name: str
    outcomes: list[tuple[LoadStage, list[LoadOutcome]]] = field(default_factory=list)
    highest_rate: float | None = None
    searched: bool = False

    def as_json(self, objective: Objective) -> dict[str, Any]:
        stages = [summarize_stage(stage, outcomes, objective) for stage, outcomes in self.outcomes if outcomes]
        if self.searched:
            stages.sort(key=lambda stage: stage["load"])
        target = self.target
        return {
            "name": self.name,
            "url": target.url,
            "api": target.api,
            "highest_rate": self.highest_rate,
            "stages": stages,
        }


def run_load(
    targets: Sequence[LoadTarget],
    plan: LoadPlan,
    *,
    progress: bool = True,
    http: HttpClient | None = None,
) -> Document:
    """Run a load test; an interrupt keeps finished requests. Raises GenerationFailed if warm-up fails."""
    document = new_document("load", dict(describe_client()), _settings(plan))
    runs = [TargetRun(target, name) for target, name in zip(targets, target_names(targets), strict=True)]
    seconds = sum(stage.seconds for stage in plan.stages) * len(targets) * (MAX_TRIALS // 2 if plan.search else 1)
    skip_existing_objects()  # a full collection would delay all requests in flight, by 0.1 s
    with progress_bar(seconds, shown=progress) as bar:
        try:
            asyncio.run(_run_targets(runs, plan, bar, http))
            document["complete"] = True
        except INTERRUPTS:
            pass
        finally:
            resume_full_gc()
    document["runs"] = [run.as_json(plan.objective) for run in runs]
    return document


def target_names(targets: Sequence[LoadTarget]) -> list[str]:
    """Return a unique name for each target: host and port, with API and number where needed."""
    alone = Counter(target.name for target in targets)
    names = [target.name if alone[target.name] == 1 else f"{target.name} {target.api}" for target in targets]
    taken = Counter(names)
    return [name if taken[name] == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


async def _run_targets(runs: list[TargetRun], plan: LoadPlan, bar: BenchProgress, given: HttpClient | None) -> None:
    async with open_client(plan.timeout) if given is None else nullcontext(given) as http:
        for run in runs:
            bar.describe(f"{run.name}: warm-up")
            await _warm_up(http, run.target, plan)
        if plan.search:
            for run in runs:
                await _search(http, run, plan, bar)
            return
        for number, stage in enumerate(plan.stages):
            for run in runs:
                await _run(http, run, stage, plan, bar, number)


async def _search(http: HttpClient, run: TargetRun, plan: LoadPlan, bar: BenchProgress) -> None:
    run.searched = True
    first = plan.stages[0]

    async def trial(rate: float) -> bool:
        outcomes = await _run(http, run, replace(first, first=rate, last=rate), plan, bar, len(run.outcomes))
        return plan.objective.kept_by(outcomes)

    run.highest_rate = await highest_rate(trial, first.first)


async def _run(
    http: HttpClient, run: TargetRun, stage: LoadStage, plan: LoadPlan, bar: BenchProgress, number: int
) -> list[LoadOutcome]:
    """Run one stage. Outcomes are added to the run as they arrive, so that an interrupt keeps them."""
    outcomes: list[LoadOutcome] = []
    run.outcomes.append((stage, outcomes))
    began = asyncio.get_running_loop().time()
    # Different sentences in every stage, equal for all targets.
    supply = texts(plan.sentences, first=number * SENTENCES // 7)
    words = list(islice(supply, SENTENCES // plan.sentences))

    async def send(at: int, due: float) -> LoadOutcome:
        return await send_request(http, run.target, words[at % len(words)], at, due, began)

    def note(outcome: LoadOutcome) -> None:
        outcomes.append(outcome)
        if stage.requests is not None:
            bar.advance(stage.seconds / stage.requests)

    try:
        with _ticking(bar, f"{run.name}: {stage.name}", stage.seconds if stage.requests is None else 0.0):
            await run_stage(stage, send, note, plan.seed + number)
        if stage.requests is not None:  # rates refer to the time that the requests took
            run.outcomes[-1] = (replace(stage, seconds=asyncio.get_running_loop().time() - began), outcomes)
    except (asyncio.CancelledError, *INTERRUPTS):
        # Rates of an interrupted stage refer to the time it ran. SIGTERM raises in whichever task is running.
        run.outcomes[-1] = (replace(stage, seconds=asyncio.get_running_loop().time() - began), outcomes)
        raise
    return outcomes


async def _warm_up(http: HttpClient, target: LoadTarget, plan: LoadPlan) -> None:
    clock, problem = asyncio.get_running_loop().time, None
    for number, text in enumerate(islice(texts(plan.sentences, first=SENTENCES - 100), plan.warm_up)):
        now = clock()
        outcome = await send_request(http, target, text, number, now, now)
        problem = "no audio" if outcome.empty else outcome.error
    if problem is not None:
        raise GenerationFailed(
            f"{target.url} failed a warm-up request ({problem}): check that the server is running, has the "
            f"{target.api} API (--api), and accepts --voice and --key"
        )


@contextmanager
def _ticking(bar: BenchProgress, what: str, seconds: float) -> Iterator[None]:
    """Advance the bar with the clock: the duration of a stage is known."""
    bar.describe(what)

    async def tick() -> None:
        for _ in range(int(seconds / TICK)):
            await asyncio.sleep(TICK)
            bar.advance(TICK)

    task = asyncio.get_running_loop().create_task(tick())
    try:
        yield
    finally:
        task.cancel()


def _settings(plan: LoadPlan) -> dict[str, Any]:
    return {**asdict(plan), "stages": [stage.name for stage in plan.stages]}
