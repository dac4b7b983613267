"""All routes over one desk."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI

from shoal import __version__
from shoal.server import error_responses as problems
from shoal.server.middleware.connection_limit import Occupancy
from shoal.server.middleware.origins import Origins
from shoal.server.middleware.request_id import Identity
from shoal.server.openapi import document
from shoal.server.routes import about, codec, convert, fish, health, live, openai, sagemaker, voices
from shoal.server.routes import static as page
from shoal.server.state import Desk
from shoal.server.tracing import Tracing

ABOUT = """Speech from the Fish-Speech voices, by three APIs: Fish Audio's (`/v1/tts`, also live over a WebSocket at
`/v1/tts/live`), OpenAI's (`/v1/audio/speech`) and SageMaker's (`/invocations`). Fields that are unknown are refused."""


def create_app(
    desk: Desk, on_failure: Callable[[], None] = lambda: None, *, before: Sequence[APIRouter] = ()
) -> FastAPI:
    """`on_failure` is called when the model cannot be loaded. Routes of `before` are asked before our own."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        desk.host.start(on_failure)
        watches = [
            asyncio.create_task(watch) for watch in (desk.watch_keys(), desk.keep_usage(), health.watch_lag(desk))
        ]
        yield
        for watch in watches:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
        await desk.host.close(desk.config.drain_seconds)
        if desk.usage is not None:
            await desk.usage.save()
        desk.encoders.shutdown(wait=False, cancel_futures=True)
        desk.converter.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="Shoal", version=__version__, description=ABOUT, lifespan=life, docs_url=None, redoc_url=None)
    app.state.desk = desk
    rooms = (fish, voices, codec, convert, openai, sagemaker, about, health, live)
    for router in (*before, *(room.router for room in rooms)):
        app.include_router(router)
    if desk.config.metrics:
        app.include_router(health.metrics_router)
    page.add_to(app)
    problems.add_to(app, desk.backlog.wait_seconds)
    # The last is asked first: a refusal by any of them has an id and is counted, and pages that may can read it.
    app.add_middleware(Occupancy, most=desk.config.limits.connections, wait_seconds=desk.backlog.wait_seconds)
    app.add_middleware(problems.LastAnswer)
    app.add_middleware(Origins, allowed=desk.config.cors_origins)
    app.add_middleware(Identity, metrics=desk.metrics)
    if desk.config.tracing:
        app.add_middleware(Tracing)
    app.openapi = lambda: document(app, keyed=desk.keyed)  # type: ignore[method-assign]
    return app
