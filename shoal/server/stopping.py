"""Shutdown of servers by signals."""

import asyncio
import logging
from types import FrameType

import uvicorn


class CancellationFilter(logging.Filter):
    """Drops tracebacks of requests that shutdown cancelled; RequestAccounting logs each of them in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # Starlette reports a failed lifespan as text, which uvicorn logs without exc_info.
        cancelled_lifespan = record.getMessage().rstrip().endswith("CancelledError")
        return not (cancelled_lifespan or isinstance(error, asyncio.CancelledError))


CANCELLATION_FILTER = CancellationFilter()


class StoppableServer(uvicorn.Server):
    """Drains requests in flight at SIGINT or SIGTERM, ends them at a second signal, and exits with status 0."""

    def __init__(self, config: uvicorn.Config) -> None:
        logging.getLogger("uvicorn.error").addFilter(CANCELLATION_FILTER)
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            asyncio.get_running_loop().call_soon_threadsafe(self._cancel_requests)
        self.should_exit = True  # unlike uvicorn, no `force_exit`: it would skip the end of the lifespan

    def _cancel_requests(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()
