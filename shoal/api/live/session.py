"""Live speech on a socket: contexts that receive text in pieces and return audio, several per socket.

A context is one stream of audio with one header and one encoder. Its sentences are spoken one after the other; each is
its own request to the engine, so a context without text holds no slot, and each continues the sentences before it
within the model's context limit. While a context has text to speak it holds a place in the admission queue. Cancelling
a context releases its slot at the engine's next step and does not affect the other contexts of the socket.

This module does not depend on a wire format: a route parses events, calls the methods below and sends the audio.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from shoal.api.accounting import RequestAccounting, expected_seconds
from shoal.api.admission import BodyReservation
from shoal.api.exceptions import IdleTimeout, Interrupted, NotReady
from shoal.api.live.events import TextBuffer, TextPiece
from shoal.api.output import OutputEncoder
from shoal.api.requests import SpeechJob
from shoal.api.speech_stream import chunks_before
from shoal.api.state import ServerState
from shoal.api.word_events import WordScale
from shoal.errors import InvalidRequest, NothingToSpeak, ShoalError, TextError
from shoal.speech import AudioChunk, SpeechRequest, SpokenTurn, Word

# Audio of a text without words, such as an emoji. Agent frameworks take a reply without audio for a failure of the
# service: LiveKit repeats it and then closes its session, Pipecat gives the service up after three.
SILENCE_SECONDS = 0.2

# Receives encoded audio and the words that have ended in it; times and positions count from the start of the context.
SendAudio = Callable[[bytes, tuple[Word, ...]], Awaitable[None]]


@dataclass(slots=True)
class Spoken:
    """Progress of a context. Characters count the text as it was received."""

    characters: int = 0  # characters whose audio was sent completely
    audio_seconds: float = 0.0  # duration of all audio sent, the interrupted sentence included
    interrupted_characters: int = 0  # characters of the sentence that was cut off
    interrupted_seconds: float = 0.0  # duration of the part of its audio that was sent

    def begin(self, piece: TextPiece) -> None:
        self.interrupted_characters = piece.end - self.characters

    def add(self, seconds: float) -> None:
        self.audio_seconds += seconds
        self.interrupted_seconds += seconds

    def end(self, piece: TextPiece) -> None:
        self.characters, self.interrupted_characters, self.interrupted_seconds = piece.end, 0, 0.0


class IdleTimer:
    """Measures how long no context of a socket has had text to speak."""

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds, self._busy = idle_seconds, 0
        self._timer: asyncio.Timeout | None = None

    def begin(self) -> None:
        self._busy += 1

    def end(self) -> None:
        self._busy -= 1
        self._restart()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raise IdleTimeout when the socket has been idle for too long."""
        # Yield to the event loop: receiving a message that has already arrived does not suspend the task, so thousands
        # of small messages would block all other clients.
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(None) as self._timer:
                self._restart()
                yield
        except TimeoutError:
            raise IdleTimeout(f"no message arrived for {self._idle_seconds:g} seconds") from None
        finally:
            self._timer = None

    def _restart(self) -> None:
        if self._timer is not None and not self._busy:
            self._timer.reschedule(asyncio.get_running_loop().time() + self._idle_seconds)


class TextMark(Enum):
    """Markers in the queue of text pieces: the client has flushed, or no more text follows."""

    FLUSHED = "flushed"  # after text; a flush without text before it has no effect
    ENDED = "ended"


class LiveContext:
    """One stream of text and audio. `run` speaks; the other methods do not block and may be called meanwhile."""

    def __init__(
        self,
        state: ServerState,
        job: SpeechJob,
        buffer: TextBuffer,
        send: SendAudio,
        idle: IdleTimer,
        reservation: BodyReservation | None = None,
    ) -> None:
        """`job` holds everything but the text. `reservation` is the memory of its recordings, released at the end."""
        self._state, self._job, self._buffer, self._send, self._idle = state, job, buffer, send, idle
        self._reservation = reservation
        self._encoder = OutputEncoder(job.output, job.engine.service.sample_rate, stream=True)
        # NotReady: text arrived during shutdown; raised once earlier text is spoken.
        self._pieces: asyncio.Queue[TextPiece | TextMark | NotReady] = asyncio.Queue()
        self._turns: tuple[SpokenTurn, ...] = ()
        self._busy_since: float | None = None
        self._text_since_flush = False
        self.ending = False  # no more text is accepted
        self.cancelled = False
        self.spoken = Spoken()

    def add(self, text: str) -> None:
        """Buffer text and speak its whole sentences. Raises TextError when too much text waits, or EngineBusy."""
        self._check_open()
        limit = self._state.config.limits.text_characters
        if self._buffer.received + len(text) - self.spoken.characters > limit:
            raise TextError(f"more than {limit:,} characters wait to be spoken: send the text more slowly")
        try:
            self._state.lifecycle.require_engine()  # no new text during shutdown
        except NotReady as refused:
            self.ending = True
            self._pieces.put_nowait(refused)
        else:
            self._text_since_flush = self._text_since_flush or bool(text.strip())
            self._enqueue(self._buffer.add(text))

    def flush(self) -> None:
        """Speak the buffered text now. Raises EngineBusy when the queue is full."""
        self._check_open()
        self._enqueue(self._buffer.flush())
        if self._text_since_flush:
            self._text_since_flush = False
            self._pieces.put_nowait(TextMark.FLUSHED)

    def end(self) -> None:
        """Speak the buffered text and end; `run` then returns. Idempotent."""
        if not self.ending:
            self.flush()
            self.ending = True
            self._pieces.put_nowait(TextMark.ENDED)

    async def run(self) -> None:
        """Speak until `end` was called and all text is spoken. Raises ShoalError. Cancelling stops at the next step."""
        number, flushed_seconds = 0, 0.0
        try:
            while (piece := await self._next_piece()) is not TextMark.ENDED:
                if isinstance(piece, TextPiece):
                    await self._speak(piece, number)
                    number += 1
                    continue
                if self.spoken.audio_seconds == flushed_seconds:
                    await self._send_silence()
                await self._send(await self._state.encode(self._encoder, self._encoder.drain), ())
                flushed_seconds = self.spoken.audio_seconds
            if self.spoken.audio_seconds:
                await self._send(await self._state.encode(self._encoder, self._encoder.finish), ())
        finally:
            self.close()

    def close(self) -> None:
        """Release the place in the queue and the memory of the recordings. Idempotent."""
        self._leave_queue()
        if self._reservation is not None:
            self._reservation.release()

    def _check_open(self) -> None:
        if self.ending:
            raise InvalidRequest("this session is ending: wait until it has finished before you send more text")

    def _enqueue(self, pieces: list[TextPiece]) -> None:
        for piece in pieces:
            self._enter_queue()
            self._pieces.put_nowait(piece)

    def _enter_queue(self) -> None:
        """Take a place in the admission queue unless one is held. Raises EngineBusy when it is full."""
        if self._busy_since is None:
            self._state.enter_queue(self._job.key)
            self._busy_since = asyncio.get_running_loop().time()
            self._idle.begin()

    def _leave_queue(self) -> None:
        """Release the place in the admission queue. Idempotent."""
        if self._busy_since is not None:
            self._state.leave_queue(self._job.key, asyncio.get_running_loop().time() - self._busy_since)
            self._busy_since = None
            self._idle.end()

    async def _next_piece(self) -> TextPiece | TextMark:
        """Return the next piece or mark. Raises NotReady in place of a rejected text."""
        if self._pieces.empty():
            self._leave_queue()
        piece = await self._pieces.get()
        if isinstance(piece, NotReady):
            raise piece
        return piece

    async def _speak(self, piece: TextPiece, number: int) -> None:
        self.spoken.begin(piece)
        scale = WordScale(self._job.output.speed, self.spoken.audio_seconds, piece.end - len(piece.text))
        # A piece may be markup without a word, such as the first line of a code block: the text goes on after it.
        with suppress(NothingToSpeak):
            # aclosing: a disconnect while audio is sent must cancel the request now, not at garbage collection.
            async with aclosing(self._audio(self._request(piece.text, number))) as pieces:
                async for audio, chunk in pieces:
                    await self._send(audio, scale.apply(chunk.words))
                    self.spoken.add(chunk.seconds)
        self.spoken.end(piece)

    async def _send_silence(self) -> None:
        """Send the audio of a text without words."""
        rate = self._job.engine.service.sample_rate
        silence = np.zeros(round(SILENCE_SECONDS * rate), np.float32)
        await self._send(await self._state.encode(self._encoder, self._encoder.feed, silence), ())
        self.spoken.audio_seconds += SILENCE_SECONDS

    def _request(self, text: str, number: int) -> SpeechRequest:
        request = self._job.request
        sampling = request.sampling
        assert sampling is not None
        assert sampling.seed is not None  # set by sampling_for
        context = self._turns if request.carry_turns else None
        return replace(request, text=text, sampling=replace(sampling, seed=sampling.seed + number), context=context)

    async def _audio(self, request: SpeechRequest) -> AsyncGenerator[tuple[bytes, AudioChunk], None]:
        """Yield the encoded audio of one sentence, each piece with its chunk, and keep its turns as context."""
        job = self._job
        request = replace(request, client=job.key.name)
        expected = expected_seconds(request, job.engine.frame_rate)
        with RequestAccounting(
            self._state, job.api, job.key, job.id, queued=True, expected_seconds=expected
        ) as accounting:
            try:
                deadline = request.deadline_from(accounting.started)
                # Not `require_engine`, which raises during shutdown: accepted text is still spoken.
                chunks = job.engine.service.speak(request, deadline)
                async with aclosing(chunks_before(deadline, chunks)) as received:
                    async for chunk in received:
                        accounting.record_audio(chunk)
                        self._turns = self._turns if chunk.context is None else chunk.context
                        yield await self._state.encode(self._encoder, self._encoder.feed, chunk.samples), chunk
            finally:
                if self.cancelled:
                    accounting.finish(Interrupted())


# Called in the context's task when it has ended; the error is None after `end`. Not called for a cancelled context.
OnEnd = Callable[[LiveContext, ShoalError | None], Awaitable[None]]


class LiveContexts:
    """The open contexts of one socket by name, each spoken by a task of `group`.

    An exception that an `OnEnd` callback raises ends the group, and with it the socket.
    """

    def __init__(self, group: asyncio.TaskGroup, state: ServerState, *, limit: int) -> None:
        self._group, self._state, self._limit = group, state, limit
        self._open: dict[str, tuple[LiveContext, asyncio.Task[None]]] = {}
        self.idle = IdleTimer(state.config.limits.live_idle_seconds)

    def __len__(self) -> int:
        return len(self._open)

    def names(self) -> list[str]:
        return list(self._open)

    def get(self, name: str) -> LiveContext | None:
        return self._open[name][0] if name in self._open else None

    def open(
        self,
        name: str,
        job: SpeechJob,
        buffer: TextBuffer,
        send: SendAudio,
        on_end: OnEnd,
        reservation: BodyReservation | None = None,
    ) -> LiveContext:
        """Start a context. Raises InvalidRequest if the name is in use or too many contexts are open.

        Ownership of `reservation` passes to the context, whose texts all use the recordings of `job`.
        """
        if name in self._open:
            raise InvalidRequest(f"the context {name[:64]!r} is open already: end or cancel it first")
        if len(self._open) >= self._limit:
            raise InvalidRequest(f"{self._limit} contexts are open, which is the limit: end or cancel one first")
        held = None if reservation is None else reservation.transfer()
        context = LiveContext(self._state, job, buffer, send, self.idle, held)
        task = self._group.create_task(self._run(name, context, on_end))
        # `run` releases the context in `finally`, which a task that is cancelled before its first step never reaches.
        task.add_done_callback(lambda _: context.close())
        self._open[name] = context, task
        return context

    async def cancel(self, name: str) -> Spoken | None:
        """Stop a context and return how much of it was spoken; None if no context has this name."""
        if name not in self._open:
            return None
        context, task = self._open.pop(name)
        context.cancelled = True
        task.cancel()
        await asyncio.wait([task])
        return context.spoken

    async def _run(self, name: str, context: LiveContext, on_end: OnEnd) -> None:
        error: ShoalError | None = None
        try:
            await context.run()
        except ShoalError as problem:
            error = problem
        self._open.pop(name, None)
        await on_end(context, error)
