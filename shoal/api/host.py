"""The engine behind the server: being loaded, ready, or going down."""

import asyncio
import logging
import time
from collections.abc import Callable

from shoal.api.engine_client import Loaded
from shoal.api.exceptions import NotReady

logger = logging.getLogger(__name__)

Load = Callable[[], Loaded]


class Host:
    """Loads in a thread, so that the server answers `/health` from its first second; or has it `loaded` already."""

    def __init__(self, load: Load, loaded: Loaded | None = None, give_up: Callable[[], None] | None = None) -> None:
        """With `give_up` a load that is under way is ended when the server is: it may take minutes."""
        self._load, self._give_up = load, give_up
        self._loaded = loaded
        self._stopping = False
        self.failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        if self._stopping:
            return "stopping"
        if self.failure is not None:
            return "failed"
        if self._loaded is None:
            return "starting"
        return "ready" if self._loaded.service.ready else "restarting"

    @property
    def loaded(self) -> Loaded | None:
        return self._loaded

    def start(self, on_failure: Callable[[], None]) -> None:
        if self._loaded is None:
            self._task = asyncio.create_task(self._start(on_failure))

    def engine(self) -> Loaded:
        """Raises NotReady before the model is loaded and while the server goes down."""
        if self._loaded is None or self._stopping:
            raise NotReady(f"the model is not ready: the server is {self.state}")
        return self._loaded

    def begin_to_stop(self) -> None:
        """New requests are refused from now on."""
        self._stopping = True

    async def close(self, drain_seconds: float) -> None:
        self._stopping = True
        if self._task is not None:
            if self._loaded is None and self._give_up is not None:
                await asyncio.to_thread(self._give_up)
            await self._task
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.service.close, drain=True, timeout=drain_seconds)

    async def _start(self, on_failure: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            self._loaded = await asyncio.to_thread(self._load)
            logger.info("ready after %.1f s (%s)", time.monotonic() - began, self._loaded.rung)
        except Exception as failure:  # noqa: BLE001 - `serve` raises it when the server has ended
            if not self._stopping:
                self.failure = failure
                on_failure()
