"""Requests that the router counts, in every order in which Ray reports them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shoal.cluster.router import StrategyRouter

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # raised by Ray


@dataclass(frozen=True)
class Id:
    """Stands for Ray's id of a replica."""

    unique_id: str


FIRST, SECOND = Id("first"), Id("second")


@dataclass
class Result:
    """Stands for Ray's result of a request that was sent to a replica."""

    complete: bool = False
    callbacks: list[Callable[[Any], None]] = field(default_factory=list)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)
        if self.complete:
            callback(None)

    def end(self) -> None:
        self.complete = True
        for callback in self.callbacks:
            callback(None)


def make_router(frontends: int = 1) -> "StrategyRouter":
    from ray.serve._private.request_router.common import ReplicaQueueLengthCache

    from shoal.cluster.router import StrategyRouter

    router = object.__new__(StrategyRouter)
    router._replica_queue_len_cache = ReplicaQueueLengthCache(get_curr_time_s=lambda: 0.0)
    router.initialize_state("least-connections", slots=4, frontends=frontends)
    return router


def make_request(id: str = "id") -> Any:
    from ray.serve.request_router import PendingRequest

    return PendingRequest([], {}, SimpleNamespace(internal_request_id=id))


async def choose(router: "StrategyRouter", request: Any) -> Any:
    """Return the id of the replica that the router prefers."""
    ranked = await router.choose_replicas([SimpleNamespace(replica_id=id) for id in (FIRST, SECOND)], request)
    return ranked[0][0].replica_id


async def loads(router: "StrategyRouter") -> Counter[Any]:
    await asyncio.sleep(0)  # callbacks of results reach the router through its event loop
    return router._loads()


@pytest.mark.parametrize(("frontends", "preferred"), [(1, FIRST), (2, SECOND)])
def test_reported_loads_count_only_where_there_are_other_frontends(frontends: int, preferred: Id) -> None:
    """A replica's report includes calls for statistics that were running at that moment."""

    async def route() -> Any:
        router = make_router(frontends)
        for replica in (FIRST, SECOND):
            router.on_request_routed(make_request(), replica, Result())
        router._replica_queue_len_cache.update(FIRST, 3)
        return await choose(router, make_request())

    assert asyncio.run(route()) == preferred


def test_a_request_counts_from_the_choice_to_its_end() -> None:
    async def route() -> None:
        router, request, result = make_router(), make_request(), Result()
        assert await choose(router, request) == FIRST
        assert await loads(router) == {FIRST: 1}
        router.on_request_routed(request, SECOND, result)  # the first choice had no free capacity
        assert await loads(router) == {SECOND: 1}
        result.end()
        assert await loads(router) == {}

    asyncio.run(route())


def test_a_request_that_ends_before_its_acceptance_is_read_stops_counting() -> None:
    """An invalid request ends within a millisecond; a busy frontend then sees the end first."""

    async def route() -> None:
        router, request = make_router(), make_request()
        replica = await choose(router, request)
        router.on_request_completed(replica, "id")
        router.on_request_routed(request, replica, Result(complete=True))
        assert await loads(router) == {}

    asyncio.run(route())


def test_calls_of_one_http_request_count_one_by_one() -> None:
    """Ray gives them the same id."""

    async def route() -> None:
        router, results = make_router(), [Result(), Result()]
        for result in results:
            request = make_request("same")
            router.on_request_routed(request, await choose(router, request), result)
        assert await loads(router) == {FIRST: 1, SECOND: 1}
        results[0].end()
        router.on_request_completed(FIRST, "same")
        assert await loads(router) == {SECOND: 1}

    asyncio.run(route())


def test_a_refused_request_counts_only_where_it_is_sent_next() -> None:
    async def route() -> None:
        router, request = make_router(), make_request()
        assert await choose(router, request) == FIRST
        request.reset_future()  # as Ray does before it routes the request again
        assert await choose(router, request) == SECOND
        assert await loads(router) == {SECOND: 1}

    asyncio.run(route())


def test_a_request_that_is_cancelled_before_it_is_sent_stops_counting() -> None:
    async def route() -> None:
        router, request = make_router(), make_request()
        await choose(router, request)
        request.future.cancel()
        assert await loads(router) == {}

    asyncio.run(route())


def test_a_request_that_is_dropped_between_choice_and_sending_stops_counting() -> None:
    """A client may disconnect when Ray has taken the choice but the task that sends the request has not resumed."""

    async def route() -> None:
        router, request = make_router(), make_request()
        request.future.set_result(await choose(router, request))
        del request
        assert await loads(router) == {}

    asyncio.run(route())
