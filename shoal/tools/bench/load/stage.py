"""Stages of a load test.

Closed loop: N clients; each sends its next request when the last one has ended. Open loop: requests arrive at
random times (Poisson), whether or not earlier ones have ended, as with independent users. Bursts: N requests at
the same time, and the next N when all of them have ended.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal

from shoal.errors import InvalidRequest
from shoal.tools.bench.load.client import LoadOutcome

# Beyond this the load generator itself would be the bottleneck.
MAX_IN_FLIGHT = 4000
# Seconds a closed-loop client waits after an error or an answer without audio, so that it does not just measure how
# fast those are returned.
PAUSE = 0.1
# Seconds between two bursts, for the server to release the resources of the last one.
BURST_PAUSE = 0.1

Arrivals = Literal["open", "closed", "burst"]

# Arguments: number of the request and its due time on the clock of the event loop.
SendRequest = Callable[[int, float], Awaitable[LoadOutcome]]
OnOutcome = Callable[[LoadOutcome], None]


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Load for `seconds`, constant or a ramp from `first` to `last`, or until `requests` were sent.

    Requests in flight at the end are completed.
    """

    arrivals: Arrivals
    first: float  # requests per second (open loop), clients (closed loop), or requests of a burst
    last: float
    seconds: float
    requests: int | None = None

    @property
    def name(self) -> str:
        load = f"{self.first:.3g}" if self.first == self.last else f"{self.first:.3g} to {self.last:.3g}"
        if self.arrivals == "open":
            return f"{load} requests/s"
        if self.arrivals == "burst":
            return f"{load} at once"
        return f"{load} client{'' if load == '1' else 's'}"


MAX_LOAD: dict[Arrivals, int] = {"open": 10_000, "closed": 10_000, "burst": MAX_IN_FLIGHT}
# Description and syntax of each kind of load, for error messages.
FORMS: dict[Arrivals, str] = {
    "open": "a rate, such as 2, or 1,2,4 for stages, or 1..8 for a ramp",
    "closed": "a number of clients, such as 2, or 1,2,4 for stages, or 1..8 for a ramp",
    "burst": "a number of requests at once, such as 16, or 4,16,64 for stages",
}


def parse_stages(text: str, arrivals: Arrivals, *, seconds: float, requests: int | None = None) -> list[LoadStage]:
    """Parse `2`, `1,2,4` (one stage each) or `1..8` (a ramp; not for bursts). Raises InvalidRequest."""
    stages = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            load = float(first), float(last if dots else first)
        except ValueError:
            load = (0.0, 0.0)
        whole = arrivals == "open" or all(each.is_integer() for each in load)
        ramp = bool(dots) and arrivals == "burst"
        if not all(0 < each <= MAX_LOAD[arrivals] for each in load) or not whole or ramp:
            raise InvalidRequest(f"{part!r} is not {FORMS[arrivals]} (at most {MAX_LOAD[arrivals]:,})")
        stages.append(LoadStage(arrivals, *load, seconds, requests))
    return stages


async def run_stage(stage: LoadStage, send: SendRequest, on_outcome: OnOutcome, seed: int) -> None:
    """Run a stage and call `on_outcome` for every request as it ends. Cancellation drops the requests in flight."""
    if stage.arrivals == "burst":
        await _bursts(stage, send, on_outcome)
        return
    async with asyncio.TaskGroup() as group:
        if stage.arrivals == "open":
            await _open_loop(stage, send, on_outcome, seed, group)
        else:
            _closed_loop(stage, send, on_outcome, group)


def arrival_times(stage: LoadStage, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds; a ramp is a Poisson process at the peak rate, thinned to the current rate."""
    rng, at, peak = random.Random(seed), 0.0, max(stage.first, stage.last)
    while True:
        at += rng.expovariate(peak)
        if at >= stage.seconds:
            return
        now = stage.first + (stage.last - stage.first) * at / stage.seconds
        if rng.random() * peak < now:
            yield at


async def _open_loop(
    stage: LoadStage, send: SendRequest, on_outcome: OnOutcome, seed: int, group: asyncio.TaskGroup
) -> None:
    clock, in_flight = asyncio.get_running_loop().time, 0
    began = clock()

    async def one(number: int, due: float) -> None:
        nonlocal in_flight
        on_outcome(await send(number, due))
        in_flight -= 1

    for number, at in enumerate(islice(arrival_times(stage, seed), stage.requests)):
        await asyncio.sleep(began + at - clock())
        if in_flight < MAX_IN_FLIGHT:
            in_flight += 1
            group.create_task(one(number, began + at))
        else:
            on_outcome(LoadOutcome(number, at, 0.0, None, 0.0, 0.0, (), "not sent: too many in flight"))


def _closed_loop(stage: LoadStage, send: SendRequest, on_outcome: OnOutcome, group: asyncio.TaskGroup) -> None:
    clock = asyncio.get_running_loop().time
    began, clients = clock(), round(max(stage.first, stage.last))
    numbers = count(0) if stage.requests is None else iter(range(stage.requests))

    async def client(starts: float, stops: float) -> None:
        await asyncio.sleep(starts)
        while clock() - began < stops and (number := next(numbers, None)) is not None:
            outcome = await send(number, clock())
            on_outcome(outcome)
            if not outcome.spoken:
                await asyncio.sleep(PAUSE)

    for at in range(clients):
        group.create_task(client(*_presence(stage, at)))


async def _bursts(stage: LoadStage, send: SendRequest, on_outcome: OnOutcome) -> None:
    clock, size = asyncio.get_running_loop().time, round(stage.first)
    numbers = count(0) if stage.requests is None else iter(range(stage.requests))
    began = clock()

    async def one(number: int, due: float) -> None:
        on_outcome(await send(number, due))

    while clock() - began < stage.seconds and (burst := list(islice(numbers, size))):
        if burst[0] > 0:
            await asyncio.sleep(BURST_PAUSE)
        due = clock()
        async with asyncio.TaskGroup() as group:
            for number in burst:
                group.create_task(one(number, due))


def _presence(stage: LoadStage, client: int) -> tuple[float, float]:
    """Return when a client starts and stops; on a ramp, clients start or stop at even intervals."""
    few, change = min(stage.first, stage.last), abs(stage.last - stage.first)
    if client < few:
        return 0.0, stage.seconds
    turn = stage.seconds * (client - few + 1) / (change + 1)
    return (turn, stage.seconds) if stage.last > stage.first else (0.0, stage.seconds - turn)
