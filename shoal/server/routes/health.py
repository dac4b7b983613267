"""Health probes and metrics. `/health` and `/ready` need no key: they reveal nothing secret."""

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shoal import __version__
from shoal.metrics import Metrics
from shoal.server.openapi import error_responses
from shoal.server.state import Caller, State, bearer

router = APIRouter(tags=["Operations"])
metrics_router = APIRouter(tags=["Operations"], dependencies=[Depends(bearer)])

LAG_SECONDS = 0.5


@router.head("/health", include_in_schema=False)  # uptime monitors and `wget --spider` send HEAD
@router.get("/health", summary="Check that the process is alive")
async def health() -> JSONResponse:
    return JSONResponse({"status": "ok", "version": __version__})


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready",
    summary="Check that requests are accepted, and show the backends of model and codec",
    description="`engine` is `awake`, or with `sleep_seconds` also `asleep` or `waking`, which accept requests.",
    responses={503: {"description": "Not ready; `state` says why.", "content": {"application/json": {}}}},
)
async def ready(state: State) -> JSONResponse:
    lifecycle = state.lifecycle
    backends = lifecycle.engine.backends() if lifecycle.engine else None
    content = {
        "state": lifecycle.state,
        "engine": lifecycle.engine.activity() if lifecycle.engine else None,
        "model": state.config.model,
        "backend": backends.model if backends else None,
        "codec_backend": backends.codec if backends else None,
        "in_flight": state.queue.in_flight,
        "slots": state.queue.slots,
    }
    if lifecycle.state == "ready":
        return JSONResponse(content)
    return JSONResponse(content, 503, {"Retry-After": "5"})


@metrics_router.get(
    "/metrics",
    summary="Export metrics for Prometheus",
    response_class=Response,
    responses=error_responses(401) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(state: State, key: Caller) -> Response:
    state.metrics.ready.set(state.lifecycle.state == "ready")
    await state.engine_stats.refresh(state.lifecycle)
    content = await asyncio.to_thread(generate_latest, state.metrics.registry)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


async def measure_loop_lag(metrics: Metrics) -> None:
    """Update the event loop lag until cancelled: how late a sleeping task wakes, which delays every other task too."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(LAG_SECONDS)
        metrics.loop_lag.set(max(0.0, loop.time() - before - LAG_SECONDS))
