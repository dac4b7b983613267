"""Run the server process: check, bind, load the model, serve, drain."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from contextvars import Context
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from shoal.api.config import ServerConfig, is_loopback
from shoal.api.engine_client import EngineLifecycle, start_engine
from shoal.api.local_server import engine_identity, registered
from shoal.api.state import ServerState, create_state
from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.engine.process.supervisor import Supervisor, SupervisorConfig
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest, ShoalError, counted
from shoal.gc_pause import skip_existing_objects
from shoal.server.app import create_app
from shoal.server.listening import listen
from shoal.server.preflight import check_device
from shoal.server.protocol import protocol_options
from shoal.server.stopping import CANCELLATION_FILTER
from shoal.server.tracing import check_tracing

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from shoal.server.wyoming import WyomingServer

logger = logging.getLogger(__name__)

DRAIN_CHECK_SECONDS = 0.05
OTHER_FILES = 512  # open files of a process besides its connections


def serve(
    config: ServerConfig, source: EngineSource, voices: Path, on_listening: Callable[[str, int], None] | None = None
) -> None:
    """Serve until a signal arrives. Settings are checked before the model is loaded; raises ShoalError.

    `on_listening` is called with address and port once connections are accepted, before the model is loaded.
    """
    check_access(config)
    if config.tracing:
        check_tracing()
    check_model(source.model)
    allow_open_files(config.limits.connections)
    check_device(source)
    with ExitStack() as listeners:
        listener = listeners.enter_context(closing(bind(config)))
        wyoming = _bind_wyoming(config, listeners)
        supervisor = Supervisor(source, SupervisorConfig(sleep_seconds=config.sleep_seconds))
        address, port = listener.getsockname()[:2]
        local = listeners.enter_context(_registered(config, source, voices, address, port))
        lifecycle = EngineLifecycle(lambda: start_engine(supervisor, voices), abort=supervisor.close)
        state = create_state(config, lifecycle, source.config.slots)
        server = DrainingServer(state, supervisor, wyoming, local)
        logger.info("listening on %s port %d", address, port)
        if on_listening is not None:
            on_listening(address, port)
        try:
            server.run(sockets=[listener])
        finally:
            supervisor.close()  # no effect after a normal shutdown; needed after a forced one
    if lifecycle.failure is not None:
        raise lifecycle.failure


def _registered(
    config: ServerConfig, source: EngineSource, voices: Path, address: str, port: int
) -> AbstractContextManager[socket.socket | None]:
    """Register the server for `shoal say`; the context yields the Unix socket to listen on, None without one."""
    identity = engine_identity(
        source.model,
        voices,
        device=source.device,
        dtype=source.dtype,
        codec=source.codec,
        lexicon=source.lexicon,
        config=source.config,
    )
    requires_key = bool(config.api_keys or config.keys_file)
    return registered(client_url(address, port), source.model, identity, requires_key=requires_key)


def client_url(host: str, port: int) -> str:
    """Return the URL for clients on this machine, with the loopback address in place of a wildcard."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def check_access(config: ServerConfig) -> None:
    """Raise InvalidRequest when the server could be used from other machines without a key."""
    if not (config.on_loopback or config.api_keys or config.keys_file or config.insecure):
        raise InvalidRequest(
            f"{config.host} can be reached from other machines and there is no API key: "
            "create one with `shoal keys new NAME`, or pass --insecure to serve without keys"
        )
    if config.wyoming_port is not None and not (is_loopback(config.wyoming_host) or config.insecure):
        raise InvalidRequest(
            f"wyoming_host {config.wyoming_host} can be reached from other machines, and the Wyoming protocol has no "
            "keys: use a loopback address, or pass --insecure to let every machine that reaches it speak"
        )


def check_model(name: str) -> None:
    """Raise ModelNotFound for a model that is not installed. Its files are checked when the engine loads them."""
    if not name.startswith(RANDOM_PREFIX):
        find_directory(name)


def allow_open_files(connections: int) -> None:
    """Raise the limit of open files, by default often 1,024, to what this many connections need.

    Above the limit connections are reset and no engine process can start. Child processes inherit it.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning("%d connections need %d open files, and the system allows %d", connections, wanted, allowed)


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket of the HTTP server. Raises InvalidRequest when the address is not available."""
    return listen(config.host, config.port, "--host and --port")


def _bind_wyoming(config: ServerConfig, listeners: ExitStack) -> socket.socket | None:
    if config.wyoming_port is None:
        return None
    bound = listen(config.wyoming_host, config.wyoming_port, "--set wyoming_host=HOST and --wyoming")
    return listeners.enter_context(closing(bound))


class DrainingServer(uvicorn.Server):
    """Drains on SIGTERM and SIGINT: rejects new requests and finishes those in flight, within a time limit.

    On SIGUSR2 it reloads the model in a second engine process and switches to it without dropping requests.
    """

    def __init__(
        self,
        state: ServerState,
        supervisor: Supervisor,
        wyoming: socket.socket | None = None,
        local: socket.socket | None = None,
    ) -> None:
        """`wyoming` is the listening socket of the Wyoming protocol, `local` the Unix socket for `shoal say`."""
        self._state, self._supervisor = state, supervisor
        self._wyoming_listener, self._local_listener = wyoming, local
        self._wyoming: WyomingServer | None = None
        self._reload: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        config = state.config
        logging.getLogger("uvicorn.error").addFilter(CANCELLATION_FILTER)
        super().__init__(
            uvicorn.Config(
                create_app(state, on_failure=self._stop),
                **protocol_options(config.limits, state.body_budget),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, AttributeError):  # not on Windows
            self._loop.add_signal_handler(signal.SIGUSR2, self._begin_reload)
        if self._wyoming_listener is not None:
            from shoal.server.wyoming import WyomingServer

            self._wyoming = WyomingServer(self._state)
            await self._wyoming.start(self._wyoming_listener)
        if self._local_listener is not None:
            # uvicorn accepts one kind of socket only; its `shutdown` closes the servers in this list.
            self.servers.append(await self._loop.create_unix_server(self._protocol, sock=self._local_listener))
        skip_existing_objects()

    def _protocol(self) -> asyncio.Protocol:
        config = self.config
        return config.http_protocol_class(  # type: ignore[call-arg]  # as in uvicorn's own `startup`
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._wyoming is not None:
            await self._wyoming.close()
        await super().shutdown(sockets)

    def _begin_reload(self) -> None:
        state = self._state.lifecycle.state if self._reload is None or self._reload.done() else "already reloading"
        if state != "ready":
            logger.warning("model not reloaded: the server is %s", state)
            return
        self._reload = asyncio.create_task(self._reload_model())

    async def _reload_model(self) -> None:
        logger.info("reloading the model")
        try:
            await asyncio.to_thread(self._supervisor.reload, self._supervisor.source)
            logger.info("model reloaded: new requests use it")
        except ShoalError as problem:
            logger.error("model not reloaded, keeping the previous one: %s", problem)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.started and self._drain is None and not self.should_exit:
            self._state.lifecycle.begin_shutdown()
            # The handler runs in the context of any task; the log lines of the drain belong to no request.
            self._loop.call_soon_threadsafe(self._begin_drain, context=Context())
            return
        self._state.lifecycle.drain_ended = True  # a second signal skips the drain
        self.should_exit = True
        self.config.timeout_graceful_shutdown = 0
        super().handle_exit(sig, frame)
        # uvicorn would raise the signal again at exit; a requested shutdown must exit with status 0.
        self._captured_signals.clear()

    def _begin_drain(self) -> None:
        logger.info("shutting down: finishing %s", counted(self._state.queue.in_flight, "request"))
        self._drain = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        """Wait for requests in flight. The socket stays open: new requests get a 503, and `/ready` says `stopping`."""
        seconds = self._state.config.drain_seconds
        end = self._loop.time() + seconds
        while self._state.queue.in_flight and self._loop.time() < end:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
        self._state.lifecycle.drain_ended = True
        self.config.timeout_graceful_shutdown = max(1, round(end - self._loop.time()))
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True
