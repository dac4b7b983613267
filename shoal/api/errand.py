"""Work that is no speech, and is let in, counted, timed and ended like one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request

from shoal.api.accounting import Tally
from shoal.api.disconnect import unless_gone
from shoal.errors import DeadlineExceeded
from shoal.server.keys import Key
from shoal.server.middleware.request_id import request_id
from shoal.server.parsing import let_go
from shoal.server.state import Desk

T = TypeVar("T")

Work = Callable[[], Awaitable[T]]


async def run_errand(http: Request, desk: Desk, key: Key, api: str, work: Work[T]) -> T:
    """What the work gives. Raises what `Tally` raises, DeadlineExceeded, and ClientDisconnect when nobody waits.

    After it the body of the request is let go of.
    """
    ended_by: BaseException | None = None
    tally = Tally(desk, api, key, request_id(http))
    try:
        return await unless_gone(http.receive, _in_time(desk.config.limits.request_seconds, work))
    except BaseException as problem:
        ended_by = problem
        raise
    finally:
        tally.end(ended_by)
        let_go(http)


async def _in_time(seconds: float, work: Work[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work()
    except TimeoutError:
        raise DeadlineExceeded(f"this took longer than {seconds:g} seconds") from None
