"""OpenTelemetry spans, one per request, for those who have a collector.

The address, headers and sampling come from OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and so on). A
request that brings a `traceparent` continues that trace.
"""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import __version__
from shoal.errors import MissingExtra


class Tracing:
    """Outside of everything else: what the app does for a request happens within its span."""

    def __init__(self, app: ASGIApp, provider: Any = None) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            raise MissingExtra("Tracing needs: pip install 'shoal[tracing]'") from None
        self._app = app
        self._extract = propagate.extract
        self._kind = trace.SpanKind.SERVER
        self._tracer = (provider or usual_provider()).get_tracer("shoal", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracer.start_as_current_span(
            f"{scope.get('method', 'WS')} {scope['path']}", context=self._extract(headers), kind=self._kind
        ) as span:

            async def told(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("shoal.request_id", scope["state"]["request_id"])
                elif message["type"] == "http.response.body" and message.get("body") and "audio" not in seen:
                    seen.add("audio")
                    span.add_event("first bytes")
                await send(message)

            seen: set[str] = set()
            await self._app(scope, receive, told)


def usual_provider() -> Any:
    """Spans go to an OTLP collector over HTTP, in batches, off the event loop."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MissingExtra("Tracing needs: pip install 'shoal[tracing]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "shoal"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
