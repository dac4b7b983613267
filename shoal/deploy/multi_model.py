"""SageMaker's multi-model endpoints: models are loaded and unloaded by name while the container runs.

    GET    /models                  what is loaded
    POST   /models                  load one: 409 if it is there, 507 if there is no room
    GET    /models/{name}
    DELETE /models/{name}           unload it, after what it speaks is spoken
    POST   /models/{name}/invoke    as `/invocations`

Each model is the whole application of `shoal serve` with an engine process of its own. SageMaker gives such endpoints
no GPU, so the bound is main memory; told that there is no room (507), it unloads what it needs least and asks again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

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
from shoal.metrics import Metrics
from shoal.paths import rss_bytes
from shoal.server.app import create_app
from shoal.server.error_responses import error_response, fish_error
from shoal.server.middleware.connection_limit import ConnectionLimit
from shoal.server.middleware.errors import ErrorMiddleware
from shoal.server.middleware.request_id import RequestIDMiddleware
from shoal.server.preflight import check_device
from shoal.server.protocol import bounded_protocol
from shoal.server.request_body import read_model
from shoal.server.run import CANCELLATION_FILTER, bind, check_access
from shoal.settings import Settings

logger = logging.getLogger(__name__)

SHARE = 0.9  # of what the container may use; the rest is for this process and for audio on its way
# What an engine takes besides its weights, before it is measured: Python, torch and its buffers.
PROCESS_BYTES = 600 << 20
KV_BYTES = 1 << 30  # the usual bound of keys and values on a CPU
# Weights are kept in half precision on disk and in single precision on a CPU.
GROWTH = 2
WAIT_SECONDS = 1.0  # of who finds the container full; how long models are busy, only they know


class Load(BaseModel):
    model_name: str
    url: str


@dataclass(frozen=True)
class PooledModel:
    """A model that speaks."""

    name: str
    url: str
    app: FastAPI
    expected: int  # bytes it may come to take
    measured: Callable[[], int]  # bytes it takes now
    life: AsyncExitStack

    @property
    def memory(self) -> int:
        """Keys and values fill up with the first long requests: until then less is measured than is spoken for."""
        return max(self.expected, self.measured())

    def described(self) -> dict[str, str]:
        return {"modelName": self.name, "modelUrl": self.url}


class ModelRequestError(Exception):
    """A request about a model that cannot be met, with the status that SageMaker's contract has for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelPool:
    """Models by name, within a bound of memory."""

    def __init__(self, config: ServerConfig, source: EngineSource, max_bytes: int) -> None:
        self._config = replace(config, usage_file=None)
        self._source = source
        self.max_bytes = max_bytes
        self._models: dict[str, PooledModel] = {}
        self._leaving: list[PooledModel] = []  # finish what they speak, and hold their memory until then
        self._loading = asyncio.Lock()

    @property
    def models(self) -> list[PooledModel]:
        return list(self._models.values())

    def find(self, name: str) -> PooledModel:
        found = self._models.get(name)
        if found is None:
            raise ModelRequestError(404, f"there is no model {name[:64]!r} loaded")
        return found

    async def load(self, name: str, url: str) -> PooledModel:
        """One at a time: two that load together would count on the same memory."""
        async with self._loading:
            if name in self._models:
                raise ModelRequestError(409, f"{name[:64]!r} is loaded already")
            needed = self._room_for(Path(url))
            model = self._models[name] = await self._open(name, url, needed)
        logger.info("loaded %s: %d MB, at most about %d MB", name, model.measured() >> 20, needed >> 20)
        return model

    async def unload(self, name: str) -> None:
        model = self.find(name)
        del self._models[name]  # from now on nothing new reaches it
        self._leaving.append(model)
        try:
            await model.life.aclose()
        finally:
            self._leaving.remove(model)
        logger.info("unloaded %s", name)

    async def close(self) -> None:
        await asyncio.gather(*(self.unload(model.name) for model in self.models))

    def _room_for(self, directory: Path) -> int:
        """Bytes that the model in that directory may take, if there are as many left."""
        if not directory.is_dir():
            raise ModelRequestError(400, f"there is no directory {directory}")
        needed = expected_bytes(directory, self._source)
        holding = [*self.models, *self._leaving]
        used = sum(model.memory for model in holding)
        if used + needed > self.max_bytes:
            raise ModelRequestError(
                507,
                f"no room: {used >> 20} MB are spoken for by {len(holding)} models, this one needs about "
                f"{needed >> 20} MB, and all may use {self.max_bytes >> 20} MB (the setting models_bytes)",
            )
        return needed

    async def _open(self, name: str, url: str, expected: int) -> PooledModel:
        source = replace(self._source, model=url)
        assert source.voices is not None
        supervisor = Supervisor(source)
        await asyncio.to_thread(supervisor.start)
        try:
            engine = engine_handle(supervisor, supervisor.model_info, source, source.voices)
            state = create_state(
                replace(self._config, model=name), EngineLifecycle(lambda: engine, engine), source.config.slots
            )
            app, life = create_app(state), AsyncExitStack()
            await life.enter_async_context(app.router.lifespan_context(app))
        except BaseException:
            # Nobody else knows of this engine: it would keep memory that is in no count.
            await asyncio.to_thread(supervisor.close)
            raise
        return PooledModel(name, url, app, expected, lambda: _engine_bytes(supervisor), life)


def _engine_bytes(supervisor: Supervisor) -> int:
    """Return the resident memory of the engine process; 0 while it is not running."""
    pid = supervisor.process_id
    return 0 if pid is None else rss_bytes(pid)


def expected_bytes(directory: Path, source: EngineSource) -> int:
    """What an engine for the model in that directory will take at most, by the size of its files."""
    weights = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return PROCESS_BYTES + GROWTH * weights + (source.config.kv_bytes or KV_BYTES)


def multi_model_app(shelf: ModelPool, config: ServerConfig) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await shelf.close()

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ModelRequestError)
        return JSONResponse(fish_error(error.status, str(error)), error.status)

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, error)

    app = FastAPI(title="Shoal", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(shelf_routes(shelf, config))
    app.router.routes.append(Route("/models/{name}/invoke", Invoke(shelf), methods=["POST"]))
    app.add_exception_handler(ModelRequestError, refused)
    app.add_exception_handler(ShoalError, failed)
    app.add_middleware(
        ConnectionLimit, max_connections=config.limits.connections, retry_after_seconds=lambda: WAIT_SECONDS
    )
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(RequestIDMiddleware, metrics=Metrics(lambda: None))
    return app


def shelf_routes(shelf: ModelPool, config: ServerConfig) -> APIRouter:
    router = APIRouter()
    budget = BodyBudget(config.limits.all_bodies_bytes)

    @router.get("/ping")
    async def ping() -> dict[str, int]:
        return {"models": len(shelf.models)}

    @router.get("/models")
    async def models() -> dict[str, list[dict[str, str]]]:
        return {"models": [model.described() for model in shelf.models]}

    @router.post("/models")
    async def load(http: Request) -> dict[str, str]:
        wanted = await read_model(http, Load, config.limits, budget)
        return (await shelf.load(wanted.model_name, wanted.url)).described()

    @router.get("/models/{name}")
    async def model(name: str) -> dict[str, str]:
        return shelf.find(name).described()

    @router.delete("/models/{name}")
    async def unload(name: str) -> dict[str, str]:
        described = shelf.find(name).described()
        await shelf.unload(name)
        return described

    return router


class Invoke:
    """Hands a request to the application of its model, which streams, bounds and counts as ever."""

    def __init__(self, shelf: ModelPool) -> None:
        self._shelf = shelf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._shelf.find(scope["path_params"]["name"]).app
        routed = ("path_params", "endpoint", "route", "app", "router")
        inner = {name: value for name, value in scope.items() if name not in routed}
        await app({**inner, "path": "/invocations", "raw_path": b"/invocations"}, receive, send)


class Server(uvicorn.Server):
    """Finishes what it has, for a bounded time, and has not failed when it was asked to stop."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        logging.getLogger("uvicorn.error").addFilter(CANCELLATION_FILTER)
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(config.limits),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # uvicorn would raise it again at the end


def serve_multi_model(settings: Settings) -> None:
    """Until a signal ends it. Raises ShoalError."""
    config = settings.server()
    source = settings.source()
    check_access(config)
    check_device(source)
    most = settings.models_bytes or int(SHARE * usable_bytes())
    with closing(bind(config)) as door:
        logger.info("listening on %s port %d, %d MB for models", *door.getsockname()[:2], most >> 20)
        Server(multi_model_app(ModelPool(config, source, most), config), config).run(sockets=[door])
