"""Who asks when.

Closed loop: so many clients, each of which asks again when it has been answered. Open loop: requests come by the clock,
at random moments (Poisson), whether or not earlier ones have been answered, as the public does.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from shoal.errors import InvalidRequest
from shoal.tools.bench.load.client import RequestOutcome

# Beyond this the load generator itself would be the bottleneck.
MAX_IN_FLIGHT = 4000
# Of a client that was refused: one who asks again at once would only count how fast a server says no.
PAUSE = 0.1

# Number of the request, and when it is due on the clock of the event loop.
Ask = Callable[[int, float], Awaitable[RequestOutcome]]
OnOutcome = Callable[[RequestOutcome], None]


@dataclass(frozen=True, slots=True)
class LoadStage:
    """`seconds` of one kind of load. What has been asked by then is waited for. It may grow from `first` to `last`."""

    open: bool
    first: float  # requests per second, or clients
    last: float
    seconds: float

    @property
    def name(self) -> str:
        load = f"{self.first:.3g}" if self.first == self.last else f"{self.first:.3g} to {self.last:.3g}"
        if self.open:
            return f"{load} requests/s"
        return f"{load} client{'' if load == '1' else 's'}"


def parse_stages(text: str, *, open: bool, seconds: float) -> list[LoadStage]:
    """`2`, `1,2,4` (one stage each) or `1..8` (a ramp)."""
    stages = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            load = float(first), float(last if dots else first)
        except ValueError:
            load = (0.0, 0.0)
        whole = open or all(each.is_integer() for each in load)
        if not all(0 < each <= 10_000 for each in load) or not whole:
            what = "a rate" if open else "a number of clients"
            raise InvalidRequest(f"{part!r} is not {what}; for example 2, or 1,2,4 for stages, or 1..8 for a ramp")
        stages.append(LoadStage(open, *load, seconds))
    return stages


async def run_stage(stage: LoadStage, ask: Ask, heard: OnOutcome, seed: int) -> None:
    """Tells `heard` of every request as it ends. Leaving early abandons those under way."""
    async with asyncio.TaskGroup() as group:
        if stage.open:
            await _open_loop(stage, ask, heard, seed, group)
        else:
            _closed_loop(stage, ask, heard, group)


def arrival_times(stage: LoadStage, seed: int) -> Iterator[float]:
    """Seconds from the beginning; on a ramp, candidates of the highest rate are thinned to the rate of the moment."""
    dice, at, most = random.Random(seed), 0.0, max(stage.first, stage.last)
    while True:
        at += dice.expovariate(most)
        if at >= stage.seconds:
            return
        now = stage.first + (stage.last - stage.first) * at / stage.seconds
        if dice.random() * most < now:
            yield at


async def _open_loop(stage: LoadStage, ask: Ask, heard: OnOutcome, seed: int, group: asyncio.TaskGroup) -> None:
    clock, under_way = asyncio.get_running_loop().time, 0
    began = clock()

    async def one(number: int, due: float) -> None:
        nonlocal under_way
        heard(await ask(number, due))
        under_way -= 1

    for number, at in enumerate(arrival_times(stage, seed)):
        await asyncio.sleep(began + at - clock())
        if under_way < MAX_IN_FLIGHT:
            under_way += 1
            group.create_task(one(number, began + at))
        else:
            heard(RequestOutcome(number, at, 0.0, None, 0.0, 0.0, (), "not sent: too many under way"))


def _closed_loop(stage: LoadStage, ask: Ask, heard: OnOutcome, group: asyncio.TaskGroup) -> None:
    clock = asyncio.get_running_loop().time
    began, count = clock(), round(max(stage.first, stage.last))
    numbers = iter(range(1 << 62))

    async def client(joins: float, leaves: float) -> None:
        await asyncio.sleep(joins)
        while clock() - began < leaves:
            outcome = await ask(next(numbers), clock())
            heard(outcome)
            if outcome.error is not None:
                await asyncio.sleep(PAUSE)

    for at in range(count):
        group.create_task(client(*_presence(stage, at)))


def _presence(stage: LoadStage, client: int) -> tuple[float, float]:
    """When a client joins and leaves: on a ramp one after the other, at even distances."""
    few, change = min(stage.first, stage.last), abs(stage.last - stage.first)
    if client < few:
        return 0.0, stage.seconds
    turn = stage.seconds * (client - few + 1) / (change + 1)
    return (turn, stage.seconds) if stage.last > stage.first else (0.0, stage.seconds - turn)
