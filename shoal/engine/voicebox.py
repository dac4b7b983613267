"""Frames of all live voices -> samples: decides whose frames are due and decodes them in one call."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.codec.dac import Codec
from shoal.codec.fused import FusedDecoder
from shoal.codec.streaming import StreamingDecoder
from shoal.engine.chunks import worthwhile
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.speech import Samples

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Due:
    """The next `frames` frames of an utterance are to become samples; `ended` if no more will come."""

    utterance: Utterance
    frames: int
    ended: bool


class VoiceBox:
    """The codec's end of every slot. Slot numbers are those of the sequences, and a free slot is always clean."""

    def __init__(
        self,
        codec: Codec,
        slots: int,
        *,
        first_frames: int,
        max_frames: int,
        clock: Callable[[], float] = time.monotonic,
        fused: bool = False,
    ) -> None:
        """With `fused` the codec runs in half precision through kernels and graphs, as long as they work."""
        self.codec = codec
        self.clock = clock
        self.seconds = 0.0  # spent decoding
        self._slots, self._first, self._most = slots, first_frames, max_frames
        self._decoder = (fused and self._build_fused()) or StreamingDecoder(codec, slots)
        self._lost: set[int] = set()  # slots whose past went with a decoder that broke

    @property
    def rung(self) -> str:
        return "graph" if isinstance(self._decoder, FusedDecoder) else "eager"

    @property
    def state_bytes(self) -> int:
        return self._decoder.past.nbytes

    def due(self, utterance: Utterance, *, ended: bool, pausing: bool = False) -> Due | None:
        """What of an utterance to decode now: nothing until a chunk worth sending has gathered, all at the end.

        Nor is anything kept back when `pausing`: the next frame has to wait for a prompt. A listener who has been
        sent more than has been heard can wait for a larger chunk, which costs less to decode.
        """
        if ended:
            return Due(utterance, utterance.backlog, ended=True)
        wanted = 1 if pausing else self._worthwhile(utterance)
        return Due(utterance, utterance.backlog, ended=False) if utterance.backlog >= wanted else None

    def decode(self, due: list[Due]) -> list[Samples | GenerationFailed]:
        """The samples of each, in order. Whoever cannot be decoded fails alone."""
        started = time.perf_counter()
        samples = dict[int, Samples | GenerationFailed]()
        filled = [each for each in due if each.frames]
        for each in [each for each in filled if each.utterance.sequence.slot in self._lost]:
            samples[each.utterance.id] = self._decode_again(each)
        intact = [each for each in filled if each.utterance.id not in samples]
        samples |= zip([each.utterance.id for each in intact], self._decode_all(intact), strict=True)
        self.seconds += time.perf_counter() - started
        return [samples.get(each.utterance.id, np.zeros(0, np.float32)) for each in due]

    def rehearse(self) -> None:
        """Decode the most there can be at once: the longest chunk of every slot. Nothing of it stays."""
        slots = list(range(self._slots))
        codes = np.zeros((len(slots), self.codec.config.num_codebooks, self._most), np.int64)
        self._run(codes, slots, None)
        self._decoder.reset(slots)

    def clear(self, slot: int) -> None:
        """The next frame of this slot is the first of another voice."""
        self._lost.discard(slot)
        self._decoder.reset([slot])

    def _decode_all(self, due: list[Due]) -> list[Samples | GenerationFailed]:
        """In one call, or one by one if that fails."""
        try:
            return self._decode_together(due) if due else []
        except Exception as problem:
            if not isinstance(self._decoder, FusedDecoder) and not isinstance(problem, RuntimeError):
                raise
            logger.exception("codec call over %d voices failed; decoding them one by one", len(due))
            self._step_down()
            return [self._decode_again(each) for each in due]

    def _build_fused(self) -> FusedDecoder | None:
        try:
            return FusedDecoder(self.codec, self._slots, torch.float16, capture=self.codec.device.type == "cuda")
        except Exception:  # compilers raise anything; the plain decoder is built from what is there
            logger.exception("the codec's graphs cannot be built here")
            return None

    def _step_down(self) -> None:
        """Leave the graphs, and with them what they remember of every voice: it is decoded anew when it is due."""
        if isinstance(self._decoder, FusedDecoder):
            self._lost = {slot for slot, seen in enumerate(self._decoder._seen) if seen}
            self._decoder = StreamingDecoder(self.codec, self._slots)

    def _worthwhile(self, utterance: Utterance) -> int:
        """Frames that make a chunk worth sending now."""
        if utterance.whole:
            return self._most
        lead = utterance.sent - (self.clock() - utterance.first_sent) * self.codec.config.frame_rate
        return worthwhile(utterance.sent, lead, self._first, self._most)

    def _decode_together(self, due: list[Due]) -> list[Samples | GenerationFailed]:
        lengths = [each.frames for each in due]
        codes = np.zeros((len(due), self.codec.config.num_codebooks, max(lengths)), np.int64)
        for row, each in enumerate(due):
            begin = each.utterance.decoded
            codes[row, :, : each.frames] = np.stack(each.utterance.codes[begin : begin + each.frames], axis=1)
        samples = self._run(codes, [each.utterance.sequence.slot for each in due], lengths)
        for each in due:
            each.utterance.decoded += each.frames
        step = self.codec.config.frame_length
        return [row[: length * step] for row, length in zip(samples, lengths, strict=True)]

    def _decode_again(self, due: Due) -> Samples | GenerationFailed:
        """A failed call leaves the slot half written: bring it back by decoding the utterance from its first frame."""
        utterance, slot = due.utterance, due.utterance.sequence.slot
        end = utterance.decoded + due.frames
        try:
            self.clear(slot)
            codes = np.stack(utterance.codes[:end], axis=1)[None].astype(np.int64)
            samples = np.concatenate(
                [self._run(codes[..., i : i + self._most], [slot], None)[0] for i in range(0, end, self._most)]
            )
        except RuntimeError as problem:
            return GenerationFailed(f"the codec failed: {problem}")
        utterance.decoded = end
        return samples[-due.frames * self.codec.config.frame_length :]

    def _run(self, codes: np.ndarray, slots: list[int], lengths: list[int] | None) -> Samples:
        uneven = lengths if lengths and len(set(lengths)) > 1 else None
        samples = self._decoder.decode(torch.from_numpy(codes), slots, uneven)
        return samples.float().cpu().numpy()
