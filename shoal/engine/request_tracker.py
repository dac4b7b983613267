"""Tracks active utterances: turns, audio delivery, deadlines, and retries when the output is not speech."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shoal.audio.guard import SpeechDefect, SpeechGuard
from shoal.config import EngineConfig
from shoal.engine.output.audio_decoder import AudioDecoder, DecodeResult, PlannedChunk
from shoal.engine.output.turn_audio import TurnAudio
from shoal.engine.scheduling.scheduler import Progress, Scheduler
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Event, Utterance
from shoal.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, ShoalError, TextError
from shoal.model.config import DualARConfig
from shoal.speech import AudioChunk, FinishReason, Samples, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestStats:
    frames: int = 0
    samples: int = 0
    completed: int = 0  # utterances generated to their end
    retried: int = 0
    failed: int = 0


class RequestTracker:
    """Active utterances of one engine. Not thread-safe: used on the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        audio_decoder: AudioDecoder,
        model: DualARConfig,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler, self.audio_decoder, self.model, self.config, self.clock = (
            scheduler,
            audio_decoder,
            model,
            config,
            clock,
        )
        self.stats = RequestStats()
        self.active: dict[int, Utterance] = {}  # by utterance id, which is also the sequence id

    def add(self, utterance: Utterance) -> None:
        """Queue an utterance. Raises TextError or InvalidRequest if it can never run."""
        for turn in utterance.turns:
            self._check_turn(turn.prompt_length, utterance)
        opening = utterance.turns[0].prompt
        sampling = utterance.turn_sampling()
        utterance.sequence = Sequence.start(
            utterance.id, opening, sampling, self.model.slow.max_seq_len, utterance.client
        )
        utterance.sequence.text = utterance.text_span()
        utterance.guard = self._new_guard(utterance)
        utterance.audio = self._new_audio(utterance)
        self.scheduler.add(utterance.sequence)
        self.active[utterance.id] = utterance

    def submit_audio(self, progress: list[Progress]) -> list[Event]:
        """Append new frames and submit complete chunks to the codec.

        Returns the events of utterances that failed and, without overlap, the audio of the chunks.
        """
        advanced = [self._advance(each) for each in progress]
        events = [each for each in advanced if isinstance(each, Event)]
        chunks = [each for each in advanced if isinstance(each, PlannedChunk)]
        self.audio_decoder.submit(chunks)
        find_words(chunks)
        return events if self.audio_decoder.overlap else events + self.collect_audio()

    def collect_audio(self) -> list[Event]:
        """Return the events for the audio of the last codec call."""
        collected = self.audio_decoder.collect()
        return [event for chunk, samples in collected for event in self._deliver(chunk, samples)]

    def cancel(self, utterance: Utterance) -> None:
        if self.active.pop(utterance.id, None) is not None:
            self._release(utterance, self.scheduler.cancel)

    def fail(self, utterance: Utterance, error: ShoalError) -> Event:
        """Cancel an utterance and return the event that carries the error."""
        self.cancel(utterance)
        self.stats.failed += 1
        return Event(utterance, error=error)

    def expire(self) -> list[Event]:
        """Fail all utterances whose deadline has passed, waiting or running."""
        now = self.clock()
        late = [each for each in self.active.values() if each.deadline is not None and each.deadline < now]
        return [self.fail(each, DeadlineExceeded("the request did not finish before its deadline")) for each in late]

    def _check_turn(self, tokens: int, utterance: Utterance) -> None:
        if tokens > self.model.max_prompt:
            raise TextError(
                f"the prompt has {tokens} tokens and this model takes at most {self.model.max_prompt}: "
                "shorten the text or the reference recording"
            )
        if not self.scheduler.fits(tokens, utterance.sampling, self.model.slow.max_seq_len):
            raise InvalidRequest(
                f"a prompt of {tokens} tokens and {utterance.sampling.max_frames} frames do not fit the KV cache: "
                "shorten the text, lower max_frames, or raise gpu_memory or kv_bytes"
            )

    def _new_guard(self, utterance: Utterance) -> SpeechGuard | None:
        return SpeechGuard(self.audio_decoder.codec.config.sample_rate, utterance.text) if self.config.guard else None

    def _new_audio(self, utterance: Utterance) -> TurnAudio:
        return TurnAudio(self.audio_decoder.codec.config.sample_rate, utterance.silence_before)

    def _advance(self, progress: Progress) -> PlannedChunk | Event | None:
        """Return the chunk to decode now, if any, or the event of an utterance that failed."""
        utterance = self.active[progress.sequence.id]
        if progress.frames:
            self._append_frame(utterance, progress)
        if progress.sequence.finish is None:
            chunk = self.audio_decoder.next_chunk(utterance, ended=False)
            return None if chunk is None else replace(chunk, turn=utterance.turn)
        if self._stopped_early(utterance) and not self._divide_turn(utterance):
            return self._retry_turn(utterance)
        return self._end_turn(utterance)

    def _append_frame(self, utterance: Utterance, progress: Progress) -> None:
        """Append the newest frame of a sequence, and what was read of the attention for its word times."""
        sequence = progress.sequence
        utterance.codes.append(sequence.tokens[sequence.length - 1, 1:].copy())
        if utterance.words is not None and progress.attention is not None and sequence.text is not None:
            utterance.words.feed(utterance.turn, progress.attention, sequence.text.length)
        self.stats.frames += 1

    def _end_turn(self, utterance: Utterance) -> PlannedChunk | None:
        """Begin the next turn, if there is one; return the chunk with the rest of the turn that has ended, if any."""
        number, turn = utterance.turn, utterance.turns[utterance.turn]
        utterance.truncated |= utterance.sequence.finish is FinishReason.LENGTH
        utterance.turn_ends.append(len(utterance.codes))
        ended = not self._next_turn(utterance)
        chunk = self.audio_decoder.next_chunk(utterance, ended=ended, pausing=True)
        if chunk is None and (turn.silence_after or turn.delivery.rate != 1.0 or utterance.words):
            chunk = PlannedChunk(utterance, 0, ended=False)  # all frames are decoded, but not all audio or words sent
        return None if chunk is None else replace(chunk, turn=number, turn_ended=True)

    def _stopped_early(self, utterance: Utterance) -> bool:
        """Return whether the model ended the current turn long before its text can have been spoken."""
        too_short = utterance.turn_frames < utterance.turns[utterance.turn].min_frames
        return too_short and utterance.guard is not None and utterance.sequence.finish is FinishReason.STOP

    def _divide_turn(self, utterance: Utterance) -> bool:
        """Make the missing words the next turn, once the audio before them is sent and no retries are left."""
        if utterance.turn_attempt < self.config.turn_retries or not self._audio_sent(utterance):
            return False
        frame_rate, turn = self.audio_decoder.codec.config.frame_rate, utterance.turn
        if not utterance.divide_turn(utterance.turn_frames / frame_rate):
            return False
        logger.warning(
            "utterance %d: turn %d stopped too early; its rest is spoken as a turn of its own",
            *(utterance.id, turn),
            extra={"job": utterance.id},
        )
        self.stats.retried += 1
        return True

    def _retry_turn(self, utterance: Utterance) -> Event | None:
        """Generate the current turn again with another seed; fail if no retries are left.

        A turn whose audio was sent in part continues where it stopped. Frame counts alone decide that, not the frames
        decoded so far, which depend on timing: the same request has to give the same audio.
        """
        turn, frame_rate = utterance.turns[utterance.turn], self.audio_decoder.codec.config.frame_rate
        spoken, expected = utterance.turn_frames / frame_rate, turn.min_frames / frame_rate
        if utterance.turn_attempt >= self.config.turn_retries:
            message = (
                f"the speech is too short for its text: {spoken:.2f} s for {turn.text[:60]!r}, at least "
                f"{expected:.2f} s expected; send the request again with another seed"
            )
            return self.fail(utterance, GenerationFailed(message))
        kept_frames = utterance.turn_frames if self._audio_sent(utterance) else 0
        logger.warning(
            "utterance %d: turn %d is too short (%.2f s, at least %.2f s expected); %s with another seed",
            *(utterance.id, utterance.turn, spoken, expected, "continuing" if kept_frames else "retrying"),
            extra={"job": utterance.id},
        )
        self.stats.retried += 1
        utterance.retry_turn(kept_frames)
        self.scheduler.rewind_turn(utterance.sequence, utterance.turn_sampling(), kept_frames)
        return None

    def _audio_sent(self, utterance: Utterance) -> bool:
        """Return whether audio of the current turn may have been sent: it has all frames that are held back."""
        return 0 < utterance.turn_frames >= utterance.hold_frames

    def _next_turn(self, utterance: Utterance) -> bool:
        """Start the next turn; return False if there is none."""
        if utterance.turn + 1 == len(utterance.turns):
            return False
        utterance.begin_turn()
        turn, sequence, sampling = utterance.turns[utterance.turn], utterance.sequence, utterance.turn_sampling()
        length = sequence.length + len(turn.continuation)
        same_voice = turn.prefix is utterance.turns[utterance.turn - 1].prefix
        if same_voice and utterance.carry_turns and length <= self.context_limit(sampling):
            sequence.begin_turn(turn.continuation, sampling)
        else:
            # Earlier turns have another voice or do not fit into the context: start again with the voice and this turn.
            self.scheduler.restart(sequence, turn.prompt, sampling)
        sequence.text = utterance.text_span()
        return True

    def context_limit(self, sampling: SamplingParams) -> int:
        """Return the longest prompt, in tokens, that may contain earlier turns."""
        longest = min(self.model.max_prompt, self.config.context_tokens or self.model.max_prompt)
        return min(longest, self.scheduler.longest_prompt(sampling, self.model.slow.max_seq_len))

    def _deliver(self, chunk: PlannedChunk, samples: DecodeResult) -> list[Event]:
        utterance = chunk.utterance
        if isinstance(samples, GenerationFailed):
            return [self.fail(utterance, samples)]
        finding = self._check_speech(utterance, samples, ended=chunk.ended)
        if finding is not None:
            return self._reject(utterance, finding)
        turn = utterance.turns[chunk.turn]
        samples = utterance.audio.apply(turn, samples, turn_ended=chunk.turn_ended)
        if utterance.words is not None and turn.text_tokens is not None:
            begin, rate = utterance.audio.turn_begin / utterance.audio.sample_rate, turn.delivery.rate
            utterance.words.collect(chunk.turn, turn.text_tokens.words, begin, rate, ended=chunk.turn_ended)
        if not len(samples) and not chunk.ended:
            return []
        if utterance.whole and not chunk.ended:
            utterance.buffered.append(samples)
            return []
        return [self._send(chunk, samples)]

    def _send(self, chunk: PlannedChunk, samples: Samples) -> Event:
        utterance, finish = chunk.utterance, None
        if utterance.buffered:
            samples = np.concatenate((*utterance.buffered, samples))
        if not utterance.sent:
            utterance.first_sent = self.clock()
        utterance.sent = utterance.decoded
        self.stats.samples += len(samples)
        if chunk.ended:
            finish = utterance.sequence.finish
            del self.active[utterance.id]
            self._release(utterance, self.scheduler.release)
            self.stats.completed += 1
        context = utterance.spoken_context() if chunk.ended else None
        words = () if utterance.words is None else utterance.words.take()
        rate = self.audio_decoder.codec.config.sample_rate
        return Event(utterance, AudioChunk(samples, rate, finish, context, words))

    def _check_speech(self, utterance: Utterance, samples: Samples, *, ended: bool) -> SpeechDefect | None:
        if utterance.guard is None:
            return None
        finding = utterance.guard.feed(samples)
        if finding is None and ended:
            finding = next(iter(utterance.guard.finish(cut=utterance.truncated)), None)
        return finding

    def _reject(self, utterance: Utterance, finding: SpeechDefect) -> list[Event]:
        """Retry with another seed if no audio was sent and retries are left, else fail the utterance."""
        if utterance.sent or utterance.attempt >= self.config.retries:
            return [self.fail(utterance, GenerationFailed(f"the model did not produce speech: {finding.value}"))]
        extra = {"job": utterance.id}
        logger.warning("utterance %d: %s; retrying with another seed", utterance.id, finding.value, extra=extra)
        self.stats.retried += 1
        utterance.restart()
        utterance.guard, utterance.audio = self._new_guard(utterance), self._new_audio(utterance)
        self.audio_decoder.clear(utterance.sequence.slot)
        self.scheduler.restart(utterance.sequence, utterance.turns[0].prompt, utterance.turn_sampling())
        utterance.sequence.text = utterance.text_span()
        return []

    def _release(self, utterance: Utterance, by: Callable[[Sequence], None]) -> None:
        slot = utterance.sequence.slot
        by(utterance.sequence)
        if slot >= 0:
            self.audio_decoder.clear(slot)


def find_words(chunks: list[PlannedChunk]) -> None:
    """Find the words that have ended in these chunks.

    Called while the codec decodes the chunks. After that, the device may idle until they are delivered.
    """
    for chunk in chunks:
        words, turn = chunk.utterance.words, chunk.utterance.turns[chunk.turn]
        if words is not None and turn.text_tokens is not None:
            words.find(chunk.turn, turn.text_tokens.words, ended=chunk.turn_ended)
