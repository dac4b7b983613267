"""OpenTelemetry tracing: one span per request.

Endpoint, headers and sampling are configured by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and so on).
A request with a `traceparent` header continues that trace.
"""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import __version__
from shoal.errors import MissingExtra


class TracingMiddleware:
    """Opens a span around every request. It is the outermost middleware, so the span covers all of the work."""

    def __init__(self, app: ASGIApp, provider: Any = None) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            raise MissingExtra("tracing needs: pip install 'shoal-tts[tracing]'") from None
        self._app = app
        self._extract = propagate.extract
        self._kind = trace.SpanKind.SERVER
        self._tracer = (provider or default_provider()).get_tracer("shoal", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method = scope.get("method", "WS")
        with self._tracer.start_as_current_span(method, context=self._extract(headers), kind=self._kind) as span:
            has_body = False

            async def traced_send(message: Message) -> None:
                nonlocal has_body
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("shoal.request_id", scope["state"]["request_id"])
                elif message["type"] == "http.response.body" and message.get("body") and not has_body:
                    has_body = True
                    span.add_event("first bytes")
                await send(message)

            try:
                await self._app(scope, receive, traced_send)
            finally:
                # The route, not the path: backends group spans by name, and paths contain names of voices.
                if route := getattr(scope.get("route"), "path", ""):
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)


def check_tracing() -> None:
    """Raise MissingExtra unless OpenTelemetry is installed; called before the model is loaded."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise MissingExtra("tracing needs: pip install 'shoal-tts[tracing]'") from None


def default_provider() -> Any:
    """Return a provider that exports spans to an OTLP collector over HTTP, in batches, from a background thread."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MissingExtra("tracing needs: pip install 'shoal-tts[tracing]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "shoal"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
