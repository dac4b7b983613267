"""Replies of the engine process as callers in the server's process receive them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.engine.process.engine_process import Deliver
from shoal.engine.process.messages import Failed, JobReply, Result
from shoal.speech import AudioChunk


class ReplyStream:
    """Async iterator over the chunks of a submitted request. For one reader.

    It must be closed even if it was never iterated. `cancel` does not wake a pending `__anext__`.
    """

    def __init__(self, replies: "asyncio.Queue[JobReply]", cancel: Callable[[], None]) -> None:
        self._replies = replies
        # None once the request has ended: the callback holds the request's recordings, and a client may read for long.
        self._cancel: Callable[[], None] | None = cancel

    def __aiter__(self) -> "ReplyStream":
        return self

    async def __anext__(self) -> AudioChunk:
        if self._cancel is None:
            raise StopAsyncIteration
        reply = await self._replies.get()
        if not isinstance(reply, AudioChunk) or reply.finish is not None:
            self._cancel = None
        if isinstance(reply, Failed):
            raise reply.error
        assert isinstance(reply, AudioChunk), "Speak is answered by chunks"
        return reply

    def cancel(self) -> None:
        """Cancel the request unless it has ended. It stops counting against the supervisor's queue limit at once."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    async def aclose(self) -> None:
        self.cancel()


def deliver_to(replies: "asyncio.Queue[JobReply]") -> Deliver:
    """Return a callback that puts replies into a queue of the running event loop from any thread."""
    loop = asyncio.get_running_loop()

    def deliver(reply: JobReply) -> None:
        with suppress(RuntimeError):  # the event loop was closed, and the caller with it
            loop.call_soon_threadsafe(replies.put_nowait, reply)

    return deliver


def result_value(reply: JobReply) -> Any:
    """Return the value of a Result. Raises the error of a failed job."""
    if isinstance(reply, Failed):
        raise reply.error
    assert isinstance(reply, Result), "Encode, Decode, GetStats and ReleaseMemory are answered by a Result"
    return reply.value
