"""`/v1/tts/live`: text arrives as it is written, audio is sent as it is generated.

Messages are binary frames with one MessagePack map each. The client sends `start` with the fields of `/v1/tts`, any
number of `text`, `flush` to speak the buffered text, and `stop`, or `cancel` to stop immediately. The server sends
`audio`, and `finish` with the reason `stop`, `cancel` or `error` and how much was spoken. The socket then waits for the
next `start`; after an error it is closed. All audio of a session is one stream, with one header and one encoder.

`/v1/tts/live/with-timestamp` is the same with word times: each `audio` also has `content`, `alignment`, `chunk_seq` and
`chunk_audio_offset_sec`, as Fish Audio's.
"""

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import ormsgpack
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from shoal.api.admission import BodyReservation
from shoal.api.exceptions import IdleTimeout, SlowReader
from shoal.api.keys import Key
from shoal.api.live.events import Cancel, Flush, LiveBody, Stop, Text, TextBuffer, parse_message
from shoal.api.live.session import LiveContext, LiveContexts, Spoken
from shoal.api.requests import fish_job
from shoal.api.state import ServerState
from shoal.api.word_events import FishAlignment
from shoal.errors import InvalidRequest, ShoalError
from shoal.server.connection_errors import connection_errors, require_connected
from shoal.server.error_responses import error_response
from shoal.server.middleware.request_id import request_id
from shoal.server.request_body import parse_body
from shoal.server.state import state_of, websocket_caller
from shoal.server.streaming_response import close_connection, write_timeout
from shoal.speech import Word

logger = logging.getLogger(__name__)

router = APIRouter()

# Fish Audio's client accepts messages of up to 64 KiB.
MAX_MESSAGE_BYTES = 60 << 10
NORMAL, POLICY_VIOLATION, INTERNAL_ERROR = 1000, 1008, 1011
SESSION = "session"  # name of a Fish socket's only context


@router.websocket("/v1/tts/live")
async def live(socket: WebSocket) -> None:
    await _serve(socket, timed=False)


@router.websocket("/v1/tts/live/with-timestamp")
async def live_with_timestamps(socket: WebSocket) -> None:
    await _serve(socket, timed=True)


async def _serve(socket: WebSocket, *, timed: bool) -> None:
    state = state_of(socket)
    try:
        key = websocket_caller(socket)
        state.lifecycle.require_engine()
    except ShoalError as error:
        await socket.send_denial_response(error_response("/v1/tts/live", error, state.queue.retry_after_seconds()))
        return
    # Name the loaded model: the client's `model` header cannot select another one.
    await socket.accept(headers=[(b"x-model", state.config.model.encode("ascii", "replace"))])
    with contextlib.suppress(WebSocketDisconnect, OSError):
        await FishSocket(socket, state, key, request_id(socket), timed=timed).run()


class FishSocket:
    """One connection: any number of sessions, one after the other. With `timed`, audio has word times."""

    def __init__(self, socket: WebSocket, state: ServerState, key: Key, id: str, *, timed: bool = False) -> None:
        self._socket, self._state, self._key, self._id, self._timed = socket, state, key, id, timed
        self._alignment = FishAlignment()  # alignment of the current session
        self._sessions = 0
        self._ignored: tuple[str, ...] = ()  # options of the current session that have no effect

    async def run(self) -> None:
        """Receive events until the client disconnects or an error ends the connection."""
        fail_internally = partial(self._close, INTERNAL_ERROR, "internal server error")
        async with (
            connection_errors(self._id, WebSocketDisconnect, self._fail, fail_internally),
            asyncio.TaskGroup() as group,
        ):
            contexts = LiveContexts(group, self._state, limit=1)
            while True:
                message = await self._receive(contexts)
                with contextlib.closing(BodyReservation(self._state.body_budget)) as reservation:
                    reservation.grow(len(message))
                    await self._handle(contexts, message, reservation)

    async def _receive(self, contexts: LiveContexts) -> bytes:
        """Return the next message. Raises InvalidRequest for a text frame, IdleTimeout after `live_idle_seconds`."""
        try:
            async with contexts.idle.limit():
                require_connected(self._socket)
                return await self._socket.receive_bytes()
        except KeyError:
            raise InvalidRequest("send binary frames of MessagePack, not text") from None

    async def _handle(self, contexts: LiveContexts, message: bytes, reservation: BodyReservation) -> None:
        event = await parse_body(message, partial(parse_message, message))
        session = contexts.get(SESSION)
        match event:
            case LiveBody():
                self._start(contexts, event, reservation)
            case Cancel():
                await self._cancel(contexts)
            case Stop():
                if session is not None:
                    session.end()
            case Text(text=text):
                self._require(session).add(text)
            case Flush():
                self._require(session).flush()

    def _require(self, session: LiveContext | None) -> LiveContext:
        if session is None:
            raise InvalidRequest("no session is open: send `start` first")
        return session

    def _start(self, contexts: LiveContexts, body: LiveBody, reservation: BodyReservation) -> None:
        if contexts.get(SESSION) is not None:
            raise InvalidRequest("this session has started already: send text, flush, stop or cancel")
        if self._sessions:  # the first was counted when the socket was accepted
            self._key = websocket_caller(self._socket)
        self._sessions += 1
        engine, limits = self._state.lifecycle.require_engine(), self._state.config.limits
        body = body.model_copy(update={"streaming": True})
        job = fish_job(body, engine, limits, self._key, self._id, api="live")
        job = replace(job, request=replace(job.request, timestamps=self._timed))
        self._ignored, self._alignment = job.ignored, FishAlignment()
        buffer = TextBuffer(body.min_chunk_length, body.chunk_length)
        contexts.open(SESSION, job, buffer, self._send_audio, self._ended, reservation).add(body.text)

    async def _cancel(self, contexts: LiveContexts) -> None:
        """Stop the session. Without one it has just ended, and its `finish` is on the way to the client."""
        spoken = await contexts.cancel(SESSION)
        if spoken is not None:
            await self._finish("cancel", spoken)

    async def _ended(self, session: LiveContext, error: ShoalError | None) -> None:
        if error is not None:
            raise error
        await self._finish("stop", session.spoken)

    async def _finish(self, reason: str, spoken: Spoken) -> None:
        ignored = {"ignored": self._ignored} if self._ignored else {}
        await self._send({"event": "finish", "reason": reason, **spoken_fields(spoken), **ignored})

    async def _send_audio(self, audio: bytes, words: tuple[Word, ...]) -> None:
        """Send audio in messages of bounded size, the first with the words; words without audio are one message."""
        for start in range(0, max(len(audio), bool(words)), MAX_MESSAGE_BYTES):
            timed = self._alignment.fields(() if start else words) if self._timed else {}
            await self._send({"event": "audio", "audio": audio[start : start + MAX_MESSAGE_BYTES], **timed})

    async def _send(self, event: dict[str, Any]) -> None:
        """Send an event. Raises SlowReader when the client reads nothing for `stall_seconds`."""
        require_connected(self._socket)
        async with write_timeout(self._state.config.limits.stall_seconds):
            await self._socket.send_bytes(ormsgpack.packb(event))

    async def _fail(self, error: BaseException) -> None:
        logger.info("%s: %s", self._id, error)
        if isinstance(error, SlowReader):
            await close_connection(self._socket.scope, immediately=True)  # the client would not read `finish` either
        elif isinstance(error, IdleTimeout):
            # A normal end: nothing was lost, and clients that keep a connection open reconnect without an error.
            await self._close(NORMAL, str(error), reason="stop")
        else:
            await self._close(POLICY_VIOLATION, str(error))

    async def _close(self, code: int, message: str, *, reason: str = "error") -> None:
        finish = {"event": "finish", "reason": reason, "message": message}
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._socket.send_bytes(ormsgpack.packb(finish))
                await self._socket.close(code)


def spoken_fields(spoken: Spoken) -> dict[str, Any]:
    """Return the fields of `finish` with the progress of a session."""
    fields: dict[str, Any] = {"spoken": _spoken(spoken.characters, spoken.audio_seconds)}
    if spoken.interrupted_characters:
        fields["interrupted"] = _spoken(spoken.interrupted_characters, spoken.interrupted_seconds)
    return fields


def _spoken(characters: int, seconds: float) -> dict[str, Any]:
    return {"characters": characters, "audio_seconds": round(seconds, 3)}
