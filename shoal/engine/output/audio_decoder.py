"""Incremental codec decoding: chooses the frames to decode and decodes those of all utterances in one call.

A call is collected in the step that submits it, or with `overlap` in the next one: a GPU then decodes concurrently with
the model, and the host waits for neither.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shoal.codec.arrays import CodecArrays
from shoal.codec.config import MAX_POSITIONS
from shoal.engine.execution.retry import RetryTimer
from shoal.engine.output.chunks import chunk_frames
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed, describe_error, device_errors
from shoal.native.choice import open_context
from shoal.native.codec import NativeDecoder
from shoal.native.library import Context, NativeUnavailable
from shoal.speech import Samples

if TYPE_CHECKING:  # `shoal say` decodes with the native backend without importing torch
    from typing_extensions import TypeIs

    from shoal.codec.dac import Codec
    from shoal.codec.graph_decoder import GraphDecoder
    from shoal.codec.streaming import StreamingDecoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The next `frames` frames of an utterance to decode, all of one `turn`; `ended` if no more will follow."""

    utterance: Utterance
    frames: int
    ended: bool
    turn: int = 0
    turn_ended: bool = False


TOO_LONG = f"the speech has more than {MAX_POSITIONS:,} frames; split the text into several requests"
CodecBackend = Literal["graph", "plain-graph", "native", "eager"]
Fetch = Callable[[], list[Samples]]
DecodeResult = Samples | GenerationFailed


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A codec call in flight. `fetch` waits for the samples of `intact`; the other chunks have `results` already."""

    chunks: list[PlannedChunk]
    results: dict[int, DecodeResult]
    intact: list[PlannedChunk]
    fetch: Fetch


AnyDecoder: TypeAlias = "GraphDecoder[Any, Any] | NativeDecoder | StreamingDecoder"


def uses_graphs(decoder: AnyDecoder) -> "TypeIs[GraphDecoder[Any, Any]]":
    """Return whether calls of a decoder have fixed sizes and run asynchronously."""
    return decoder.backend in ("graph", "plain-graph")


class AudioDecoder:
    """Streaming decoder state of every slot. Slot numbers are those of the sequences."""

    def __init__(
        self,
        codec: "Codec | CodecArrays",
        slots: int,
        *,
        first_frames: int,
        max_frames: int,
        clock: Callable[[], float] = time.monotonic,
        backends: Sequence[CodecBackend] = ("eager",),
        overlap: bool = False,
        native: Callable[[], Context] = lambda: open_context("auto", 1),
    ) -> None:
        """Decode with the first of `backends` that works; `graph` runs in half precision.

        The last one has no fallback: eager, or native for a codec of arrays, which has no other backend.
        `native` returns the library context of the native backend.
        """
        self.codec = codec
        self.clock = clock
        self.seconds = 0.0  # host time spent launching calls and waiting for them
        self.failures = 0  # consecutive utterances that could not be decoded even alone
        self.reasons: dict[CodecBackend, str] = {}  # why a backend is not used
        self.first_frames = first_frames  # frames of the first chunk, unless a request asks for another number
        self._slots, self._max_frames, self._overlap = slots, max_frames, overlap
        self._backends, self._retry, self._native = backends, RetryTimer(clock), native
        self._built: dict[CodecBackend, AnyDecoder] = {}
        self._worked = False  # whether a call succeeded since a size was left out
        self._decoder = self._build(backends)
        # Whether calls are collected in the next step. Only graphs run asynchronously.
        self.overlap = overlap and uses_graphs(self._decoder)
        self._lost: set[int] = set()  # slots whose state was lost with a decoder that failed
        self._stale: set[int] = set()  # released slots that still hold the state of their last utterance
        self._call: DecodeCall | None = None  # submitted, not collected

    @property
    def backend(self) -> CodecBackend:
        return self._decoder.backend

    @property
    def exact_chunks(self) -> bool:
        """Return whether samples on a GPU have the same bits in chunks of any size; eager and plain-graph do not.

        False for the native backend, which is exact as well: its speed is not measured, so nothing depends on this.
        """
        return self.backend == "graph"

    @property
    def dropped(self) -> list[str]:
        """Return size and reason of the sizes that the current decoder leaves out."""
        return self._decoder.dropped if uses_graphs(self._decoder) else []

    def next_chunk(self, utterance: Utterance, *, ended: bool, pausing: bool = False) -> PlannedChunk | None:
        """Return the chunk of an utterance to decode now, or None until enough frames have gathered.

        All frames are decoded at the end, and when `pausing`, because the next frame has to wait for a prefill. The
        first frames of a turn are held back as long as they may have to be generated again. When generation is ahead of
        playback, chunks are larger, which cost less to decode.
        """
        if ended:
            return PlannedChunk(utterance, utterance.backlog, ended=True)
        if not pausing and utterance.turn_frames < utterance.hold_frames:
            return None
        required = 1 if pausing else self._chunk_frames(utterance)
        if utterance.backlog < required:
            return None
        # The first chunk stays small even if more frames were held back: those are the second chunk.
        frames = utterance.backlog if utterance.decoded or pausing else required
        return PlannedChunk(utterance, frames, ended=False)

    def submit(self, chunks: list[PlannedChunk]) -> None:
        """Start decoding these chunks. Requires that the last call was collected."""
        assert self._call is None, "a call is in flight"
        started = time.perf_counter()
        filled = [each for each in chunks if each.frames]
        if self._retry.due():
            self._upgrade()
        if filled:
            self._reset_stale()
        lost = [each for each in filled if each.utterance.sequence.slot in self._lost]
        results = {each.utterance.id: self._redecode(each) for each in lost}
        results |= {each.utterance.id: GenerationFailed(TOO_LONG) for each in filled if not self._fits(each)}
        intact = [each for each in filled if each.utterance.id not in results]
        try:
            fetch = self._start(intact)
        except self._retryable as error:
            results |= self._rescue(intact, error)
            intact, fetch = [], list
        self._call = DecodeCall(chunks, results, intact, fetch)
        self.seconds += time.perf_counter() - started

    def collect(self) -> list[tuple[PlannedChunk, DecodeResult]]:
        """Wait for the submitted chunks and return their samples, or the error of an utterance that cannot be decoded.

        Chunks of utterances that were released in the meantime are left out.
        """
        if self._call is None:
            return []
        started = time.perf_counter()
        call, self._call = self._call, None
        results = call.results | self._finish(call)
        self.seconds += time.perf_counter() - started
        empty = np.zeros(0, np.float32)
        return [(each, results.get(each.utterance.id, empty)) for each in call.chunks if _present(each)]

    def run_largest_batch(self) -> None:
        """Decode the largest possible call, the longest chunk in every slot, for memory profiling. State is reset."""
        slots = list(range(self._slots))
        codes = np.zeros((len(slots), self.codec.config.num_codebooks, self._max_frames), np.int64)
        self._run(codes, slots)()
        self._decoder.reset(slots)

    def clear(self, slot: int) -> None:
        """Mark a slot as released: its next frame belongs to another utterance."""
        self._lost.discard(slot)
        self._stale.add(slot)

    def _reset_stale(self) -> None:
        """Reset all released slots in one call, because a reset costs a launch."""
        if self._stale:
            self._decoder.reset(sorted(self._stale))
            self._stale.clear()

    def _finish(self, call: DecodeCall) -> dict[int, DecodeResult]:
        """Wait for a call and return its samples by utterance id."""
        try:
            rows = call.fetch()
        except self._retryable as error:
            return self._rescue([each for each in call.intact if _present(each)], error)
        self._worked = True
        if rows:
            self.failures = 0
        for each in call.intact:
            each.utterance.decoded += each.frames
        return {each.utterance.id: row for each, row in zip(call.intact, rows, strict=True)}

    def _fits(self, chunk: PlannedChunk) -> bool:
        """Return whether the stream stays within MAX_POSITIONS frames, the limit of graphs; others have none."""
        decoder = self._decoder
        return not uses_graphs(decoder) or decoder.can_extend(chunk.utterance.sequence.slot, chunk.frames)

    @property
    def _retryable(self) -> type[Exception]:
        """Errors after which decoding is retried: device errors of the eager decoder, any error of the others."""
        return RuntimeError if self.backend == "eager" else Exception

    def _rescue(self, chunks: list[PlannedChunk], error: Exception) -> dict[int, DecodeResult]:
        """Fall back after a failed call, and decode the chunks one by one."""
        logger.exception("codec call over %d utterances failed; decoding them one by one", len(chunks))
        self._downgrade(error)
        return {each.utterance.id: self._redecode(each) for each in chunks}

    def _build(self, backends: Sequence[CodecBackend]) -> AnyDecoder:
        """Return the decoder of the first backend that can be built."""
        for backend in backends[:-1]:
            with device_errors(partial(self._record_failed_build, backend)):
                return self._decoder_of(backend)
        return self._decoder_of(backends[-1])

    def _record_failed_build(self, backend: CodecBackend, error: Exception) -> None:
        self.reasons[backend] = describe_error(error)
        if isinstance(error, NativeUnavailable):
            logger.warning("the native codec is not available, using eager: %s", error)
        else:
            logger.info("codec backend %s cannot be built; trying the next one", backend, exc_info=error)

    def _decoder_of(self, backend: CodecBackend) -> AnyDecoder:
        if backend not in self._built:
            self._built[backend] = self._new_decoder(backend)
        return self._built[backend]

    def _new_decoder(self, backend: CodecBackend) -> AnyDecoder:
        if isinstance(self.codec, CodecArrays):
            return NativeDecoder(self.codec, self._slots, self._native())
        if backend == "native":
            from shoal.native.modules import codec_arrays

            return NativeDecoder(codec_arrays(self.codec), self._slots, self._native())
        from shoal.codec.decoders import build_decoder

        return build_decoder(backend, self.codec, self._slots)

    def _downgrade(self, error: Exception) -> None:
        """Leave out the size that failed, or switch to the next backend. The last decoder stays."""
        failed = self._decoder
        if failed.backend == self._backends[-1]:
            return
        self.reasons[failed.backend] = describe_error(error)
        if self._worked and uses_graphs(failed) and failed.drop_failed():
            self._worked = False
        else:
            following = self._backends[self._backends.index(failed.backend) + 1 :]
            self._switch(self._build([each for each in following if each == "eager" or each not in self.reasons]))
        seconds = self._retry.start()
        logger.warning("the codec runs on %s; trying again in %.0f s", self.backend, seconds)

    def _upgrade(self) -> None:
        """Return to the fastest decoder that could be built, with all its sizes."""
        self._retry.stop()
        backend = next(each for each in self._backends if each in self._built)
        decoder = self._built[backend]
        # A decoder that kept running has worked: if one of its sizes fails again, only that size is left out again.
        self._worked = self._worked and decoder is self._decoder
        self.reasons = {each: why for each, why in self.reasons.items() if each not in self._built}
        if uses_graphs(decoder):
            decoder.restore()
        if decoder is not self._decoder:
            logger.info("trying codec backend %s again", backend)
            self._switch(decoder)

    def _switch(self, decoder: AnyDecoder) -> None:
        """Use another decoder. The state of all slots is lost and recomputed with their next chunk."""
        self._lost |= {slot for slot, seen in enumerate(self._decoder._seen) if seen} - self._stale
        self._stale.clear()
        self._decoder = decoder
        self.overlap = self._overlap and uses_graphs(decoder)
        decoder.reset(list(range(self._slots)))

    def _chunk_frames(self, utterance: Utterance) -> int:
        """Return the frames an utterance needs before a chunk is decoded."""
        if utterance.whole:
            return self._max_frames
        lead = utterance.sent - (self.clock() - utterance.first_sent) * self.codec.config.frame_rate
        first = min(utterance.first_frames or self.first_frames, self._max_frames)
        return chunk_frames(utterance.sent, lead, first, self._max_frames)

    def _start(self, chunks: list[PlannedChunk]) -> Fetch:
        """Launch one call over all chunks."""
        if not chunks:
            return list
        codes = np.zeros((len(chunks), self.codec.config.num_codebooks, max(each.frames for each in chunks)), np.int64)
        for row, each in enumerate(chunks):
            begin = each.utterance.decoded
            codes[row, :, : each.frames] = np.stack(each.utterance.codes[begin : begin + each.frames], axis=1)
        return self._run(codes, [each.utterance.sequence.slot for each in chunks], [each.frames for each in chunks])

    def _redecode(self, chunk: PlannedChunk) -> DecodeResult:
        """Decode again from the first frame, after the state of a slot was lost or half written.

        Falls back to the next backend on an error, as long as there is one.
        """
        while True:
            try:
                return self._decode_from_start(chunk)
            except self._retryable as error:
                if not uses_graphs(self._decoder):
                    number = chunk.utterance.id
                    logger.exception("utterance %d: the codec failed", number, extra={"job": number})
                    self.failures += 1
                    failed = GenerationFailed("the codec failed on this request")
                    failed.__cause__ = error
                    return failed
                self._downgrade(error)

    def _decode_from_start(self, chunk: PlannedChunk) -> Samples:
        """Decode an utterance from its first frame; return the samples of the chunk."""
        utterance, slot = chunk.utterance, chunk.utterance.sequence.slot
        end = utterance.decoded + chunk.frames
        self._lost.discard(slot)
        self._decoder.reset([slot])
        codes = np.stack(utterance.codes[:end], axis=1)[None].astype(np.int64)
        pieces = [codes[..., i : i + self._max_frames] for i in range(0, end, self._max_frames)]
        samples = np.concatenate([self._run(piece, [slot])()[0] for piece in pieces])
        self.failures = 0
        utterance.decoded = end
        return samples[-chunk.frames * self.codec.config.frame_length :]

    def _run(self, codes: np.ndarray, slots: list[int], lengths: list[int] | None = None) -> Fetch:
        """Start decoding codes [n, codebooks, T]; only the first lengths[i] frames of row i are valid."""
        real = lengths or [codes.shape[-1]] * len(slots)
        decoder, uneven = self._decoder, real if len(set(real)) > 1 else None
        if uses_graphs(decoder):
            return decoder.launch(codes, slots, real).wait
        if isinstance(decoder, NativeDecoder):
            samples = decoder.decode(codes, slots, uneven)
        else:
            import torch

            samples = decoder.decode(torch.from_numpy(codes), slots, uneven).float().cpu().numpy()
        step = self.codec.config.frame_length
        return lambda: [row[: length * step] for row, length in zip(samples, real, strict=True)]


def _present(chunk: PlannedChunk) -> bool:
    """Return whether the utterance still has a slot; a cancelled utterance has released it."""
    return chunk.utterance.sequence.slot >= 0
