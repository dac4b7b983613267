"""Event loop of the simulation: routes arrivals to servers, runs their steps and applies outages."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.cluster.routing import Candidate, StrategyName, make_strategy
from shoal.tools.simulate.server import Fleet, SimulatedRequest, SimulatedServer
from shoal.tools.simulate.traffic import Arrival

OnArrival = Callable[[int], None]


@dataclass(frozen=True)
class Outage:
    """Outage of a zone from `at` for `seconds`."""

    at: float
    seconds: float
    zone: int = 0


@dataclass(frozen=True)
class Scenario:
    """A fleet, its traffic and its failures."""

    fleet: Fleet
    arrivals: Sequence[Arrival]
    servers: int
    strategy: StrategyName = "voice-affinity"
    zones: int = 1
    outage: Outage | None = None
    overhead: float = 0.0  # network round trip added to every latency, in seconds


def simulate(scenario: Scenario, on_arrival: OnArrival = lambda count: None) -> "SimulationResult":
    """Run a scenario to its end. `on_arrival` is called with the number of requests that have arrived."""
    simulation = Simulation(scenario)
    return SimulationResult(simulation.run(on_arrival), list(simulation.servers.values()), scenario.overhead)


@dataclass(frozen=True)
class SimulationResult:
    """Requests and servers after a run."""

    requests: list[SimulatedRequest]
    servers: list[SimulatedServer]
    overhead: float

    def first_audio(self) -> list[float]:
        """Return the times to first audio in seconds, sorted; requests without audio are left out."""
        started = [(each.first_audio, each.arrival.at) for each in self.requests if each.first_audio is not None]
        return sorted(first - at + self.overhead for first, at in started)

    def latency(self) -> list[float]:
        """Return the times to the last audio of completed requests in seconds, sorted."""
        done = [(each.ended, each.arrival.at) for each in self.requests if each.ended is not None and not each.failed]
        return sorted(ended - at + self.overhead for ended, at in done)

    @property
    def failed(self) -> int:
        return sum(each.failed or each.ended is None for each in self.requests)

    @property
    def seconds(self) -> float:
        """Simulated seconds until the last audio."""
        return max((each.ended or 0.0 for each in self.requests), default=0.0)


class Simulation:
    """Event queue and servers of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._strategy = make_strategy(scenario.strategy)
        self.servers = {
            f"gpu-{number}": SimulatedServer(f"gpu-{number}", number % scenario.zones, scenario.fleet)
            for number in range(scenario.servers)
        }
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._queued: list[SimulatedRequest] = []  # arrived while no server was alive

    def run(self, on_arrival: OnArrival) -> list[SimulatedRequest]:
        rate = self._scenario.fleet.costs.frame_rate
        requests = [
            SimulatedRequest(number, arrival, max(1, round(arrival.seconds * rate)))
            for number, arrival in enumerate(self._scenario.arrivals)
        ]
        if (outage := self._scenario.outage) is not None:
            self._at(outage.at, lambda now: self._fail_zone(outage.zone, now))
            self._at(outage.at + outage.seconds, lambda now: self._recover(outage.zone, now))
        for number, request in enumerate(requests, 1):
            self._until(request.arrival.at)
            self._route(request, request.arrival.at)
            on_arrival(number)
        self._until(float("inf"))
        return requests

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _route(self, request: SimulatedRequest, now: float) -> None:
        slots = self._scenario.fleet.config.slots
        candidates = [Candidate(each.id, each.load, slots) for each in self.servers.values() if each.alive]
        if not candidates:
            self._queued.append(request)
            return
        chosen = self._strategy.order(request.arrival.voice, candidates)[0]
        server = self.servers[chosen.id]
        server.add(request)
        if not server.busy:
            self._step(server, now)

    def _step(self, server: SimulatedServer, now: float) -> None:
        end = server.begin_step(now)
        if end is not None:
            self._while_alive(end, server, self._end_step)

    def _end_step(self, server: SimulatedServer, now: float) -> None:
        self._while_alive(server.end_step(now), server, self._step)

    def _while_alive(
        self, time: float, server: SimulatedServer, event: Callable[[SimulatedServer, float], None]
    ) -> None:
        """Schedule an event of a server; it is dropped if the server fails before `time`."""
        generation = server.generation
        self._at(time, lambda now: event(server, now) if server.generation == generation else None)

    def _fail_zone(self, zone: int, now: float) -> None:
        """Fail the requests that have sent audio and reroute the others."""
        lost = [request for server in self.servers.values() if server.zone == zone for request in server.fail()]
        for request in lost:
            if request.first_audio is not None:
                request.failed, request.ended = True, now
            else:
                request.restart()
                self._route(request, now)

    def _recover(self, zone: int, now: float) -> None:
        for server in self.servers.values():
            server.alive = server.alive or server.zone == zone
        waiting, self._queued = self._queued, []
        for request in waiting:
            self._route(request, now)
