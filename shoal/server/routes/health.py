"""`/health`, `/ready`, `/metrics`: for those who run the server. The first two are open: they tell no secret."""

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shoal import __version__
from shoal.server.openapi import answers
from shoal.server.state import AtDesk, Caller, Desk, bearer

router = APIRouter(tags=["Operations"])
metrics_router = APIRouter(tags=["Operations"], dependencies=[Depends(bearer)])

LAG_SECONDS = 0.5


@router.get("/health", summary="Does the process live?")
async def health() -> JSONResponse:
    return JSONResponse({"status": "ok", "version": __version__})


@router.get(
    "/ready",
    summary="Are requests taken, and how does the engine run?",
    responses={503: {"description": "Not now; `state` says why.", "content": {"application/json": {}}}},
)
async def ready(desk: AtDesk) -> JSONResponse:
    state, loaded = desk.host.state, desk.host.loaded
    told = {
        "state": state,
        "model": desk.config.model,
        "rung": loaded.rung if loaded else None,
        "under_way": desk.backlog.running,
    }
    if state == "ready":
        return JSONResponse(told)
    return JSONResponse(told, 503, {"Retry-After": "5"})


@metrics_router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses=answers(401) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(desk: AtDesk, key: Caller) -> Response:
    desk.metrics.ready.set(desk.host.state == "ready")
    await desk.figures.refresh(desk.host)
    content = await asyncio.to_thread(generate_latest, desk.metrics.registry)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


async def watch_lag(desk: Desk) -> None:
    """How late a nap of the event loop ends: what everything else on it waits, too."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(LAG_SECONDS)
        desk.metrics.loop_lag.set(max(0.0, loop.time() - before - LAG_SECONDS))
