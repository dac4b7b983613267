"""ASGI application and process of the balancer."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shoal.api.admission import BodyBudget
from shoal.api.config import is_loopback
from shoal.cluster.balancer.comparison import Comparison
from shoal.cluster.balancer.config import RETRY_SECONDS, BalancerConfig
from shoal.cluster.balancer.connections import SeparateConnections
from shoal.cluster.balancer.metrics import balancer_metrics
from shoal.cluster.balancer.proxy import Proxy
from shoal.cluster.balancer.sockets import forward_socket
from shoal.cluster.balancer.workers import WorkerPool
from shoal.errors import counted
from shoal.gc_pause import skip_existing_objects
from shoal.metrics import Metrics
from shoal.server.error_responses import add_exception_handlers
from shoal.server.listening import listen
from shoal.server.middleware.connection_limit import ConnectionLimit
from shoal.server.middleware.errors import ErrorMiddleware
from shoal.server.middleware.hosts import HostMiddleware
from shoal.server.middleware.origins import OriginMiddleware
from shoal.server.middleware.request_id import RequestIDMiddleware
from shoal.server.protocol import protocol_options
from shoal.server.routes.health import measure_loop_lag
from shoal.server.stopping import StoppableServer

logger = logging.getLogger(__name__)

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"]
DRAIN_SECONDS = 30


def create_balancer(config: BalancerConfig) -> FastAPI:
    """Return the application: its own health routes, and everything else forwarded."""
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=config.connect_seconds),
        transport=SeparateConnections(),
        trust_env=False,
    )
    pool = WorkerPool(config, client)
    metrics = balancer_metrics(pool.workers)
    compared = config.compare_url
    comparison = None if compared is None else Comparison(compared, config.compare_share, client)
    proxy = Proxy(config, pool, client, comparison)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (pool.watch(), measure_loop_lag(metrics))]
        yield
        for task in tasks:
            task.cancel()
        if comparison is not None:
            await comparison.close()
        await client.aclose()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    _add_health_routes(app, pool, metrics)
    if comparison is not None:
        app.add_api_route("/v1/comparison", comparison.report)

    @app.websocket("/{path:path}")
    async def socket(socket: WebSocket) -> None:
        await forward_socket(socket, config, pool)

    @app.api_route("/{path:path}", methods=METHODS)
    async def forward(request: Request) -> Response:
        return await proxy.forward(request)

    add_exception_handlers(app, lambda: RETRY_SECONDS)
    app.add_middleware(
        ConnectionLimit, max_connections=config.limits.connections, retry_after_seconds=lambda: RETRY_SECONDS
    )
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(OriginMiddleware, allowed=config.cors_origins)
    # The balancer does not know whether its workers require keys.
    app.add_middleware(HostMiddleware, allowed=config.allowed_hosts, is_open=lambda: is_loopback(config.host))
    app.add_middleware(RequestIDMiddleware, metrics=metrics)
    return app


def _add_health_routes(app: FastAPI, pool: WorkerPool, metrics: Metrics) -> None:
    def health() -> dict[str, Any]:
        healthy = sum(worker.healthy for worker in pool.workers)
        return {"status": "ok" if healthy else "unavailable", "ready": healthy, "workers": len(pool.workers)}

    @app.get("/health")
    async def alive() -> dict[str, Any]:
        return health()

    @app.get("/ready")
    @app.get("/v1/health")
    async def ready() -> JSONResponse:
        found = health()
        return JSONResponse(found, 200 if found["ready"] else 503)

    @app.get("/v1/workers")
    async def workers() -> dict[str, Any]:
        return {"workers": [worker.report() for worker in pool.workers]}

    @app.get("/metrics")
    async def own_metrics() -> Response:
        """Export HTTP metrics and those of the workers; every worker exports those of its engine."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


class BalancerServer(StoppableServer):
    """Drains requests in flight for a bounded time after a signal."""

    def __init__(self, config: BalancerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                create_balancer(config),
                **protocol_options(config.limits, BodyBudget(config.limits.all_bodies_bytes)),
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
        )


def balance(config: BalancerConfig, on_listening: Callable[[str, int], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Raises InvalidRequest when the address is not available."""
    with contextlib.closing(listen(config.host, config.port, "--host and --port")) as listener:
        address, port = listener.getsockname()[:2]
        logger.info("balancing %s on %s port %d", counted(len(config.workers), "worker"), address, port)
        if on_listening is not None:
            on_listening(address, port)
        server = BalancerServer(config)
        skip_existing_objects()
        server.run(sockets=[listener])
