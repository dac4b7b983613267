"""Health, load and latency of the workers behind a balancer, and the order in which a request tries them."""

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx
import numpy as np

from shoal.cluster.balancer.config import BalancerConfig, WorkerAddress
from shoal.cluster.routing import Candidate, Strategy, make_strategy

logger = logging.getLogger(__name__)

RECENT_REQUESTS = 512  # requests per worker whose latency is reported
DEFAULT_SLOTS = 16  # until the worker has reported its own
MAX_READY_BYTES = 64 << 10


@dataclass(eq=False)
class Worker:
    """One server behind the balancer."""

    name: str
    address: WorkerAddress
    healthy: bool = False
    reason: str = "not checked yet"
    slots: int = DEFAULT_SLOTS
    in_flight: int = 0  # requests that this balancer has sent to it
    reported_load: int = 0  # requests in flight from all clients, as of the last health check
    unanswered_checks: int = 0  # consecutive health checks without an answer
    waits: set[asyncio.Timeout] = field(default_factory=set)  # requests that wait for bytes of this worker
    counts: Counter[str] = field(default_factory=Counter)  # requests, retried, failed
    first_byte_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    total_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))

    @property
    def load(self) -> int:
        """Estimated requests in flight: the higher of the own count and the count that the worker last reported."""
        return max(self.in_flight, self.reported_load)

    @contextmanager
    def request(self) -> Iterator["RequestTimer"]:
        """Count a request as in flight; the timer records its latency."""
        self.in_flight += 1
        self.counts["requests"] += 1
        timer = RequestTimer(self)
        try:
            yield timer
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait for bytes of the worker inside the block. Raises httpx.ReadTimeout after `give_up`."""
        try:
            async with asyncio.timeout(None) as wait:
                self.waits.add(wait)
                try:
                    yield
                finally:
                    self.waits.discard(wait)
        except TimeoutError as error:
            raise httpx.ReadTimeout("the worker does not answer health checks") from error

    def give_up(self) -> None:
        """Time out all waiting requests: a machine that lost power or network never closes its connections."""
        if self.waits:
            logger.warning(
                "worker %s: %d health checks unanswered; retrying or ending its %d requests",
                self.name,
                self.unanswered_checks,
                len(self.waits),
            )
        for wait in tuple(self.waits):
            wait.reschedule(asyncio.get_running_loop().time())

    def mark(self, reason: str) -> None:
        """Set the worker's health; an empty reason is healthy. Changes are logged once."""
        if (reason == "") != self.healthy:
            logger.log(logging.WARNING if reason else logging.INFO, "worker %s: %s", self.name, reason or "healthy")
        self.healthy, self.reason = reason == "", reason

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.address.url,
            "weight": self.address.weight,
            "healthy": self.healthy,
            "reason": self.reason,
            "slots": self.slots,
            "in_flight": self.in_flight,
            "requests": self.counts["requests"],
            "retried": self.counts["retried"],
            "failed": self.counts["failed"],
            "first_byte_ms": _percentiles(self.first_byte_seconds),
            "total_ms": _percentiles(self.total_seconds),
        }


class RequestTimer:
    """Records the time to the first byte and to the end of one request."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._started = worker, time.monotonic()

    def first_byte(self) -> None:
        self._worker.first_byte_seconds.append(time.monotonic() - self._started)

    def end(self) -> None:
        self._worker.total_seconds.append(time.monotonic() - self._started)


class WorkerPool:
    """Checks the workers in the background and orders them for each request."""

    def __init__(self, config: BalancerConfig, client: httpx.AsyncClient) -> None:
        self._config, self._client = config, client
        self.workers = [Worker(f"worker-{number}", address) for number, address in enumerate(config.workers, 1)]
        self._shares = WeightedShares()
        self._strategies: dict[float, Strategy] = {}

    def order(self, voice: str | None) -> list[Worker]:
        """Return the healthy workers, best first.

        Workers of equal weight form a group. A group is chosen by weight, and the strategy orders its workers; the
        other groups follow, so that a request still succeeds when the chosen group fails.
        """
        by_weight = sorted((each for each in self.workers if each.healthy), key=lambda each: each.address.weight)
        groups = {weight: list(group) for weight, group in groupby(by_weight, lambda each: each.address.weight)}
        shares = {weight: weight * len(group) for weight, group in groups.items()}
        return [worker for weight in self._shares.order(shares) for worker in self._ordered(weight, groups, voice)]

    def _ordered(self, weight: float, groups: dict[float, list[Worker]], voice: str | None) -> list[Worker]:
        strategy = self._strategies.setdefault(weight, make_strategy(self._config.strategy))
        by_name = {worker.name: worker for worker in groups[weight]}
        candidates = [Candidate(each.name, each.load, each.slots) for each in groups[weight]]
        return [by_name[candidate.id] for candidate in strategy.order(voice, candidates)]

    async def watch(self) -> None:
        """Check all workers until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self._config.check_seconds)

    async def check(self) -> None:
        await asyncio.gather(*(self._check(worker) for worker in self.workers))

    async def _check(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(2 * self._config.connect_seconds):  # to connect, and to answer
                code, status = await self._ready(worker)
        except (httpx.HTTPError, TimeoutError) as problem:
            worker.mark(f"no answer to /ready: {type(problem).__name__}")
            worker.unanswered_checks += 1
            if worker.unanswered_checks >= self._config.give_up_checks:
                worker.give_up()
            return
        worker.unanswered_checks = 0
        if code != 200:
            worker.mark(f"not ready: {(status or {}).get('state', code)}")
            return
        if status is None:
            worker.mark("not a Shoal server: the answer to /ready is not a JSON object")
            return
        worker.slots = _count(status.get("slots")) or worker.slots
        worker.reported_load = _count(status.get("in_flight"))
        worker.mark("")

    async def _ready(self, worker: Worker) -> tuple[int, dict[str, Any] | None]:
        """Return status and body of the worker's `/ready`; None for a body that is not a JSON object."""
        url, seconds = f"{worker.address.url}/ready", self._config.connect_seconds
        async with self._client.stream("GET", url, timeout=seconds) as answer:
            body = b""
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_READY_BYTES:
                    return answer.status_code, None
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return answer.status_code, None
        return answer.status_code, document if isinstance(document, dict) else None


class WeightedShares:
    """Smooth weighted round robin: distributes the choices of each key evenly over time, in proportion to its share."""

    def __init__(self) -> None:
        self._credit: Counter[float] = Counter()

    def order(self, shares: dict[float, float]) -> list[float]:
        """Return the keys, the chosen one first and the others by falling share."""
        if len(shares) < 2:
            return list(shares)
        for key, share in shares.items():
            self._credit[key] += share  # type: ignore[assignment]  # Counter's type allows integers only
        chosen = max(shares, key=lambda key: self._credit[key])
        self._credit[chosen] -= sum(shares.values())  # type: ignore[assignment]
        return [chosen, *sorted((key for key in shares if key != chosen), key=lambda key: -shares[key])]


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _percentiles(seconds: deque[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    found = np.percentile(np.array(seconds) * 1000, (50, 95))
    return {"p50": round(float(found[0]), 1), "p95": round(float(found[1]), 1), "requests": len(seconds)}
