"""`/v1/tts/live`: text comes in as it is written, audio goes out as it is spoken.

Binary frames, each one MessagePack map. In: `start` with the fields of `/v1/tts`, any number of `text`, `flush` to
speak what is there, `stop`. Out: `audio`, and `finish` with the reason `stop` or `error`. All audio of one session is
one stream: one header, one encoder.

A session that has text to speak is under way like any request: it has a place in the backlog, and when the server goes
down what it has said is still spoken. One that has none is idle, and ends when that lasts.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import ormsgpack
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from shoal.api.accounting import Tally
from shoal.api.admission import Backlog
from shoal.api.engine_client import SpeechService
from shoal.api.exceptions import NotReady, SlowReader
from shoal.api.live_events import Flush, Start, Stop, Text, event_of, start_of
from shoal.api.live_text import TextBuffer
from shoal.api.output import Renderer
from shoal.api.speech_stream import Order, chunks_in_time
from shoal.errors import InvalidRequest, ShoalError
from shoal.server.error_responses import problem
from shoal.server.keys import Key
from shoal.server.middleware.request_id import request_id
from shoal.server.parsing import Share
from shoal.server.routes.fish import check_model_header, fish_order
from shoal.server.state import Desk, desk_of, live_caller
from shoal.server.streaming_response import hang_up

logger = logging.getLogger(__name__)

router = APIRouter()

# Fish Audio's client takes messages of up to 64 KiB.
MOST_BYTES = 60 << 10
POLICY_VIOLATION, INTERNAL_ERROR, NORMAL = 1008, 1011, 1000


@router.websocket("/v1/tts/live")
async def live(socket: WebSocket) -> None:
    desk = desk_of(socket)
    try:
        key = live_caller(socket)
        check_model_header(socket.headers.get("model"), desk.config)
        session = Session(socket, desk, key, request_id(socket))
    except ShoalError as error:
        await socket.send_denial_response(problem("/v1/tts/live", error, desk.backlog.wait_seconds()))
        return
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect, OSError):
        await session.run()


class Attendance:
    """Whether a session has text to speak. While it has, it holds a place and its clock stands still."""

    def __init__(self, backlog: Backlog, idle_seconds: float) -> None:
        self._backlog, self._idle_seconds = backlog, idle_seconds
        self._busy_since: float | None = None
        self._clock: asyncio.Timeout | None = None

    def begin(self) -> None:
        """Raises EngineBusy when there is no place."""
        if self._busy_since is None:
            self._backlog.begin()
            self._busy_since = asyncio.get_running_loop().time()

    def end(self) -> None:
        if self._busy_since is not None:
            self._backlog.end(asyncio.get_running_loop().time() - self._busy_since)
            self._busy_since = None
            self._wind_up()

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Raises TimeoutError when there has been no text to speak for too long."""
        try:
            async with asyncio.timeout(None) as self._clock:
                self._wind_up()
                yield
        finally:
            self._clock = None

    def _wind_up(self) -> None:
        if self._clock is not None and self._busy_since is None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._idle_seconds)


class Session:
    def __init__(self, socket: WebSocket, desk: Desk, key: Key, id: str) -> None:
        """Raises NotReady."""
        self._socket, self._desk, self._key, self._id = socket, desk, key, id
        self._service = desk.host.engine().service
        self._share = Share(desk.budget)
        self._attendance = Attendance(desk.backlog, desk.config.limits.request_seconds)
        # None: no more will come; NotReady: more came, and too late.
        self._texts: asyncio.Queue[str | NotReady | None] = asyncio.Queue()

    async def run(self) -> None:
        """Listen and speak side by side until all is spoken, or one of them fails."""
        try:
            async with asyncio.TaskGroup() as group:
                order, buffer = await self._start()
                listening = group.create_task(self._listen(buffer))
                await self._speak(order)
                listening.cancel()
            await self._finish("stop", NORMAL)
        except* WebSocketDisconnect:
            logger.info("%s: the client left", self._id)
        except* ShoalError as group_error:
            error = group_error.exceptions[0]
            logger.info("%s: %s", self._id, error)
            if isinstance(error, SlowReader):
                await hang_up(self._socket.scope, at_once=True)  # a last word would not be read either
            else:
                await self._finish("error", POLICY_VIOLATION, str(error))
        except* Exception:
            logger.exception("%s ended in a bug", self._id)
            await self._finish("error", INTERNAL_ERROR, "this is a fault of the server")
        finally:
            self._attendance.end()
            self._share.give_back()

    async def _start(self) -> tuple[Order, TextBuffer]:
        message = await self._message()
        self._share.take(len(message))  # kept: its recordings are needed until the end
        body = await asyncio.to_thread(start_of, message)
        # The order is checked as a whole; the text that counts comes later.
        order = fish_order(body.model_copy(update={"streaming": True}), self._desk, self._key, self._id, api="live")
        buffer = TextBuffer(body.min_chunk_length, body.chunk_length, self._desk.config.limits.text_characters)
        self._say(buffer.add(body.text))
        return order, buffer

    async def _listen(self, buffer: TextBuffer) -> None:
        try:
            while await self._heed(buffer):
                pass
            self._texts.put_nowait(None)
        except NotReady as refusal:
            self._texts.put_nowait(refusal)  # told when all that came before is spoken
        await self._until_gone()

    async def _until_gone(self) -> None:
        """Nothing counts any more but that the client leaves: WebSocketDisconnect. Cancelled when all is spoken."""
        while True:
            with contextlib.suppress(KeyError):  # a frame of text
                await self._socket.receive_bytes()

    async def _heed(self, buffer: TextBuffer) -> bool:
        """One event; False when it was the last. Raises NotReady for text that comes while the server goes down."""
        match event_of(await self._message()):
            case Text(text=text):
                self._desk.host.engine()
                self._say(buffer.add(text))
            case Flush():
                self._say(buffer.rest())
            case Stop():
                self._say(buffer.rest())
                return False
            case Start():
                raise InvalidRequest("this session has begun already: send text, flush or stop")
        return True

    def _say(self, texts: list[str]) -> None:
        for text in texts:
            self._attendance.begin()
            self._texts.put_nowait(text)

    async def _message(self) -> bytes:
        try:
            async with self._attendance.patience():
                return await self._socket.receive_bytes()
        except TimeoutError:
            limit = self._desk.config.limits.request_seconds
            raise InvalidRequest(f"nothing came for {limit:g} seconds") from None
        except KeyError:
            raise InvalidRequest("send binary frames of MessagePack, not text") from None

    async def _speak(self, order: Order) -> None:
        desk, number = self._desk, 0
        renderer = await desk.encode(Renderer, order.rendering, self._service.sample_rate, stream=True)
        while (text := await self._next()) is not None:
            # Whoever leaves while a piece is being sent ends the speech now, not when it is collected.
            async with aclosing(self._spoken(order, text, number, renderer)) as pieces:
                async for piece in pieces:
                    await self._send_audio(piece)
            number += 1
        if number:
            await self._send_audio(await desk.encode(renderer.finish))

    async def _next(self) -> str | None:
        """The next text, or that there is none. Raises NotReady where one was refused."""
        if self._texts.empty():
            self._attendance.end()
        text = await self._texts.get()
        if isinstance(text, NotReady):
            raise text
        return text

    def _newest_service(self) -> SpeechService:
        """The model may have been loaded anew. A server that goes down has none: what was taken is still spoken."""
        with contextlib.suppress(NotReady):
            self._service = self._desk.host.engine().service
        return self._service

    async def _spoken(self, order: Order, text: str, number: int, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """One text as one request of its own: a session holds a slot only while it speaks."""
        sampling = order.request.sampling
        assert sampling is not None
        assert sampling.seed is not None  # set by sampling_for
        sampling = replace(sampling, seed=sampling.seed + number)
        request = replace(order.request, text=text, sampling=sampling)
        tally, ended_by = Tally(self._desk, "live", self._key, self._id, placed=True), None
        try:
            async with aclosing(chunks_in_time(self._newest_service(), request)) as chunks:
                async for chunk in chunks:
                    tally.heard(chunk)
                    yield await self._desk.encode(renderer.feed, chunk.samples)
        except BaseException as problem:
            ended_by = problem
            raise
        finally:
            tally.end(ended_by)

    async def _send_audio(self, audio: bytes) -> None:
        limits = self._desk.config.limits
        for start in range(0, len(audio), MOST_BYTES):
            message = ormsgpack.packb({"event": "audio", "audio": audio[start : start + MOST_BYTES]})
            try:
                async with asyncio.timeout(limits.stall_seconds):
                    await self._socket.send_bytes(message)
            except TimeoutError:
                raise SlowReader(f"the reader took nothing for {limits.stall_seconds:g} seconds") from None

    async def _finish(self, reason: str, code: int, message: str = "") -> None:
        finish = {"event": "finish", "reason": reason} | ({"message": message} if message else {})
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._socket.send_bytes(ormsgpack.packb(finish))
                await self._socket.close(code)
