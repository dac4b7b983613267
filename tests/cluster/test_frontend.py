import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.clock import FakeClock


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # raised by Ray
def test_a_cluster_without_replicas_is_not_ready() -> None:
    from shoal.cluster.frontend import watch_replicas
    from shoal.cluster.service import ClusterService

    handle = SimpleNamespace(options=lambda stream: SimpleNamespace(speak=None))
    service = ClusterService(handle, None)  # type: ignore[arg-type]
    found: list[dict[str, Any] | Exception] = [{"ready": 0}, {"ready": 2}, RuntimeError("no controller"), {"ready": 0}]
    seen: list[bool] = []

    def health() -> dict[str, Any]:
        seen.append(service.ready)
        answer = found.pop(0) if found else {"ready": 0}
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def watch() -> None:
        task = asyncio.create_task(watch_replicas(service, health, seconds=0.0))
        while len(seen) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(watch())
    assert seen[:5] == [True, False, True, True, False]


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # raised by Ray
def test_a_controller_that_stops_during_the_query_means_no_application(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve
    from ray.exceptions import ActorDiedError

    from shoal.cluster import lifecycle

    def ask() -> None:
        raise ActorDiedError

    monkeypatch.setattr(lifecycle, "serve_is_running", lambda: True)
    monkeypatch.setattr(serve, "status", ask)
    assert lifecycle.status()["state"] == lifecycle.NOT_THERE
    assert not lifecycle.delete_application()


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # raised by Ray
@pytest.mark.parametrize("late", [True, False])
def test_a_proxy_that_does_not_start_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
    from ray import serve
    from ray.exceptions import ActorDiedError

    from shoal.cluster import lifecycle
    from shoal.errors import EngineStopped

    def start(**options: object) -> None:
        raise TimeoutError("HTTP proxies not available after 60s.") if late else ActorDiedError()

    monkeypatch.setattr(serve, "start", start)
    with pytest.raises(EngineStopped, match=r"^Ray Serve did not start: .* On a busy machine, try again$"):
        lifecycle._start_serve("HeadOnly", "127.0.0.1", 8080)


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # raised by Ray
def test_a_replica_gets_the_time_that_is_left_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.cluster import service
    from shoal.speech import SpeechRequest

    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=FakeClock(now=107.0)))
    sent: list[SpeechRequest] = []

    class Response:
        def __aiter__(self) -> "Response":
            return self

        async def __anext__(self) -> None:
            raise StopAsyncIteration

    def remote(request: SpeechRequest) -> Response:
        sent.append(request)
        return Response()

    handle = SimpleNamespace(options=lambda stream: SimpleNamespace(speak=SimpleNamespace(remote=remote)))
    cluster = service.ClusterService(handle, SimpleNamespace(sample_rate=16_000))  # type: ignore[arg-type]

    async def collect(deadline: float | None) -> None:
        request = SpeechRequest("Hello.", timeout=30.0)
        assert [chunk async for chunk in cluster.speak(request, deadline)] == []

    for deadline in (130.0, None, 100.0):
        asyncio.run(collect(deadline))
    assert [request.timeout for request in sent] == [23.0, 30.0, 1e-3]
