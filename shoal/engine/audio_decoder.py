"""Frames of all live voices -> samples: decides whose frames are due and decodes them in one call.

A call is begun in one step and collected in the same one, or in the next with `overlap`: a GPU then decodes through
graphs beside the model, and the host waits for neither.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.codec.dac import Codec
from shoal.codec.fused import MAX_POSITIONS, FusedDecoder
from shoal.codec.streaming import StreamingDecoder
from shoal.engine.chunks import chunk_frames
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.speech import Samples

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The next `frames` frames of an utterance are to become samples; `ended` if no more will come."""

    utterance: Utterance
    frames: int
    ended: bool


TOO_LONG = f"a speech of more than {MAX_POSITIONS:,} frames; send the text in several requests"
Fetch = Callable[[], list[Samples]]
Answer = Samples | GenerationFailed


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """What was due when a call was begun; `fetch` waits for the samples of those who are not answered already."""

    due: list[PlannedChunk]
    answers: dict[int, Answer]
    intact: list[PlannedChunk]
    fetch: Fetch


class AudioDecoder:
    """The codec's end of every slot. Slot numbers are those of the sequences."""

    def __init__(
        self,
        codec: Codec,
        slots: int,
        *,
        first_frames: int,
        max_frames: int,
        clock: Callable[[], float] = time.monotonic,
        fused: bool = False,
        overlap: bool = False,
    ) -> None:
        """With `fused` the codec runs in half precision through kernels and graphs, as long as they work."""
        self.codec = codec
        self.clock = clock
        self.seconds = 0.0  # of the host: launching calls, and waiting for them
        self._slots, self._first, self._most = slots, first_frames, max_frames
        self._decoder = (fused and self._build_fused()) or StreamingDecoder(codec, slots)
        # Only graphs run by themselves: plain operators are waited for within the step, so their samples are there.
        self.overlap = overlap and isinstance(self._decoder, FusedDecoder)
        self._lost: set[int] = set()  # slots whose past went with a decoder that broke
        self._left: set[int] = set()  # slots that somebody left, and that still hold the past of it
        self._call: DecodeCall | None = None  # begun, not collected

    @property
    def backend(self) -> str:
        return "graph" if isinstance(self._decoder, FusedDecoder) else "eager"

    def due(self, utterance: Utterance, *, ended: bool, pausing: bool = False) -> PlannedChunk | None:
        """What of an utterance to decode now: nothing until a chunk worth sending has gathered, all at the end.

        Nor is anything kept back when `pausing`: the next frame has to wait for a prompt. A listener who has been
        sent more than has been heard can wait for a larger chunk, which costs less to decode.
        """
        if ended:
            return PlannedChunk(utterance, utterance.backlog, ended=True)
        wanted = 1 if pausing else self._worthwhile(utterance)
        return PlannedChunk(utterance, utterance.backlog, ended=False) if utterance.backlog >= wanted else None

    def begin(self, due: list[PlannedChunk]) -> None:
        """Decode these; `collect` has to come before the next call is begun."""
        assert self._call is None, "a call is under way"
        started = time.perf_counter()
        filled = [each for each in due if each.frames]
        if filled:
            self._clean()
        lost = [each for each in filled if each.utterance.sequence.slot in self._lost]
        answers = {each.utterance.id: self._decode_again(each) for each in lost}
        answers |= {each.utterance.id: GenerationFailed(TOO_LONG) for each in filled if not self._fits(each)}
        intact = [each for each in filled if each.utterance.id not in answers]
        try:
            fetch = self._start(intact)
        except Exception as problem:
            if not self._survivable(problem):
                raise
            answers |= self._rescue(intact)
            intact, fetch = [], list
        self._call = DecodeCall(due, answers, intact, fetch)
        self.seconds += time.perf_counter() - started

    def collect(self) -> list[tuple[PlannedChunk, Answer]]:
        """The samples of all that was begun, less those of whoever has left. Who cannot be decoded fails alone."""
        if self._call is None:
            return []
        started = time.perf_counter()
        call, self._call = self._call, None
        answers = call.answers | self._finish(call)
        self.seconds += time.perf_counter() - started
        nothing = np.zeros(0, np.float32)
        return [(each, answers.get(each.utterance.id, nothing)) for each in call.due if _present(each)]

    def rehearse(self) -> None:
        """Decode the most there can be at once: the longest chunk of every slot. Nothing of it stays."""
        slots = list(range(self._slots))
        codes = np.zeros((len(slots), self.codec.config.num_codebooks, self._most), np.int64)
        self._run(codes, slots)()
        self._decoder.reset(slots)

    def clear(self, slot: int) -> None:
        """The next frame of this slot is the first of another voice."""
        self._lost.discard(slot)
        self._left.add(slot)

    def _clean(self) -> None:
        """Forget the past of all who have left: together, since many leave in one step and it costs a launch."""
        if self._left:
            self._decoder.reset(sorted(self._left))
            self._left.clear()

    def _finish(self, call: DecodeCall) -> dict[int, Answer]:
        """The samples of whoever was not answered at once."""
        try:
            rows = call.fetch()
        except Exception as problem:
            if not self._survivable(problem):
                raise
            return self._rescue([each for each in call.intact if _present(each)])
        for each in call.intact:
            each.utterance.decoded += each.frames
        return {each.utterance.id: row for each, row in zip(call.intact, rows, strict=True)}

    def _fits(self, due: PlannedChunk) -> bool:
        """Whether the graphs know so many positions of one stream; plain operators know as many as they have to."""
        decoder = self._decoder
        return not isinstance(decoder, FusedDecoder) or decoder.can_extend(due.utterance.sequence.slot, due.frames)

    def _survivable(self, problem: Exception) -> bool:
        """Whatever graphs raise is theirs; of plain operators only what the device raises."""
        return isinstance(self._decoder, FusedDecoder) or isinstance(problem, RuntimeError)

    def _rescue(self, due: list[PlannedChunk]) -> dict[int, Answer]:
        """A call failed: leave the graphs, if there are any, and decode one by one."""
        logger.exception("codec call over %d voices failed; decoding them one by one", len(due))
        self._step_down()
        return {each.utterance.id: self._decode_again(each) for each in due}

    def _build_fused(self) -> FusedDecoder | None:
        try:
            return FusedDecoder(self.codec, self._slots, torch.float16, capture=self.codec.device.type == "cuda")
        except Exception:  # compilers raise anything; the plain decoder is built from what is there
            logger.exception("the codec's graphs cannot be built here")
            return None

    def _step_down(self) -> None:
        """Leave the graphs, and with them what they remember of every voice: it is decoded anew when it is due."""
        if isinstance(self._decoder, FusedDecoder):
            self._lost = {slot for slot, seen in enumerate(self._decoder._seen) if seen} - self._left
            self._left.clear()
            self._decoder = StreamingDecoder(self.codec, self._slots)
            self.overlap = False

    def _worthwhile(self, utterance: Utterance) -> int:
        """Frames that make a chunk worth sending now."""
        if utterance.whole:
            return self._most
        lead = utterance.sent - (self.clock() - utterance.first_sent) * self.codec.config.frame_rate
        return chunk_frames(utterance.sent, lead, self._first, self._most)

    def _start(self, due: list[PlannedChunk]) -> Fetch:
        """All of them in one call."""
        if not due:
            return list
        codes = np.zeros((len(due), self.codec.config.num_codebooks, max(each.frames for each in due)), np.int64)
        for row, each in enumerate(due):
            begin = each.utterance.decoded
            codes[row, :, : each.frames] = np.stack(each.utterance.codes[begin : begin + each.frames], axis=1)
        return self._run(codes, [each.utterance.sequence.slot for each in due], [each.frames for each in due])

    def _decode_again(self, due: PlannedChunk) -> Answer:
        """A failed call leaves the slot half written: bring it back by decoding the utterance from its first frame."""
        utterance, slot = due.utterance, due.utterance.sequence.slot
        end = utterance.decoded + due.frames
        try:
            self._lost.discard(slot)
            self._decoder.reset([slot])
            codes = np.stack(utterance.codes[:end], axis=1)[None].astype(np.int64)
            pieces = [codes[..., i : i + self._most] for i in range(0, end, self._most)]
            samples = np.concatenate([self._run(piece, [slot])()[0] for piece in pieces])
        except RuntimeError as problem:
            return GenerationFailed(f"the codec failed: {problem}")
        utterance.decoded = end
        return samples[-due.frames * self.codec.config.frame_length :]

    def _run(self, codes: np.ndarray, slots: list[int], lengths: list[int] | None = None) -> Fetch:
        """Begin to decode codes [n, codebooks, T], of which the first lengths[i] of row i are real."""
        real = lengths or [codes.shape[-1]] * len(slots)
        if isinstance(self._decoder, FusedDecoder):
            return self._decoder.launch(codes, slots, real).wait
        uneven = real if len(set(real)) > 1 else None
        samples = self._decoder.decode(torch.from_numpy(codes), slots, uneven).float().cpu().numpy()
        step = self.codec.config.frame_length
        return lambda: [row[: length * step] for row, length in zip(samples, real, strict=True)]


def _present(due: PlannedChunk) -> bool:
    """Whether its utterance is still in the slot it was begun in: whoever leaves gives it back."""
    return due.utterance.sequence.slot >= 0
