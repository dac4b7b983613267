"""Wyoming server: the protocol of Home Assistant's voice assistants, JSON lines and binary payloads over TCP.

A client sends `describe` and gets `info` with the voices. It sends `synthesize` with a text, or `synthesize-start`, any
number of `synthesize-chunk` and `synthesize-stop`, and gets `audio-start`, `audio-chunk` and `audio-stop`. The protocol
has no keys: all requests count against one key of the name `wyoming`, with the default limits.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import uuid
from dataclasses import dataclass, field
from typing import Any

from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_write_event
from wyoming.info import Attribution, Describe, Info, TtsProgram, TtsVoice
from wyoming.ping import Ping, Pong
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped

from shoal import __version__
from shoal.api.bodies.parsing import parse_json
from shoal.api.exceptions import BodyTimeout, ServerFull, SlowReader, error_code
from shoal.api.keys import Key
from shoal.api.live.events import TextBuffer
from shoal.api.live.session import LiveContext, LiveContexts
from shoal.api.output import OutputOptions
from shoal.api.requests import SpeechJob, fallback_voices
from shoal.api.state import ServerState
from shoal.api.voices.known import known_voices
from shoal.errors import InternalError, InvalidRequest, ShoalError
from shoal.server.connection_errors import connection_errors
from shoal.server.streaming_response import write_timeout
from shoal.speech import Sampling, SpeechRequest, Word

logger = logging.getLogger(__name__)

API = "wyoming"
MAX_HEADER_BYTES = 64 << 10  # one JSON line
MAX_DATA_BYTES = 256 << 10  # JSON after the line
MAX_PAYLOAD_BYTES = 1 << 20  # audio, which a text-to-speech server does not expect; read and dropped
CHUNK_BYTES = 4_096  # 2,048 samples of 16 bits, about the size of Home Assistant's own chunks
SENTENCE_CHARACTERS = 20  # a shorter sentence of streamed text waits for the next one
UTTERANCE = "utterance"  # name of a connection's only context
ATTRIBUTION = Attribution("Shoal", "")


class WyomingServer:
    """Accepts Wyoming clients on a listening socket, at most `limits.connections` at a time."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._connected, sock=listener, limit=MAX_HEADER_BYTES)
        logger.info("wyoming: listening on %s port %d", *listener.getsockname()[:2])

    async def close(self) -> None:
        """Stop accepting and close the open connections. Call it after requests in flight have been drained."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = WyomingConnection(self._state, reader, writer)
        full = len(self._open) >= self._state.config.limits.connections
        self._open.add(task)
        try:
            await (connection.reject() if full else connection.run())
        except asyncio.CancelledError:
            pass  # the server is shutting down
        finally:
            self._open.discard(task)
            writer.close()


@dataclass(slots=True)
class AudioOutput:
    """Sends the audio of one utterance: `audio-start` before the first samples, `audio-stop` at the end."""

    connection: "WyomingConnection"
    rate: int  # Hz
    streamed: bool  # the text came in pieces: the client also waits for `synthesize-stopped`
    started: bool = False

    async def send(self, audio: bytes, _: tuple[Word, ...] = ()) -> None:
        if not self.started:
            self.started = True
            await self.connection.write(AudioStart(self.rate, 2, 1))
        for start in range(0, len(audio), CHUNK_BYTES):
            await self.connection.write(AudioChunk(self.rate, 2, 1, audio[start : start + CHUNK_BYTES]))

    async def finish(self) -> None:
        await self.send(b"")
        await self.connection.write(AudioStop())
        if self.streamed:
            await self.connection.write(SynthesizeStopped())


@dataclass(slots=True)
class WyomingConnection:
    """One connection: any number of texts, one after the other."""

    state: ServerState
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def reject(self) -> None:
        limit = self.state.config.limits.connections
        await self._fail(ServerFull(f"the limit of {limit} connections is reached; try again later"))

    async def run(self) -> None:
        """Handle events until the client disconnects or an error ends the connection."""
        async with (
            connection_errors(self.id, (OSError, EOFError), self._fail, self._fail_internally),
            asyncio.TaskGroup() as group,
        ):
            contexts = LiveContexts(group, self.state, limit=1)
            while True:
                await self._handle(contexts, await self._read(contexts))

    async def write(self, message: Eventable) -> None:
        """Send an event.

        Raises SlowReader when the client reads nothing for `stall_seconds`, ConnectionResetError after a disconnect.
        """
        if self.writer.is_closing():
            raise ConnectionResetError  # uvloop would raise RuntimeError
        async with write_timeout(self.state.config.limits.stall_seconds):
            await async_write_event(message.event(), self.writer)

    async def _read(self, contexts: LiveContexts) -> Event:
        """Return the next event without its payload. Raises EOFError, or InvalidRequest for data that is not an event.

        The package's own reader accepts data and payloads of any size.
        """
        try:
            async with contexts.idle.limit():
                line = await self.reader.readline()
        except ValueError:
            raise InvalidRequest(f"the first line of an event has more than {MAX_HEADER_BYTES:,} bytes") from None
        if not line.endswith(b"\n"):
            raise EOFError
        header = _json_object(line)
        data = await self._read_bytes(_length(header, "data_length", MAX_DATA_BYTES))
        await self._read_bytes(_length(header, "payload_length", MAX_PAYLOAD_BYTES))
        content = header.get("data") or {}
        if not isinstance(header.get("type"), str) or not isinstance(content, dict):
            raise InvalidRequest("an event is a JSON object with a `type` and, if any, an object under `data`")
        return Event(header["type"], content | (_json_object(data) if data else {}))

    async def _read_bytes(self, size: int) -> bytes:
        seconds = self.state.config.limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self.reader.readexactly(size)
        except TimeoutError:
            raise BodyTimeout(f"an event did not arrive within {seconds:g} seconds") from None

    async def _handle(self, contexts: LiveContexts, event: Event) -> None:
        """Handle one event. Unknown events are dropped, as the protocol requires."""
        context, kind = contexts.get(UTTERANCE), event.type
        if Describe.is_type(kind):
            await self.write(await self._info())
        elif Ping.is_type(kind):
            await self.write(Pong(_text(event.data, "text", required=False)))
        elif Synthesize.is_type(kind) and context is None:
            self._open(contexts, event, streamed=False).end()
        elif SynthesizeStart.is_type(kind):
            self._open(contexts, event, streamed=True)
        elif SynthesizeChunk.is_type(kind) and context is not None:
            context.add(_text(event.data, "text") or "")
        elif SynthesizeStop.is_type(kind) and context is not None:
            context.end()

    def _open(self, contexts: LiveContexts, event: Event, *, streamed: bool) -> LiveContext:
        """Start speaking, with the text of a `synthesize` event. Raises RateLimited, InvalidRequest or EngineBusy."""
        state, key = self.state, Key(API, "", limits=self.state.config.key_limits)
        state.key_usage.count_request(key)
        engine = state.lifecycle.require_engine()
        rate, voice = engine.service.sample_rate, _voice(event.data)
        request = SpeechRequest(
            "",
            voice=voice,
            fallback_voices=fallback_voices(voice, engine),
            sampling=Sampling(seed=secrets.randbits(63)),
            timeout=state.config.limits.request_seconds,
        )
        job = SpeechJob(API, request, OutputOptions("pcm", rate), engine, key, self.id)
        output = AudioOutput(self, rate, streamed)

        async def on_end(_: LiveContext, error: ShoalError | None) -> None:
            if error is not None:
                raise error
            await output.finish()

        context = contexts.open(UTTERANCE, job, TextBuffer(SENTENCE_CHARACTERS, None), output.send, on_end)
        context.add("" if streamed else _text(event.data, "text") or "")
        return context

    async def _info(self) -> Info:
        engine = self.state.lifecycle.require_engine()
        languages = list(self.state.config.wyoming_languages)
        known = await asyncio.to_thread(known_voices, engine)
        voices = [TtsVoice(voice.name, ATTRIBUTION, True, voice.label, __version__, languages) for voice in known]
        model = self.state.config.model
        program = TtsProgram("shoal", ATTRIBUTION, True, f"Shoal with {model}", __version__, voices, True)
        return Info(tts=[program])

    async def _fail_internally(self) -> None:
        await self._fail(InternalError())

    async def _fail(self, error: BaseException) -> None:
        """Send the error and close: after an error the client does not know the state of the connection."""
        logger.info("%s: %s", self.id, error)
        if isinstance(error, SlowReader):
            self.writer.transport.abort()
            return
        with contextlib.suppress(OSError, ShoalError):
            await self.write(Error(str(error), error_code(error)))


def _json_object(content: bytes) -> dict[str, Any]:
    parsed = parse_json(content)
    if not isinstance(parsed, dict):
        raise InvalidRequest("an event is a JSON object")
    return parsed


def _length(header: dict[str, Any], name: str, maximum: int) -> int:
    length = header.get(name) or 0
    if not isinstance(length, int) or not 0 <= length <= maximum:
        raise InvalidRequest(f"`{name}` must be a whole number up to {maximum:,} bytes")
    return length


def _voice(data: dict[str, Any]) -> str | None:
    """Return the name of the voice that an event asks for, or None for the model's default."""
    voice = data.get("voice") or {}
    if not isinstance(voice, dict):
        raise InvalidRequest("`voice` must be an object with the name of a voice")
    return _text(voice, "name", required=False) or None


def _text(data: dict[str, Any], name: str, *, required: bool = True) -> str | None:
    value = data.get(name)
    if not isinstance(value, str | None) or (required and value is None):
        raise InvalidRequest(f"`{name}` must be a text")
    return value
