import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.config import ServerConfig
from shoal.engine.process.worker import EngineSource
from shoal.errors import MissingExtra
from shoal.server.run import serve
from shoal.server.tracing import TracingMiddleware

pytest.importorskip("opentelemetry.sdk")

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def app(scope: Any, receive: Any, send: Any) -> None:
    scope["state"], scope["route"] = {"request_id": "find-me"}, SimpleNamespace(path="/v1/references/{name}")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


def test_a_request_is_a_span_of_the_clients_trace() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    async def ignore(message: Any) -> None:
        return None

    scope = {"type": "http", "method": "POST", "path": "/v1/references/alice", "headers": [(b"traceparent", PARENT)]}
    asyncio.run(TracingMiddleware(app, provider)(scope, ignore, ignore))
    (span,) = spans.get_finished_spans()
    assert format(span.context.trace_id, "032x") == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert span.name == "POST /v1/references/{name}", "backends group spans by name"
    assert span.attributes == {
        "http.response.status_code": 200,
        "http.route": "/v1/references/{name}",
        "shoal.request_id": "find-me",
    }
    assert [event.name for event in span.events] == ["first bytes"]


def test_a_server_does_not_start_without_the_extra_that_tracing_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtra, match=r"pip install 'shoal-tts\[tracing\]'"):
        serve(ServerConfig(port=0, tracing=True), EngineSource("random:tiny"), tmp_path)
