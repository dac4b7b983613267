"""`/v1/tts/live`: text comes in as it is written, audio goes out as it is spoken.

Binary frames, each one MessagePack map. In: `start` with the fields of `/v1/tts`, any number of `text`, `flush` to
speak what is there, `stop`. Out: `audio`, and `finish` with the reason `stop` or `error`. All audio of one session is
one stream: one header, one encoder.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ormsgpack
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from shoal.errors import InvalidRequest, ShoalError
from shoal.server.bodies import unpack, validated
from shoal.server.desk import Desk, desk_of, live_caller
from shoal.server.fish import check_model_header, fish_order
from shoal.server.identity import request_id
from shoal.server.keys import Key
from shoal.server.live_text import LiveBody, TextBuffer
from shoal.server.performance import Order, chunks_in_time
from shoal.server.problems import problem
from shoal.server.refusals import SlowReader
from shoal.server.rendering import Renderer
from shoal.server.tally import Tally

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
        desk.host.engine()
    except ShoalError as error:
        await socket.send_denial_response(problem("/v1/tts/live", error, desk.backlog.wait_seconds()))
        return
    await socket.accept()
    session = Session(socket, desk, key, request_id(socket))
    with contextlib.suppress(WebSocketDisconnect, OSError):
        await session.run()


class Session:
    def __init__(self, socket: WebSocket, desk: Desk, key: Key, id: str) -> None:
        self._socket, self._desk, self._key, self._id = socket, desk, key, id
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()  # None: no more will come

    async def run(self) -> None:
        """Listen and speak side by side until both are done, or one of them fails."""
        try:
            async with asyncio.TaskGroup() as group:
                order, buffer = await self._start()
                group.create_task(self._listen(buffer))
                group.create_task(self._speak(order))
            await self._finish("stop", NORMAL)
        except* WebSocketDisconnect:
            logger.info("%s: the client left", self._id)
        except* ShoalError as group_error:
            error = group_error.exceptions[0]
            logger.info("%s: %s", self._id, error)
            await self._finish("error", POLICY_VIOLATION, str(error))
        except* Exception:
            logger.exception("%s ended in a bug", self._id)
            await self._finish("error", INTERNAL_ERROR, "this is a fault of the server")

    async def _start(self) -> tuple[Order, TextBuffer]:
        event = await self._event()
        if event.get("event") != "start":
            raise InvalidRequest("the first event must be `start`")
        body = validated(LiveBody, event.get("request"))
        # The order is checked as a whole; the text that counts comes later.
        order = fish_order(body.model_copy(update={"streaming": True}), self._desk, self._key, self._id, api="live")
        buffer = TextBuffer(body.min_chunk_length, body.chunk_length, self._desk.config.limits.text_characters)
        self._say(buffer.add(body.text))
        return order, buffer

    async def _listen(self, buffer: TextBuffer) -> None:
        while True:
            event = await self._event()
            kind = event.get("event")
            if kind == "text" and isinstance(event.get("text"), str):
                self._say(buffer.add(event["text"]))
            elif kind == "flush":
                self._say(buffer.rest())
            elif kind == "stop":
                self._say(buffer.rest())
                self._texts.put_nowait(None)
                return
            else:
                raise InvalidRequest(f"unknown event {str(kind)[:64]!r}: start, text, flush or stop")

    def _say(self, texts: list[str]) -> None:
        for text in texts:
            self._texts.put_nowait(text)

    async def _event(self) -> dict[str, Any]:
        limit = self._desk.config.limits.request_seconds
        try:
            async with asyncio.timeout(limit):
                event = unpack(await self._socket.receive_bytes())
        except TimeoutError:
            raise InvalidRequest(f"nothing came for {limit:g} seconds") from None
        except KeyError:
            raise InvalidRequest("send binary frames of MessagePack, not text") from None
        if not isinstance(event, dict):
            raise InvalidRequest("an event is a map with the key `event`")
        return event

    async def _speak(self, order: Order) -> None:
        desk, service = self._desk, self._desk.host.engine().service
        renderer = await desk.encode(Renderer, order.rendering, service.sample_rate, stream=True)
        number = 0
        while (text := await self._texts.get()) is not None:
            # Whoever leaves while a piece is being sent ends the speech now, not when it is collected.
            async with aclosing(self._spoken(order, text, number, renderer)) as pieces:
                async for piece in pieces:
                    await self._send_audio(piece)
            number += 1
        if number:
            await self._send_audio(await desk.encode(renderer.finish))

    async def _spoken(self, order: Order, text: str, number: int, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """One text as one request of its own: a session holds a slot only while it speaks."""
        assert order.request.sampling is not None
        sampling = replace(order.request.sampling, seed=order.request.sampling.seed + number)
        request = replace(order.request, text=text, sampling=sampling)
        tally, ended_by = Tally(self._desk, "live", self._key, self._id), None
        try:
            async with aclosing(chunks_in_time(self._desk.host.engine().service, request)) as chunks:
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
