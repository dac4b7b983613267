"""SageMaker's multi-model endpoints: models are loaded and unloaded by name while the container runs.

    GET    /models                  list the loaded models
    POST   /models                  load a model: 409 if it is loaded, 507 if memory is short
    GET    /models/{name}           describe a loaded model
    DELETE /models/{name}           unload a model after its requests in flight
    POST   /models/{name}/invoke    same as `/invocations`

Each model is a complete application of `shoal serve` with its own engine process. SageMaker gives containers other than
its own Triton no GPU for such endpoints, so the limit is host memory; after a 507, SageMaker unloads the least used
models and retries.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.api.admission import BodyBudget
from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineLifecycle, engine_handle
from shoal.api.state import create_state
from shoal.deploy.memory import usable_bytes
from shoal.engine.process.supervisor import Supervisor
from shoal.engine.process.worker import EngineSource
from shoal.errors import ShoalError
from shoal.gc_pause import skip_existing_objects
from shoal.metrics import Metrics
from shoal.paths import rss_bytes
from shoal.server.app import create_app
from shoal.server.error_responses import error_response, fish_error
from shoal.server.middleware.connection_limit import ConnectionLimit
from shoal.server.middleware.errors import ErrorMiddleware
from shoal.server.middleware.request_id import RequestIDMiddleware
from shoal.server.preflight import check_device
from shoal.server.protocol import protocol_options
from shoal.server.request_body import read_model
from shoal.server.run import bind, check_access
from shoal.server.stopping import StoppableServer
from shoal.settings import Settings

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.9  # fraction of the container's memory; the rest is for this process and buffered audio
# Estimated memory of an engine process without weights: Python, torch and buffers.
PROCESS_BYTES = 600 << 20
KV_BYTES = 1 << 30  # default size of the KV cache on a CPU
# Weights are stored in half precision and loaded in single precision on a CPU.
WEIGHT_EXPANSION = 2
RETRY_AFTER_SECONDS = 1.0  # for rejected connections; the load of each model is not known here


class LoadBody(BaseModel):
    model_name: str
    url: str


@dataclass(frozen=True)
class PooledModel:
    """Loaded model with its application and memory use."""

    name: str
    url: str
    app: FastAPI
    expected: int  # estimated maximum memory in bytes
    measured: Callable[[], int]  # current memory in bytes
    life: AsyncExitStack  # closing it drains the requests and ends the engine process

    @property
    def memory(self) -> int:
        """Bytes to account for: the KV cache is allocated lazily, so the measured memory starts below the estimate."""
        return max(self.expected, self.measured())

    def description(self) -> dict[str, str]:
        return {"modelName": self.name, "modelUrl": self.url}


class ModelRequestError(Exception):
    """Failed model management request, with the status that SageMaker's contract defines for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelPool:
    """Loaded models by name, within a memory limit. Used on one event loop."""

    def __init__(self, config: ServerConfig, source: EngineSource, max_bytes: int) -> None:
        self._config = replace(config, usage_file=None)
        self._source = source
        self.max_bytes = max_bytes
        self._models: dict[str, PooledModel] = {}
        self._unloading: list[PooledModel] = []  # still hold memory while they finish their requests
        self._loading = asyncio.Lock()

    @property
    def models(self) -> list[PooledModel]:
        return list(self._models.values())

    def find(self, name: str) -> PooledModel:
        found = self._models.get(name)
        if found is None:
            raise ModelRequestError(404, f"model {name[:64]!r} is not loaded")
        return found

    async def load(self, name: str, url: str) -> PooledModel:
        """Load a model. Loads are serialized, because concurrent ones would claim the same free memory."""
        async with self._loading:
            if name in self._models:
                raise ModelRequestError(409, f"model {name[:64]!r} is already loaded")
            needed = self._required_bytes(Path(url))
            model = self._models[name] = await self._open(name, url, needed)
        logger.info(
            "loaded model %s: %d MB in use, estimated maximum %d MB", name, model.measured() >> 20, needed >> 20
        )
        return model

    async def unload(self, name: str) -> None:
        model = self.find(name)
        del self._models[name]  # no new requests from here on
        self._unloading.append(model)
        try:
            await model.life.aclose()
        finally:
            self._unloading.remove(model)
        logger.info("unloaded model %s", name)

    async def close(self) -> None:
        await asyncio.gather(*(self.unload(model.name) for model in self.models))

    def _required_bytes(self, directory: Path) -> int:
        """Return the estimated memory of a model. Raises ModelRequestError if not enough memory is left."""
        if not directory.is_dir():
            raise ModelRequestError(400, f"model directory {directory} does not exist")
        needed = expected_bytes(directory, self._source)
        holding = [*self.models, *self._unloading]
        used = sum(model.memory for model in holding)
        if used + needed > self.max_bytes:
            raise ModelRequestError(
                507,
                f"not enough memory: {len(holding)} models use {used >> 20} MB, this one needs about "
                f"{needed >> 20} MB, and the limit is {self.max_bytes >> 20} MB (setting models_bytes)",
            )
        return needed

    async def _open(self, name: str, url: str, expected: int) -> PooledModel:
        source = replace(self._source, model=url)
        assert source.voices is not None
        supervisor = Supervisor(source)
        async with AsyncExitStack() as on_error:
            # An engine outside the pool would hold memory that is not accounted for. `close` also ends an engine that
            # is still loading when this task is cancelled.
            on_error.push_async_callback(asyncio.to_thread, supervisor.close)
            await asyncio.to_thread(supervisor.start)
            engine = engine_handle(supervisor, supervisor.model_info, source, source.voices)
            state = create_state(
                replace(self._config, model=name), EngineLifecycle(lambda: engine, engine), source.config.slots
            )
            app, life = create_app(state), AsyncExitStack()
            await life.enter_async_context(app.router.lifespan_context(app))
            on_error.pop_all()
        return PooledModel(name, url, app, expected, lambda: _engine_bytes(supervisor), life)


def _engine_bytes(supervisor: Supervisor) -> int:
    """Return the resident memory of the engine process; 0 while it is not running."""
    pid = supervisor.process_id
    return 0 if pid is None else rss_bytes(pid)


def expected_bytes(directory: Path, source: EngineSource) -> int:
    """Estimate the maximum memory of an engine for a model directory, from the size of its files."""
    weights = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return PROCESS_BYTES + WEIGHT_EXPANSION * weights + (source.config.kv_bytes or KV_BYTES)


def multi_model_app(pool: ModelPool, config: ServerConfig) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await pool.close()

    async def model_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ModelRequestError)
        return JSONResponse(fish_error(error.status, str(error)), error.status)

    async def shoal_error(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, error)

    app = FastAPI(title="Shoal", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(management_routes(pool, config))
    app.router.routes.append(Route("/models/{name}/invoke", InvokeRoute(pool), methods=["POST"]))
    app.add_exception_handler(ModelRequestError, model_error)
    app.add_exception_handler(ShoalError, shoal_error)
    app.add_middleware(
        ConnectionLimit, max_connections=config.limits.connections, retry_after_seconds=lambda: RETRY_AFTER_SECONDS
    )
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(RequestIDMiddleware, metrics=Metrics(lambda: None))
    return app


def management_routes(pool: ModelPool, config: ServerConfig) -> APIRouter:
    router = APIRouter()
    budget = BodyBudget(config.limits.all_bodies_bytes)

    @router.get("/ping")
    async def ping() -> dict[str, int]:
        return {"models": len(pool.models)}

    @router.get("/models")
    async def models() -> dict[str, list[dict[str, str]]]:
        return {"models": [model.description() for model in pool.models]}

    @router.post("/models")
    async def load(http: Request) -> dict[str, str]:
        body = await read_model(http, LoadBody, config.limits, budget)
        return (await pool.load(body.model_name, body.url)).description()

    @router.get("/models/{name}")
    async def model(name: str) -> dict[str, str]:
        return pool.find(name).description()

    @router.delete("/models/{name}")
    async def unload(name: str) -> dict[str, str]:
        described = pool.find(name).description()
        await pool.unload(name)
        return described

    return router


class InvokeRoute:
    """Forwards a request to the application of its model as `/invocations`."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._pool.find(scope["path_params"]["name"]).app
        routed = ("path_params", "endpoint", "route", "app", "router")
        inner = {name: value for name, value in scope.items() if name not in routed}
        await app({**inner, "path": "/invocations", "raw_path": b"/invocations"}, receive, send)


class MultiModelServer(StoppableServer):
    """Drains requests for a bounded time after a signal."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                **protocol_options(config.limits, BodyBudget(config.limits.all_bodies_bytes)),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
            )
        )


def serve_multi_model(settings: Settings) -> None:
    """Serve until a signal arrives. Raises ShoalError."""
    config = settings.server()
    source = settings.source()
    check_access(config)
    check_device(source)
    max_bytes = settings.models_bytes or int(MEMORY_FRACTION * usable_bytes())
    with closing(bind(config)) as listener:
        logger.info("listening on %s port %d, %d MB for models", *listener.getsockname()[:2], max_bytes >> 20)
        server = MultiModelServer(multi_model_app(ModelPool(config, source, max_bytes), config), config)
        skip_existing_objects()
        server.run(sockets=[listener])
