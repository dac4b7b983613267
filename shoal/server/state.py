"""What all routes share: who may come in, who is inside, and where the engine is."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, Request, WebSocket
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection

from shoal.api.admission import Backlog, Meters
from shoal.api.config import ServerConfig
from shoal.api.exceptions import Unauthorized
from shoal.api.host import Host
from shoal.errors import ShoalError
from shoal.metrics import Metrics
from shoal.server.keys import ANYONE, Key, KeyFile, KeyRing, chosen_key
from shoal.server.parsing import BodyBudget
from shoal.server.usage import UsageFile, UsageKeeper

logger = logging.getLogger(__name__)

KEY_CHECK_SECONDS = 2.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Figures:
    """What the engine counted when it was last asked; an engine that does not answer is asked once, not piled upon."""

    known: dict[str, Any] | None = None
    _asking: asyncio.Task[None] | None = None

    async def refresh(self, host: Host, seconds: float = 1.0) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(host))
        await asyncio.wait([self._asking], timeout=seconds)

    async def _ask(self, host: Host) -> None:
        try:
            if host.loaded is not None and host.state == "ready":
                self.known = await asyncio.to_thread(host.loaded.service.statistics)
        except ShoalError as problem:
            logger.warning("the engine told no figures: %s", problem)


@dataclass(eq=False)
class Desk:
    config: ServerConfig
    host: Host
    metrics: Metrics
    meters: Meters
    backlog: Backlog
    budget: BodyBudget
    encoders: ThreadPoolExecutor
    keys: KeyRing = field(default=KeyRing(()))
    figures: Figures = field(default_factory=Figures)
    usage: UsageKeeper | None = None
    # Its own: an hour that is converted shall hold up neither live streams nor the reading of bodies.
    converter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "shoal-convert"))

    @property
    def keyed(self) -> bool:
        """A file of keys closes the door even when no key is left in it."""
        return bool(self.config.api_keys) or self.config.keys_file is not None

    async def encode(self, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Run an encoder off the event loop, beside at most a few others."""
        return await asyncio.get_running_loop().run_in_executor(self.encoders, partial(work, *given, **named))

    def owner(self, connection: HTTPConnection) -> Key:
        """Whose key came with a request. Raises Unauthorized; without any key in the settings anyone may come."""
        if not self.keyed:
            return ANYONE
        scheme, _, shown = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not shown.strip():
            raise Unauthorized("this server needs a key: send Authorization: Bearer KEY")
        found = self.keys.owner(shown.strip())
        if found is None:
            raise Unauthorized("Invalid token")
        return found

    async def watch_keys(self) -> None:
        """Take up changes of the key file while the server runs; a file that is broken changes nothing."""
        if self.config.keys_file is None:
            return
        file = KeyFile(self.config.keys_file)
        seen = await asyncio.to_thread(file.stamp)
        while True:
            await asyncio.sleep(KEY_CHECK_SECONDS)
            stamp = await asyncio.to_thread(file.stamp)
            if stamp != seen:
                seen = stamp
                await self._take_up(file)

    async def keep_usage(self) -> None:
        if self.usage is not None:
            await self.usage.keep()

    async def _take_up(self, file: KeyFile) -> None:
        try:
            self.keys = await asyncio.to_thread(key_ring, self.config)
            logger.info("%d keys after a change of %s", len(self.keys), file.path.name)
        except ShoalError as problem:
            logger.warning("the keys were not read again: %s", problem)


def open_desk(config: ServerConfig, host: Host, slots: int) -> Desk:
    figures, meters = Figures(), Meters(config.key_limits)
    return Desk(
        config,
        host,
        Metrics(lambda: figures.known),
        meters,
        Backlog(config.capacity, slots),
        BodyBudget(config.limits.all_bodies_bytes),
        ThreadPoolExecutor(config.encoding_threads, thread_name_prefix="shoal-encode"),
        key_ring(config),
        figures,
        UsageKeeper(meters, UsageFile(config.usage_file)) if config.usage_file is not None else None,
    )


def key_ring(config: ServerConfig) -> KeyRing:
    """All keys of the settings and of the file. Reads the file: not for the event loop."""
    chosen = [chosen_key(number, key, config.key_limits) for number, key in enumerate(config.api_keys, 1)]
    stored = KeyFile(config.keys_file).read() if config.keys_file is not None else []
    if config.keys_file is not None and not stored:
        logger.warning("there is no key in %s: make one with `shoal keys new NAME --file FILE`", config.keys_file)
    return KeyRing([*chosen, *stored])


def desk_of(connection: HTTPConnection) -> Desk:
    desk = connection.app.state.desk
    assert isinstance(desk, Desk)
    return desk


async def the_desk(request: Request) -> Desk:
    return desk_of(request)


async def the_caller(request: Request) -> Key:
    """Before the body is read: who it is, and whether this key asks too often."""
    desk = desk_of(request)
    key = desk.owner(request)
    if request.method != "GET":
        desk.meters.count_request(key)
    request.state.key = key.name
    return key


def live_caller(socket: WebSocket) -> Key:
    desk = desk_of(socket)
    key = desk.owner(socket)
    desk.meters.count_request(key)
    return key


# Shown in the OpenAPI document; `the_caller` does the work, since Fish and OpenAI want the refusal in their own shapes.
bearer = HTTPBearer(auto_error=False, description="A key of `shoal keys new`, if the server has any.")
AtDesk = Annotated[Desk, Depends(the_desk)]
Caller = Annotated[Key, Depends(the_caller)]
