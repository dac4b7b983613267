"""Bytes between the one who makes them and the one who reads them, with an end to what may wait."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from shoal.api.config import SlowReader as Policy
from shoal.api.exceptions import SlowReader


class Pipe:
    """Bounded: when `most` bytes wait, the maker is ended or made to wait, by `policy`."""

    def __init__(self, most: int, policy: Policy) -> None:
        self._most, self._policy = most, policy
        self._pieces: deque[bytes] = deque()
        self._waiting = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()

    async def put(self, piece: bytes) -> None:
        """Raises SlowReader when the reader is too far behind and is not waited for."""
        while self._waiting and self._waiting + len(piece) > self._most:
            if self._policy == "end":
                raise SlowReader(f"{self._waiting:,} bytes wait to be read: the reader is too slow")
            await self._change()
        if piece:
            self._pieces.append(piece)
            self._waiting += len(piece)
            self._changed.set()

    def close(self, error: BaseException | None = None) -> None:
        """No more will come, because of `error` if there is one. The first word counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._changed.set()

    async def started(self) -> None:
        """Until the first piece is there. Raises the error if that comes first."""
        while not self._pieces and not self._closed:
            await self._change()
        if not self._pieces and self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, then the error if there is one."""
        while self._pieces or not self._closed:
            if not self._pieces:
                await self._change()
                continue
            piece = self._pieces.popleft()
            self._waiting -= len(piece)
            self._changed.set()
            yield piece
        if self._error is not None:
            raise self._error

    async def _change(self) -> None:
        # One maker and one reader: whichever waits is the only one who clears.
        self._changed.clear()
        await self._changed.wait()
