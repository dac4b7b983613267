"""Run one speech job: a task generates and encodes the audio into a buffer, from which the response reads.

Generation never waits for the network, so a slow client holds no slot. Closing the stream, for example because the
client disconnected, cancels the task, and with it the request at the engine's next step.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace

from shoal.api.accounting import RequestAccounting, expected_seconds
from shoal.api.config import SlowReaderPolicy
from shoal.api.engine_client import AudioStream
from shoal.api.exceptions import ClientDisconnected, SlowReader
from shoal.api.output import OutputEncoder
from shoal.api.requests import SpeechJob
from shoal.api.state import ServerState
from shoal.api.word_events import WordScale
from shoal.engine.process.replies import ReplyStream
from shoal.errors import DeadlineExceeded, ShoalError
from shoal.speech import AudioChunk, Samples, Word

logger = logging.getLogger(__name__)

# The engine enforces deadlines itself; this is the extra time for an engine that does not answer.
GRACE_SECONDS = 2.0


class ByteBuffer:
    """Bounded buffer between one writer and one reader. When `max_bytes` wait, `policy` fails or pauses the writer."""

    def __init__(self, max_bytes: int, policy: SlowReaderPolicy) -> None:
        self._max_bytes, self._policy = max_bytes, policy
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()

    async def put(self, piece: bytes) -> None:
        """Append a piece. When the buffer is full, `pause` waits for room and `end` raises SlowReader."""
        while self._size and self._size + len(piece) > self._max_bytes:
            if self._policy == "end":
                raise SlowReader(f"the client reads too slowly: {self._size:,} bytes are waiting")
            await self._change()
        if piece:
            self._pieces.append(piece)
            self._size += len(piece)
            self._changed.set()

    def close(self, error: BaseException | None = None) -> None:
        """End the stream, with `error` if it failed. Only the first call has an effect."""
        if not self._closed:
            self._closed, self._error = True, error
            self._changed.set()

    async def wait_for_data(self) -> None:
        """Wait for the first piece. Raises the error of the stream if that comes first."""
        while not self._pieces and not self._closed:
            await self._change()
        if not self._pieces and self._error is not None:
            raise self._error

    async def read(self) -> AsyncIterator[bytes]:
        """Yield all pieces, then raise the error of the stream if there is one."""
        while self._pieces or not self._closed:
            if not self._pieces:
                await self._change()
                continue
            piece = self._pieces.popleft()
            self._size -= len(piece)
            self._changed.set()
            yield piece
        if self._error is not None:
            raise self._error

    async def _change(self) -> None:
        # With one writer and one reader, at most one of them waits, so clearing here loses no wake-up.
        self._changed.clear()
        await self._changed.wait()


class SpeechStream:
    """One job in flight, which starts immediately: a Supervisor has the request before the constructor returns.

    Raises what RequestAccounting raises when it is not admitted, and what the engine raises when it refuses the job.
    """

    def __init__(self, state: ServerState, job: SpeechJob) -> None:
        limits = state.config.limits
        self._state, self._job = state, job
        expected = expected_seconds(job.request, job.engine.frame_rate)
        self.accounting = RequestAccounting(state, job.api, job.key, job.id, expected_seconds=expected)
        self._deadline = job.request.deadline_from(self.accounting.started)
        self._chunks = self._submit()
        self._recorder = state.kept_speech.record(job.key.name, job.id, job.request.text)
        self.buffer = ByteBuffer(limits.buffer_bytes, limits.slow_reader)
        self._encoding_seconds = state.metrics.encoding_seconds.labels(job.output.format)
        self._words: list[Word] = []  # words that have not been taken
        self._scale = WordScale(job.output.speed, characters=-job.prefix)
        self._task = asyncio.create_task(self._generate())
        self._task.add_done_callback(self._finish)
        self._watch: asyncio.Task[None] | None = None

    def close_on_disconnect(self, wait_for_disconnect: Callable[[], Awaitable[None]]) -> None:
        """Close the stream when `wait_for_disconnect` returns."""
        self._watch = asyncio.create_task(self._close_after(wait_for_disconnect))

    def on_generated(self, callback: Callable[[], None]) -> None:
        """Call `callback` when generation has ended; the client may still be reading."""
        self._task.add_done_callback(lambda _: callback())

    def take_words(self) -> tuple[Word, ...]:
        """Return the words that have ended since the last call. Words are available before their audio."""
        words, self._words = tuple(self._words), []
        return words

    async def read_all(self) -> bytes:
        return b"".join([piece async for piece in self.buffer.read()])

    def close(self) -> None:
        """Cancel generation if it is still running, and stop watching the connection."""
        self._cancel_request()
        self._task.cancel()
        self.accounting.finish(asyncio.CancelledError())
        self.buffer.close(ClientDisconnected())
        if self._watch is not None:
            self._watch.cancel()

    async def _close_after(self, wait_for_disconnect: Callable[[], Awaitable[None]]) -> None:
        await wait_for_disconnect()
        self._watch = None
        self.close()

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Account for the ended task and pass its error to the reader of the buffer."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ShoalError | asyncio.CancelledError):
            logger.error("%s: internal error", self._job.id, exc_info=error)
        self._cancel_request()
        # Reading may take long; release the recordings now.
        self._job = replace(self._job, request=replace(self._job.request, recordings=()))
        self._recorder.discard()
        self.accounting.finish(error)
        self.buffer.close(error)

    def _cancel_request(self) -> None:
        """Cancel a submitted request that has not ended, before its admission slot is released.

        The task cancels it as well, but only at its next step, and never if it had not started.
        """
        if isinstance(self._chunks, ReplyStream):
            self._chunks.cancel()

    def _submit(self) -> AudioStream:
        with ExitStack() as on_error:
            on_error.push(self.accounting)
            request = replace(self._job.request, client=self._job.key.name)
            chunks = self._job.engine.service.speak(request, self._deadline)
            on_error.pop_all()
        return chunks

    async def _generate(self) -> None:
        async with aclosing(chunks_before(self._deadline, self._chunks)) as chunks:
            encoder = OutputEncoder(self._job.output, self._job.engine.service.sample_rate, stream=self._job.stream)
            async for chunk in chunks:
                self.accounting.record_audio(chunk)
                self._recorder.add(chunk)
                self._words += self._scale.apply(chunk.words)
                await self.buffer.put(await self._encode(encoder, encoder.feed, chunk.samples))
        self._recorder.finish()
        await self.buffer.put(await self._encode(encoder, encoder.finish))

    async def _encode(self, encoder: OutputEncoder, work: Callable[..., bytes], *args: Samples) -> bytes:
        started = time.perf_counter()
        piece = await self._state.encode(encoder, work, *args)
        self._encoding_seconds.inc(time.perf_counter() - started)
        return piece


async def chunks_before(deadline: float | None, chunks: AudioStream) -> AsyncGenerator[AudioChunk, None]:
    """Yield chunks, and close their stream at the end. Raises DeadlineExceeded when the engine does not answer in time.

    `deadline` is absolute, in `time.monotonic()` seconds.
    """
    async with aclosing(chunks):
        while True:
            try:
                # Relative, because the event loop may have another clock.
                remaining = None if deadline is None else deadline + GRACE_SECONDS - time.monotonic()
                async with asyncio.timeout(remaining):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded("the engine did not answer in time") from None
            yield chunk
