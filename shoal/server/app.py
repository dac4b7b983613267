"""Assemble the FastAPI application: routes, middleware, error handlers, background tasks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI

from shoal import __version__
from shoal.api.state import ServerState
from shoal.server.error_responses import add_exception_handlers, add_socket_not_found
from shoal.server.middleware.connection_limit import ConnectionLimit
from shoal.server.middleware.errors import ErrorMiddleware
from shoal.server.middleware.hosts import HostMiddleware
from shoal.server.middleware.origins import OriginMiddleware
from shoal.server.middleware.request_id import RequestIDMiddleware
from shoal.server.openapi import document
from shoal.server.routes import about, admin, codec, convert, elevenlabs, fish, health, openai, sagemaker, static, text
from shoal.server.tracing import TracingMiddleware

ABOUT = """Text to speech with the Fish-Speech models, through four APIs: Fish Audio's (`/v1/tts`, and live over a
WebSocket at `/v1/tts/live`), OpenAI's (`/v1/audio/speech`), ElevenLabs' (`/v1/text-to-speech/{voice_id}`) and
SageMaker's (`/invocations`). Unknown fields are rejected."""


def create_app(
    state: ServerState, on_failure: Callable[[], None] = lambda: None, *, before: Sequence[APIRouter] = ()
) -> FastAPI:
    """Create the application. `on_failure` is called on the event loop when the model cannot be loaded.

    Routers in `before` take precedence over the built-in routes.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.lifecycle.start(on_failure)
        background = (state.watch_keys(), state.record_usage(), health.measure_loop_lag(state.metrics))
        tasks = [asyncio.create_task(work) for work in background]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await state.lifecycle.close(state.config.drain_seconds)
        if state.usage is not None:
            await state.usage.save()
        state.encoder_pool.shutdown(wait=False, cancel_futures=True)
        state.convert_pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Shoal", version=__version__, description=ABOUT, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.server = state
    modules = (text, codec, convert, sagemaker, about, health)
    # Routes are matched in this order, so the busiest, those of speech, come first.
    speech = (fish.speech.speech_router, openai.speech.speech_router)
    others = (*fish.ROUTERS, *openai.ROUTERS, *elevenlabs.ROUTERS, *(each.router for each in modules))
    for router in (*before, *speech, *others):
        app.include_router(router)
    # Fish Audio's cloud serves ElevenLabs' clients under this prefix.
    for router in elevenlabs.SEPARATE_ROUTERS:
        app.include_router(router, prefix="/compat/elevenlabs", include_in_schema=False)
    if state.config.admin_key is not None:
        app.include_router(admin.router)
    if state.config.metrics:
        app.include_router(health.metrics_router)
    static.add_routes(app)
    add_exception_handlers(app, state.queue.retry_after_seconds)
    add_socket_not_found(app)
    add_middleware(app, state)
    app.openapi = lambda: document(app, requires_key=state.requires_key)  # type: ignore[method-assign]
    return app


def add_middleware(app: FastAPI, state: ServerState) -> None:
    """Add the middleware, innermost first.

    RequestIDMiddleware wraps the others, so that every rejection has an id and is counted. OriginMiddleware wraps
    ErrorMiddleware, so that permitted web pages can read error responses.
    """
    app.add_middleware(
        ConnectionLimit,
        max_connections=state.config.limits.connections,
        retry_after_seconds=state.queue.retry_after_seconds,
    )
    app.add_middleware(ErrorMiddleware, is_ending=lambda: state.lifecycle.drain_ended)
    app.add_middleware(OriginMiddleware, allowed=state.config.cors_origins)
    app.add_middleware(
        HostMiddleware,
        allowed=state.config.allowed_hosts,
        is_open=lambda: state.config.on_loopback and not state.requires_key,
    )
    app.add_middleware(RequestIDMiddleware, metrics=state.metrics)
    if state.config.tracing:
        app.add_middleware(TracingMiddleware)
