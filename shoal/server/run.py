"""The life of the server's process: bind, load, serve, drain."""

import asyncio
import logging
import signal
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType

import uvicorn

from shoal.api.config import ServerConfig
from shoal.api.engine_client import Loaded, SpeechService
from shoal.api.host import Host
from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.engine.process.messages import ModelInfo
from shoal.engine.process.supervisor import Supervisor
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest, ShoalError
from shoal.server.app import create_app
from shoal.server.preflight import check_machine
from shoal.server.protocol import bounded_protocol
from shoal.server.state import Desk, open_desk
from shoal.voices.store import VoiceStore
from shoal.voices.voice import voice_limits

logger = logging.getLogger(__name__)

DRAIN_CHECK_SECONDS = 0.05
BACKLOG = 512  # connections the kernel holds for us


def serve(config: ServerConfig, source: EngineSource, voices: Path) -> None:
    """Until a signal ends it. What can be refused is refused before the model is loaded; raises ShoalError."""
    check_door(config)
    check_model(source.model)
    check_machine(source)
    with closing(bind(config)) as door:
        supervisor = Supervisor(source)
        host = Host(lambda: start(supervisor, voices), give_up=supervisor.close)
        desk = open_desk(config, host, source.config.slots)
        server = Server(desk, supervisor)
        logger.info("listening on %s port %d", *door.getsockname()[:2])
        try:
            server.run(sockets=[door])
        finally:
            supervisor.close()  # again, if all went well; at all, if nobody was waited for
    if host.failure is not None:
        raise host.failure


def load(source: EngineSource, voices: Path) -> Loaded:
    """An engine in its own process, ready to speak. Takes a while."""
    return start(Supervisor(source), voices)


def start(supervisor: Supervisor, voices: Path) -> Loaded:
    supervisor.start()
    return loaded(supervisor, supervisor.model_info, supervisor.source, voices)


def loaded(service: SpeechService, facts: ModelInfo, source: EngineSource, voices: Path) -> Loaded:
    """An engine that runs, with the voices beside it."""
    limits = voice_limits(source.config.reference_seconds)
    store = VoiceStore(voices, facts.builtin_voices, sample_rate=facts.sample_rate, limits=limits)
    return Loaded(service, store, facts.frame_rate, rung=facts.backend)


def check_door(config: ServerConfig) -> None:
    """Raises InvalidRequest when anybody in the network could speak without a key."""
    if not (config.on_loopback or config.api_keys or config.keys_file or config.insecure):
        raise InvalidRequest(
            f"{config.host} can be reached from other machines and there is no API key: "
            "make one with `shoal keys new NAME`, or say --insecure if that is meant"
        )


def check_model(name: str) -> None:
    """Raises ModelNotFound for a model that is not here; what is wrong with one that is, its engine finds out."""
    if not name.startswith(RANDOM_PREFIX):
        find_directory(name)


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises InvalidRequest when the address cannot be had."""
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[
                0
            ]
            door = undo.enter_context(socket.socket(family, kind, protocol))
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
            door.listen(BACKLOG)
        except OSError as problem:
            told = problem.strerror or str(problem)
            raise InvalidRequest(
                f"cannot listen on {config.host} port {config.port}: {told}; choose others with --host and --port"
            ) from None
        undo.pop_all()
        return door


class NotCancelled(logging.Filter):
    """Who ends requests on purpose needs no traceback of each; what they had is in the log without."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # Of the app's own life Starlette tells as a text.
        told = record.getMessage().rstrip().endswith("CancelledError")
        return not (told or isinstance(error, asyncio.CancelledError))


NOT_CANCELLED = NotCancelled()


class Server(uvicorn.Server):
    """Drains on SIGTERM and SIGINT: refuses what is new, finishes what it has, for a bounded time.

    On SIGUSR2 it loads the model anew beside the one that speaks, and drops nobody.
    """

    def __init__(self, desk: Desk, supervisor: Supervisor) -> None:
        self._desk, self._supervisor = desk, supervisor
        self._reload: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        config, limits = desk.config, desk.config.limits
        logging.getLogger("uvicorn.error").addFilter(NOT_CANCELLED)
        super().__init__(
            uvicorn.Config(
                create_app(desk, on_failure=self._give_up),
                http=bounded_protocol(limits),
                ws="websockets-sansio",
                ws_max_size=limits.body_bytes,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, AttributeError):  # not on Windows
            self._loop.add_signal_handler(signal.SIGUSR2, self._begin_reload)

    def _begin_reload(self) -> None:
        state = self._desk.host.state if self._reload is None or self._reload.done() else "loading it already"
        if state != "ready":
            logger.warning("the model is not loaded anew: the server is %s", state)
            return
        self._reload = asyncio.create_task(self._load_anew())

    async def _load_anew(self) -> None:
        logger.info("loading the model anew")
        try:
            await asyncio.to_thread(self._supervisor.reload, self._supervisor.source)
            logger.info("new requests are spoken by the model as it is now")
        except ShoalError as problem:
            logger.error("the model stays as it was: %s", problem)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.started and self._drain is None and not self.should_exit:
            logger.info("going down: finishing %d requests", self._desk.backlog.running)
            self._desk.host.begin_to_stop()
            self._loop.call_soon_threadsafe(self._begin_drain)
            return
        self.should_exit = True  # a second Ctrl-C waits for nobody
        super().handle_exit(sig, frame)
        # uvicorn would raise the signal again at the end; a server that was asked to stop and did has not failed.
        self._captured_signals.clear()

    def _begin_drain(self) -> None:
        self._drain = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        """The door stays open meanwhile: who comes is told that we go down, and `/ready` says so."""
        seconds = self._desk.config.drain_seconds
        end = self._loop.time() + seconds
        while self._desk.backlog.running and self._loop.time() < end:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
        self.config.timeout_graceful_shutdown = max(1, round(end - self._loop.time()))
        self.should_exit = True

    def _give_up(self) -> None:
        self.should_exit = True
