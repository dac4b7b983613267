"""ElevenLabs' WebSockets: text arrives as it is written, audio is sent as it is generated.

`stream-input` speaks one text: an empty text ends it, and the server closes the socket after the last audio.
`multi-stream-input` has several contexts, each with its own text and audio. `flush` speaks the buffered text.
`close_context` after a flush ends the context once its text is spoken; before a flush, or when it is repeated, it
interrupts: the slot is released at the engine's next step. Errors of one context do not affect the others.
The dialogue socket, which clients use with newer models, has other field names, and each context names its own voice.

Messages are JSON in text frames, audio is base64. `alignment` has the characters of the words that end in the audio of
the message; it is null if there are none, or if the model has no known alignment heads.
"""

import asyncio
import base64
import contextlib
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from shoal.api.admission import BodyReservation
from shoal.api.exceptions import SlowReader, error_code
from shoal.api.keys import Key
from shoal.api.live.elevenlabs import (
    StreamMessage,
    StreamOptions,
    parse_dialogue_message,
    parse_message,
    stream_options,
)
from shoal.api.live.events import MAX_EVENT_BYTES
from shoal.api.live.session import LiveContext, LiveContexts, Spoken
from shoal.api.requests import SpeechJob, fallback_voices
from shoal.api.state import ServerState
from shoal.api.word_events import CharacterTimes
from shoal.errors import InvalidRequest, ShoalError, VoiceNotFound
from shoal.server.connection_errors import connection_errors, require_connected
from shoal.server.error_responses import error_response
from shoal.server.middleware.request_id import request_id
from shoal.server.request_body import parse_body
from shoal.server.routes.fish.live import spoken_fields
from shoal.server.state import state_of, websocket_caller
from shoal.server.streaming_response import close_connection, limit_messages, write_timeout
from shoal.speech import Word

logger = logging.getLogger(__name__)

router = APIRouter()

SPEECH = "/v1/text-to-speech/{voice_id}"
# Python's websockets accepts messages of up to 1 MiB. A multiple of two bytes, so that samples stay whole.
MAX_AUDIO_BYTES = 96 << 10
MAX_CONTEXTS = 16
MAX_MESSAGE_BYTES = 4 * MAX_EVENT_BYTES  # `parse_message` limits characters, of at most 4 bytes
NORMAL, POLICY_VIOLATION, INTERNAL_ERROR = 1000, 1008, 1011
CLOSE_SECONDS = 1.0
ONLY = ""  # name of the context of messages without a context id


@router.websocket(SPEECH + "/stream-input")
async def stream_input(socket: WebSocket, voice_id: str) -> None:
    await _serve(socket, voice_id, multi=False)


@router.websocket(SPEECH + "/multi-stream-input")
async def multi_stream_input(socket: WebSocket, voice_id: str) -> None:
    await _serve(socket, voice_id, multi=True)


@router.websocket("/v1/text-to-dialogue/multi-stream-input")
async def dialogue_input(socket: WebSocket) -> None:
    await _serve(socket, None, multi=True)


async def _serve(socket: WebSocket, voice_id: str | None, *, multi: bool) -> None:
    """Check key, query and voice before accepting the socket, so that a rejection is an HTTP response."""
    state = state_of(socket)
    limit_messages(socket.scope, MAX_MESSAGE_BYTES)
    try:
        key = websocket_caller(socket)
        options = stream_options(socket.query_params)
        voice = None if voice_id is None else await _checked_voice(state, voice_id)
    except ShoalError as error:
        denial = error_response(socket.url.path, error, state.queue.retry_after_seconds())
        await socket.send_denial_response(denial)
        return
    await socket.accept()
    kind = DialogueSocket if voice_id is None else ElevenLabsSocket
    with contextlib.suppress(WebSocketDisconnect, OSError):
        await kind(socket, state, key, voice, options, multi=multi).run()


async def _checked_voice(state: ServerState, voice_id: str) -> str:
    """Return the name. Raises VoiceNotFound, before any text arrives, unless it is stored or an OpenAI voice name."""
    engine = state.lifecycle.require_engine()
    if not fallback_voices(voice_id, engine) and not await asyncio.to_thread(engine.voices.exists, voice_id):
        raise VoiceNotFound(f"there is no voice {voice_id[:64]!r}: store one under this name, or use a stored one")
    return voice_id


class SocketClosed(Exception):
    """Ends the task group of a socket that the client asked to close; the socket is closed normally afterwards."""


@dataclass(slots=True)
class OpenContext:
    """What a socket records about one of its open contexts."""

    ignored: list[str]  # options that have no effect
    audio_seconds: Callable[[], float]  # returns the seconds of audio sent so far
    aligned: float = 0.0  # seconds up to which alignment was sent
    flushed: bool = False  # no text since the last flush: closing the context lets it finish


class ElevenLabsSocket:
    """One connection with one context (`stream-input`) or several."""

    final, normalized, context_id = "isFinal", "normalizedAlignment", "contextId"  # names of fields
    times = ("charStartTimesMs", "charDurationsMs")

    def __init__(
        self, socket: WebSocket, state: ServerState, key: Key, voice: str | None, options: StreamOptions, *, multi: bool
    ) -> None:
        self._socket, self._state, self._key, self._voice, self._options = socket, state, key, voice, options
        self._multi, self._id = multi, request_id(socket)
        self._seed = secrets.randbits(32)
        self._opened = 0
        self._closing = False  # the client asked to close the socket once all text is spoken
        self._open_contexts: dict[str, OpenContext] = {}

    async def run(self) -> None:
        """Receive messages until either side closes the socket."""
        last = self._error("internal server error", "internal_error")
        fail_internally = partial(self._close, INTERNAL_ERROR, last)
        async with connection_errors(self._id, WebSocketDisconnect, self._fail, fail_internally):
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve(LiveContexts(group, self._state, limit=MAX_CONTEXTS if self._multi else 1))
            except* SocketClosed:
                await self._close(NORMAL, None)

    async def _serve(self, contexts: LiveContexts) -> None:
        while True:
            message = await self._receive(contexts)
            with contextlib.closing(BodyReservation(self._state.body_budget)) as reservation:
                reservation.grow(len(message))
                await self._handle(contexts, await self._parse(message))

    async def _parse(self, message: str) -> StreamMessage:
        return await parse_body(message.encode(), partial(parse_message, message))

    def _voice_of(self, name: str) -> str | None:
        """Return the stored voice of a context, or None for the model's own."""
        return self._voice

    def _forget(self, name: str) -> None:
        self._open_contexts.pop(name, None)

    async def _receive(self, contexts: LiveContexts) -> str:
        """Return the next message. Raises InvalidRequest for a binary frame, IdleTimeout after `live_idle_seconds`."""
        try:
            async with contexts.idle.limit():
                require_connected(self._socket)
                return await self._socket.receive_text()
        except KeyError:
            raise InvalidRequest("send text frames of JSON, not binary frames") from None

    async def _handle(self, contexts: LiveContexts, message: StreamMessage) -> None:
        name = (message.context_id or ONLY) if self._multi else ONLY
        if message.close_socket or (not self._multi and message.text == ""):
            await self._close_when_spoken(contexts)
        elif self._closing:
            return  # the socket is about to close: nothing more is spoken
        elif message.close_context:
            await self._close_context(contexts, name)
        else:
            await self._add(contexts, name, message)

    async def _add(self, contexts: LiveContexts, name: str, message: StreamMessage) -> None:
        """Speak the text of a message. An empty text only keeps the socket alive: it has reset the idle timer."""
        try:
            context = contexts.get(name)
            if context is None and message.text:
                context = self._open(contexts, name, message)
            if context is None:
                return
            if message.text:
                self._open_contexts[name].flushed = False
                context.add(message.text)
            if message.flush:
                self._open_contexts[name].flushed = True
            if message.flush or (message.text and self._options.auto_mode):
                context.flush()
        except ShoalError as error:
            await self._fail_context(contexts, name, error)

    def _open(self, contexts: LiveContexts, name: str, first: StreamMessage) -> LiveContext:
        if self._opened:  # the first was counted when the socket was accepted
            self._key = websocket_caller(self._socket)
        self._opened += 1
        engine, limits = self._state.lifecycle.require_engine(), self._state.config.limits
        voice = self._voice_of(name)
        request = replace(
            self._options.request(voice, self._seed, engine.frame_rate, limits.request_seconds),
            fallback_voices=fallback_voices(voice, engine),
            timestamps=engine.word_times,
        )
        job = SpeechJob("elevenlabs", request, self._options.output_of(first), engine, self._key, self._id)
        send, on_end = partial(self._send_audio, name), partial(self._ended, contexts, name)
        context = contexts.open(name, job, self._options.buffer(first), send, on_end)
        self._open_contexts[name] = OpenContext(
            first.ignored(), lambda: context.spoken.audio_seconds / job.output.speed
        )
        return context

    async def _close_context(self, contexts: LiveContexts, name: str) -> None:
        """End a context that is flushed; interrupt one that is not, or that was closed before."""
        context = contexts.get(name)
        if context is None:
            return  # it has ended, and its last message is on the way to the client
        if self._open_contexts[name].flushed and not context.ending:
            context.end()
            return
        spoken = await contexts.cancel(name)
        await self._finish_context(contexts, name, spoken)

    async def _close_when_spoken(self, contexts: LiveContexts) -> None:
        self._closing = True
        for name in contexts.names():
            context = contexts.get(name)
            if context is not None:
                context.end()
        self._close_if_done(contexts)

    def _close_if_done(self, contexts: LiveContexts) -> None:
        if self._closing and not len(contexts):
            raise SocketClosed

    async def _ended(self, contexts: LiveContexts, name: str, context: LiveContext, error: ShoalError | None) -> None:
        if isinstance(error, SlowReader):
            raise error
        if error is not None:
            await self._fail_context(contexts, name, error)
        else:
            await self._finish_context(contexts, name, context.spoken)

    async def _finish_context(self, contexts: LiveContexts, name: str, spoken: Spoken | None) -> None:
        fields = spoken_fields(spoken) if spoken is not None else {}
        if (opened := self._open_contexts.get(name)) is not None and opened.ignored:
            fields["ignored"] = opened.ignored
        self._forget(name)
        await self._send(self._audio_message(name, None) | {self.final: True} | fields)
        self._close_if_done(contexts)

    async def _fail_context(self, contexts: LiveContexts, name: str, error: ShoalError) -> None:
        """Report an error. It ends the context; without other contexts it ends the socket."""
        if not self._multi:
            raise error
        logger.info("%s: context %s: %s", self._id, name[:64], error)
        await contexts.cancel(name)
        self._forget(name)
        await self._send(self._error(str(error), error_code(error)) | {self.context_id: name or None})
        self._close_if_done(contexts)

    async def _send_audio(self, name: str, audio: bytes, words: tuple[Word, ...]) -> None:
        """Send audio in messages of bounded size, the first with the words; words without audio are one message."""
        for start in range(0, max(len(audio), bool(words)), MAX_AUDIO_BYTES):
            alignment = self._alignment(name, words) if words and not start else None
            message = self._audio_message(name, audio[start : start + MAX_AUDIO_BYTES] or None)
            await self._send(message | {"alignment": alignment, self.normalized: alignment})

    def _alignment(self, name: str, words: tuple[Word, ...]) -> dict[str, Any]:
        alignment = CharacterTimes.of(words).as_milliseconds(self.times, self._alignment_begin(name))
        self._open_contexts[name].aligned = words[-1].end
        return alignment

    def _alignment_begin(self, name: str) -> float:
        """Return the time in a context, in seconds, from which the next alignment counts.

        With `sync_alignment` it is the start of the context; otherwise the end of the previous alignment, for clients
        that add up the durations of all alignments.
        """
        return 0.0 if self._options.sync_alignment else self._open_contexts[name].aligned

    def _audio_message(self, name: str, audio: bytes | None) -> dict[str, Any]:
        encoded = None if audio is None else base64.b64encode(audio).decode()
        message = {"audio": encoded, self.final: None, "alignment": None, self.normalized: None}
        return message | ({self.context_id: name or None} if self._multi else {})

    def _error(self, message: str, code: str) -> dict[str, Any]:
        return {"message": message, "error": code, "code": POLICY_VIOLATION}

    async def _send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises SlowReader when the client reads nothing for `stall_seconds`."""
        require_connected(self._socket)
        async with write_timeout(self._state.config.limits.stall_seconds):
            await self._socket.send_text(json.dumps(message))

    async def _fail(self, error: BaseException) -> None:
        logger.info("%s: %s", self._id, error)
        if isinstance(error, SlowReader):
            await close_connection(self._socket.scope, immediately=True)  # the client would not read the error either
        else:
            await self._close(POLICY_VIOLATION, self._error(str(error), error_code(error)))

    async def _close(self, code: int, last: dict[str, Any] | None) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if last is not None:
                    await self._socket.send_text(json.dumps(last))
                await self._socket.close(code)


class DialogueSocket(ElevenLabsSocket):
    """One connection of the dialogue socket. The first message of a context names its voice."""

    final, normalized, context_id = "is_final", "normalized_alignment", "context_id"
    times = ("char_start_times_ms", "char_durations_ms")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._voices: dict[str, str | None] = {}  # voices of the contexts that are open or announced

    def _alignment_begin(self, name: str) -> float:
        """Return the seconds of audio sent before this message: its alignment is relative to its own audio."""
        return self._open_contexts[name].audio_seconds()

    async def _parse(self, message: str) -> StreamMessage:
        """Parse a message and note its context's voice. Raises VoiceNotFound, InvalidRequest for too many contexts."""
        parsed = await parse_body(message.encode(), partial(parse_dialogue_message, message))
        voice, name = parsed.voice(), parsed.context_id or ONLY
        if voice is not None and name not in self._voices:
            if len(self._voices) >= 2 * MAX_CONTEXTS:
                raise InvalidRequest(f"{2 * MAX_CONTEXTS} contexts are announced: speak in them or close them first")
            self._voices[name] = await _checked_voice(self._state, voice)
        return parsed.as_stream_message()

    async def _close_context(self, contexts: LiveContexts, name: str) -> None:
        if contexts.get(name) is None and name in self._voices:  # announced, and closed without a text
            await self._finish_context(contexts, name, None)
        else:
            await super()._close_context(contexts, name)

    def _voice_of(self, name: str) -> str | None:
        return self._voices.get(name)

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._voices.pop(name, None)
