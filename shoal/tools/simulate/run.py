"""A fleet under traffic, event by event."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.cluster.routing import Candidate, StrategyName, make_strategy
from shoal.tools.simulate.server import Fleet, SimulatedRequest, SimulatedServer
from shoal.tools.simulate.traffic import Arrival

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Outage:
    """A zone that is gone for a while."""

    at: float
    seconds: float
    zone: int = 0


@dataclass(frozen=True)
class Scenario:
    fleet: Fleet
    arrivals: Sequence[Arrival]
    servers: int
    strategy: StrategyName = "voice-affinity"
    zones: int = 1
    outage: Outage | None = None
    overhead: float = 0.0  # seconds a request takes to its server and back


def simulate(scenario: Scenario, tick: Tick = lambda done: None) -> "SimulationResult":
    """What becomes of every request. `tick` is told how many have come."""
    simulation = Simulation(scenario)
    return SimulationResult(simulation.run(tick), list(simulation.servers.values()), scenario.overhead)


@dataclass(frozen=True)
class SimulationResult:
    speeches: list[SimulatedRequest]
    servers: list[SimulatedServer]
    overhead: float

    def first_audio(self) -> list[float]:
        """Seconds from request to first audio, of those that had any, in order of size."""
        heard = [(each.first_audio, each.arrival.at) for each in self.speeches if each.first_audio is not None]
        return sorted(first - at + self.overhead for first, at in heard)

    def whole(self) -> list[float]:
        """Seconds from request to last audio, of those that were spoken to their end, in order of size."""
        spoken = [(each.ended, each.arrival.at) for each in self.speeches if each.ended is not None and not each.failed]
        return sorted(ended - at + self.overhead for ended, at in spoken)

    @property
    def failed(self) -> int:
        return sum(each.failed or each.ended is None for each in self.speeches)

    @property
    def seconds(self) -> float:
        """From the first request to the last audio."""
        return max((each.ended or 0.0 for each in self.speeches), default=0.0)


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._strategy = make_strategy(scenario.strategy)
        self.servers = {
            f"gpu-{number}": SimulatedServer(f"gpu-{number}", number % scenario.zones, scenario.fleet)
            for number in range(scenario.servers)
        }
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._queued: list[SimulatedRequest] = []  # no server is alive

    def run(self, tick: Tick) -> list[SimulatedRequest]:
        rate = self._scenario.fleet.costs.frame_rate
        speeches = [
            SimulatedRequest(number, arrival, max(1, round(arrival.seconds * rate)))
            for number, arrival in enumerate(self._scenario.arrivals)
        ]
        if (outage := self._scenario.outage) is not None:
            self._at(outage.at, lambda now: self._fail_zone(outage.zone, now))
            self._at(outage.at + outage.seconds, lambda now: self._recover(outage.zone, now))
        for number, speech in enumerate(speeches, 1):
            self._until(speech.arrival.at)
            self._route(speech, speech.arrival.at)
            tick(number)
        self._until(float("inf"))
        return speeches

    def _at(self, time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def _until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            now, _, what = heapq.heappop(self._events)
            what(now)

    def _route(self, speech: SimulatedRequest, now: float) -> None:
        slots = self._scenario.fleet.config.slots
        candidates = [Candidate(each.id, each.load, slots) for each in self.servers.values() if each.alive]
        if not candidates:
            self._queued.append(speech)
            return
        chosen = self._strategy.order(speech.arrival.voice, candidates)[0]
        server = self.servers[chosen.id]
        server.take(speech)
        if not server.busy:
            self._step(server, now)

    def _step(self, server: SimulatedServer, now: float) -> None:
        end = server.begin_step(now)
        if end is not None:
            self._while_alive(end, server, self._end_step)

    def _end_step(self, server: SimulatedServer, now: float) -> None:
        self._while_alive(server.end_step(now), server, self._step)

    def _while_alive(
        self, time: float, server: SimulatedServer, what: Callable[[SimulatedServer, float], None]
    ) -> None:
        """Do it at that time, unless the server has died until then."""
        life = server.generation
        self._at(time, lambda now: what(server, now) if server.generation == life else None)

    def _fail_zone(self, zone: int, now: float) -> None:
        lost = [speech for server in self.servers.values() if server.zone == zone for speech in server.die()]
        for speech in lost:
            if speech.first_audio is not None:
                speech.failed, speech.ended = True, now
            else:
                speech.start_over()
                self._route(speech, now)

    def _recover(self, zone: int, now: float) -> None:
        for server in self.servers.values():
            server.alive = server.alive or server.zone == zone
        waiting, self._queued = self._queued, []
        for speech in waiting:
            self._route(speech, now)
