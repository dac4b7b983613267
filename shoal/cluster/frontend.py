"""HTTP frontend of the cluster: the application of `shoal serve` on top of the replicas, with two more routes."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaState
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineLifecycle, engine_handle
from shoal.api.state import create_state
from shoal.cluster.config import ClusterConfig
from shoal.cluster.lifecycle import APP_NAME
from shoal.cluster.service import ClusterService
from shoal.engine.process.messages import ModelInfo
from shoal.engine.process.worker import EngineSource
from shoal.server.app import create_app
from shoal.server.logging import LogFormat, set_up_logging
from shoal.server.middleware.request_id import HEADER
from shoal.server.openapi import error_responses
from shoal.server.state import Caller, bearer

REPLICAS, FRONTENDS, GATE = "replicas", "fronts", "gate"
WAIT_SECONDS = 0.5
WATCH_SECONDS = 2.0

logger = logging.getLogger(__name__)


class Frontend:
    """Ray Serve ingress. Waits for the model information of a replica before it accepts requests."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        config: ServerConfig,
        cluster: ClusterConfig,
        source: EngineSource,
        voices: Path,
        replicas: DeploymentHandle,
        log_format: LogFormat = "json",
        log_level: str = "info",
    ) -> None:
        set_up_logging(log_format, log_level)
        model_info = await wait_for_model_info(replicas, source)
        service = ClusterService(replicas, model_info)
        engine = engine_handle(service, model_info, source, voices)
        # This frontend bounds the queue by its share of the capacity of all replicas.
        share = math.ceil(config.capacity * cluster.max_replicas / cluster.frontends)
        # Several frontends would overwrite each other's counts in one file.
        usage_file = config.usage_file if cluster.frontends == 1 else None
        own = replace(config, capacity=share, usage_file=usage_file)
        self._state = create_state(
            own, EngineLifecycle(lambda: engine, engine), source.config.slots * cluster.max_replicas
        )
        self._routes = cluster_routes(service)
        self._watch = asyncio.create_task(watch_replicas(service))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return strip_request_id(create_app(self._state, before=[self._routes]))


async def wait_for_model_info(replicas: DeploymentHandle, source: EngineSource) -> ModelInfo:
    """Return the model information of a replica that runs `source`; during an upgrade, old replicas run another one."""
    while True:
        known: list[tuple[EngineSource, ModelInfo] | Exception] = []
        with suppress(DeploymentUnavailableError):  # no replica is running yet
            known = await replicas.broadcast("model").results_async(return_exceptions=True)
        for model in known:
            if not isinstance(model, Exception) and model[0] == source:
                return model[1]
        await asyncio.sleep(WAIT_SECONDS)


async def watch_replicas(
    service: ClusterService, health: Callable[[], dict[str, Any]] | None = None, seconds: float = WATCH_SECONDS
) -> None:
    """Keep `service.ready` up to date, so that `/ready` and `/ping` return 503 while no replica runs."""
    while True:
        try:
            found = await asyncio.to_thread(health or replica_health)
            service.ready = found["ready"] > 0
        except Exception:  # edge to Ray, whose controller may restart: the last known state stays
            logger.exception("cannot read the state of the replicas; keeping the last known one")
        await asyncio.sleep(seconds)


def strip_request_id(app: ASGIApp) -> ASGIApp:
    """Remove our request id header from responses: Ray's proxy generates the id, forwards it and adds it itself."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != HEADER]
            await send(message)

        await app(scope, receive, send_without_id)

    return wrapped


def cluster_routes(service: ClusterService) -> APIRouter:
    router = APIRouter(tags=["Operations"], dependencies=[Depends(bearer)])

    @router.get("/v1/health", summary="Health of all replicas", responses=error_responses(401))
    async def health(key: Caller) -> JSONResponse:
        found = await asyncio.to_thread(replica_health)
        return JSONResponse(found, 200 if found["ready"] else 503)

    @router.get("/v1/workers", summary="State and statistics of every replica", responses=error_responses(401))
    async def workers(key: Caller) -> JSONResponse:
        return JSONResponse({"workers": await asyncio.to_thread(service.reports)})

    return router


def replica_health() -> dict[str, Any]:
    """Count replicas by state; the status is `ok` when all are ready, as in the Fish API. Blocks."""
    states: dict[str, int] = {}
    application = serve.status().applications.get(APP_NAME)
    if application is not None and REPLICAS in application.deployments:
        states = {
            str(name).lower(): number for name, number in application.deployments[REPLICAS].replica_states.items()
        }
    ready = states.get(ReplicaState.RUNNING.lower(), 0)
    # A stopping replica does not count as missing.
    wanted = sum(number for name, number in states.items() if name != ReplicaState.STOPPING.lower())
    status = "ok" if ready and ready >= wanted else "degraded" if ready else "down"
    return {"status": status, "ready": ready, "wanted": wanted, "replicas": states}
