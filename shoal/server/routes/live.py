"""`/v1/tts/live`: text arrives as it is written, audio is sent as it is generated.

Messages are binary frames with one MessagePack map each. The client sends `start` with the fields of `/v1/tts`, any
number of `text`, `flush` to speak the buffered text, and `stop`. The server sends `audio`, and `finish` with the reason
`stop` or `error`. All audio of a session is one stream, with one header and one encoder.

While a session has text to speak it holds a place in the admission queue like any request, and at shutdown that text
is still spoken. A session without text is idle and is closed after a timeout.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import ormsgpack
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from shoal.api.accounting import RequestAccounting
from shoal.api.admission import AdmissionQueue, BodyReservation
from shoal.api.engine_client import SpeechService
from shoal.api.exceptions import NotReady, SlowReader
from shoal.api.keys import Key
from shoal.api.live import Flush, Start, Stop, Text, TextBuffer, parse_event, parse_start
from shoal.api.output import OutputEncoder
from shoal.api.requests import SpeechJob, check_model_header, fish_job
from shoal.api.speech_stream import chunks_before, deadline_of
from shoal.api.state import ServerState
from shoal.errors import InvalidRequest, ShoalError
from shoal.server.error_responses import error_response
from shoal.server.middleware.request_id import request_id
from shoal.server.request_body import parse_body
from shoal.server.state import state_of, websocket_caller
from shoal.server.streaming_response import close_connection

logger = logging.getLogger(__name__)

router = APIRouter()

# Fish Audio's client accepts messages of up to 64 KiB.
MAX_MESSAGE_BYTES = 60 << 10
POLICY_VIOLATION, INTERNAL_ERROR, NORMAL = 1008, 1011, 1000


@router.websocket("/v1/tts/live")
async def live(socket: WebSocket) -> None:
    state = state_of(socket)
    try:
        key = websocket_caller(socket)
        check_model_header(socket.headers.get("model"), state.config)
        session = LiveSession(socket, state, key, request_id(socket))
    except ShoalError as error:
        await socket.send_denial_response(error_response("/v1/tts/live", error, state.queue.retry_after_seconds()))
        return
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect, OSError):
        await session.run()


class SessionActivity:
    """Tracks whether a session has text to speak. If so it holds a queue place, and the idle timer is stopped."""

    def __init__(self, queue: AdmissionQueue, idle_seconds: float) -> None:
        self._queue, self._idle_seconds = queue, idle_seconds
        self._busy_since: float | None = None
        self._timer: asyncio.Timeout | None = None

    def begin(self) -> None:
        """Raises EngineBusy when the queue is full."""
        if self._busy_since is None:
            self._queue.acquire()
            self._busy_since = asyncio.get_running_loop().time()

    def end(self) -> None:
        if self._busy_since is not None:
            self._queue.release(asyncio.get_running_loop().time() - self._busy_since)
            self._busy_since = None
            self._restart_timer()

    @asynccontextmanager
    async def idle_timeout(self) -> AsyncIterator[None]:
        """Raises TimeoutError when the session has been idle for too long."""
        try:
            async with asyncio.timeout(None) as self._timer:
                self._restart_timer()
                yield
        finally:
            self._timer = None

    def _restart_timer(self) -> None:
        if self._timer is not None and self._busy_since is None:
            self._timer.reschedule(asyncio.get_running_loop().time() + self._idle_seconds)


class LiveSession:
    def __init__(self, socket: WebSocket, state: ServerState, key: Key, id: str) -> None:
        """Raises NotReady."""
        self._socket, self._state, self._key, self._id = socket, state, key, id
        self._engine = state.lifecycle.require_engine()
        self._reservation = BodyReservation(state.body_budget)
        self._activity = SessionActivity(state.queue, state.config.limits.request_seconds)
        # None: the client sent `stop`. NotReady: text arrived during shutdown; raised once earlier text is spoken.
        self._texts: asyncio.Queue[str | NotReady | None] = asyncio.Queue()

    async def run(self) -> None:
        """Receive and speak concurrently until all text is spoken or either fails."""
        try:
            async with asyncio.TaskGroup() as group:
                job, buffer = await self._start()
                receiving = group.create_task(self._receive(buffer))
                await self._speak(job)
                receiving.cancel()
            await self._finish("stop", NORMAL)
        except* WebSocketDisconnect:
            logger.info("%s: client disconnected", self._id)
        except* ShoalError as group_error:
            await self._fail(group_error.exceptions[0])
        except* Exception:  # edge: the WebSocket's counterpart of HTTP 500
            logger.exception("%s: internal error", self._id)
            await self._finish("error", INTERNAL_ERROR, "internal server error")
        finally:
            self._activity.end()
            self._reservation.release()

    async def _fail(self, error: BaseException) -> None:
        logger.info("%s: %s", self._id, error)
        if isinstance(error, SlowReader):
            await close_connection(self._socket.scope, immediately=True)  # the client would not read `finish` either
        else:
            await self._finish("error", POLICY_VIOLATION, str(error))

    async def _start(self) -> tuple[SpeechJob, TextBuffer]:
        message = await self._message()
        self._reservation.grow(len(message))  # held for the whole session: each text uses its recordings
        body = await parse_body(message, partial(parse_start, message))
        body = body.model_copy(update={"streaming": True})
        limits = self._state.config.limits
        job = fish_job(body, self._engine, limits, self._key, self._id, api="live")
        buffer = TextBuffer(body.min_chunk_length, body.chunk_length, limits.text_characters)
        self._enqueue(buffer.add(body.text))
        return job, buffer

    async def _receive(self, buffer: TextBuffer) -> None:
        try:
            while await self._handle_event(buffer):
                pass
            self._texts.put_nowait(None)
        except NotReady as error:
            self._texts.put_nowait(error)
        await self._wait_for_disconnect()

    async def _wait_for_disconnect(self) -> None:
        """Ignore further messages. Raises WebSocketDisconnect when the client disconnects."""
        while True:
            with contextlib.suppress(KeyError):  # a text frame
                await self._socket.receive_bytes()

    async def _handle_event(self, buffer: TextBuffer) -> bool:
        """Handle one event; return False after the last. Raises NotReady for text that arrives during shutdown."""
        match parse_event(await self._message()):
            case Text(text=text):
                self._state.lifecycle.require_engine()
                self._enqueue(buffer.add(text))
            case Flush():
                self._enqueue(buffer.flush())
            case Stop():
                self._enqueue(buffer.flush())
                return False
            case Start():
                raise InvalidRequest("this session has started already: send text, flush or stop")
        return True

    def _enqueue(self, texts: list[str]) -> None:
        for text in texts:
            self._activity.begin()
            self._texts.put_nowait(text)

    async def _message(self) -> bytes:
        try:
            async with self._activity.idle_timeout():
                return await self._socket.receive_bytes()
        except TimeoutError:
            seconds = self._state.config.limits.request_seconds
            raise InvalidRequest(f"no message arrived for {seconds:g} seconds") from None
        except KeyError:
            raise InvalidRequest("send binary frames of MessagePack, not text") from None

    async def _speak(self, job: SpeechJob) -> None:
        number = 0
        encoder = OutputEncoder(job.output, job.engine.service.sample_rate, stream=True)
        while (text := await self._next_text()) is not None:
            # aclosing: a disconnect while a piece is sent must cancel the request now, not at garbage collection.
            async with aclosing(self._spoken(job, text, number, encoder)) as pieces:
                async for piece in pieces:
                    await self._send_audio(piece)
            number += 1
        if number:
            await self._send_audio(await self._state.encode(encoder.finish))

    async def _next_text(self) -> str | None:
        """Return the next text, or None after the last. Raises NotReady in place of a rejected text."""
        if self._texts.empty():
            self._activity.end()
        text = await self._texts.get()
        if isinstance(text, NotReady):
            raise text
        return text

    def _current_service(self) -> SpeechService:
        """Return the current service. During shutdown, keep the previous one: accepted text is still spoken."""
        with contextlib.suppress(NotReady):
            self._engine = self._state.lifecycle.require_engine()
        return self._engine.service

    async def _spoken(
        self, job: SpeechJob, text: str, number: int, encoder: OutputEncoder
    ) -> AsyncGenerator[bytes, None]:
        """Yield the encoded audio of one text. Each text is its own request, so an idle session holds no slot."""
        sampling = job.request.sampling
        assert sampling is not None
        assert sampling.seed is not None  # set by sampling_for
        sampling = replace(sampling, seed=sampling.seed + number)
        request = replace(job.request, text=text, sampling=sampling)
        with RequestAccounting(self._state, "live", self._key, self._id, queued=True) as accounting:
            async with aclosing(chunks_before(deadline_of(request), self._current_service(), request)) as chunks:
                async for chunk in chunks:
                    accounting.record_audio(chunk)
                    yield await self._state.encode(encoder.feed, chunk.samples)

    async def _send_audio(self, audio: bytes) -> None:
        limits = self._state.config.limits
        for start in range(0, len(audio), MAX_MESSAGE_BYTES):
            message = ormsgpack.packb({"event": "audio", "audio": audio[start : start + MAX_MESSAGE_BYTES]})
            try:
                async with asyncio.timeout(limits.stall_seconds):
                    await self._socket.send_bytes(message)
            except TimeoutError:
                raise SlowReader(f"the client read nothing for {limits.stall_seconds:g} seconds") from None

    async def _finish(self, reason: str, code: int, message: str = "") -> None:
        finish = {"event": "finish", "reason": reason} | ({"message": message} if message else {})
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._socket.send_bytes(ormsgpack.packb(finish))
                await self._socket.close(code)
