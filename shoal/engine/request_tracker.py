"""The utterances being spoken: which turn each is at, what of it has been heard, and whether it is speech."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.audio.guard import SpeechDefect, SpeechGuard
from shoal.config import EngineConfig
from shoal.engine.audio_decoder import Answer, AudioDecoder, PlannedChunk
from shoal.engine.scheduler import Progress, Scheduler
from shoal.engine.sequence import Sequence
from shoal.engine.utterance import Event, Utterance
from shoal.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, ShoalError, TextError
from shoal.model.config import DualARConfig
from shoal.speech import AudioChunk, FinishReason, Samples

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestStats:
    frames: int = 0
    samples: int = 0
    spoken: int = 0  # utterances that ended well
    retried: int = 0
    failed: int = 0


class RequestTracker:
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
        self.active: dict[int, Utterance] = {}  # by id, which is also that of the sequence

    def add(self, utterance: Utterance) -> None:
        """Take up an utterance. One that can never be spoken is refused here: TextError, InvalidRequest."""
        for turn in utterance.turns:
            self._check_turn(turn.tokens, utterance)
        opening = utterance.turns[0].prompt
        sampling = utterance.turn_sampling()
        utterance.sequence = Sequence.start(utterance.id, opening, sampling, self.model.slow.max_seq_len)
        utterance.guard = self._new_guard(utterance)
        self.scheduler.add(utterance.sequence)
        self.active[utterance.id] = utterance

    def submit_audio(self, progress: list[Progress]) -> list[Event]:
        """Take in new frames and decode what is due of them; what comes of it is heard at once, or in the next step."""
        self.audio_decoder.begin([each for each in map(self._advance, progress) if each is not None])
        return [] if self.audio_decoder.overlap else self.collect_audio()

    def collect_audio(self) -> list[Event]:
        """Say what came of the frames that were decoded last."""
        return [event for due, samples in self.audio_decoder.collect() for event in self._deliver(due, samples)]

    def cancel(self, utterance: Utterance) -> None:
        if self.active.pop(utterance.id, None) is not None:
            self._leave(utterance, self.scheduler.cancel)

    def fail(self, utterance: Utterance, error: ShoalError) -> Event:
        """End an utterance for a reason the caller is told."""
        self.cancel(utterance)
        self.stats.failed += 1
        return Event(utterance, error=error)

    def expire(self) -> list[Event]:
        """End whoever has run out of time, waiting or running."""
        now = self.clock()
        late = [each for each in self.active.values() if each.deadline is not None and each.deadline < now]
        return [self.fail(each, DeadlineExceeded("the request did not end in its time")) for each in late]

    def _check_turn(self, tokens: int, utterance: Utterance) -> None:
        if tokens > self.model.max_prompt:
            raise TextError(
                f"the prompt has {tokens} tokens and this model takes {self.model.max_prompt}: "
                "shorten the text or the reference recording"
            )
        if not self.scheduler.fits(tokens, utterance.sampling, self.model.slow.max_seq_len):
            raise InvalidRequest(
                f"a prompt of {tokens} tokens and {utterance.sampling.max_frames} frames do not fit the KV memory: "
                "shorten the text, lower max_frames, or give the engine more memory"
            )

    def _new_guard(self, utterance: Utterance) -> SpeechGuard | None:
        return SpeechGuard(self.audio_decoder.codec.config.sample_rate, utterance.text) if self.config.guard else None

    def _advance(self, progress: Progress) -> PlannedChunk | None:
        sequence = progress.sequence
        utterance = self.active[sequence.id]
        if progress.frames:
            utterance.codes.append(sequence.tokens[sequence.length - 1, 1:].copy())
            self.stats.frames += 1
        turned = sequence.finish is not None
        utterance.cut |= sequence.finish is FinishReason.LENGTH
        ended = turned and not self._next_turn(utterance)
        return self.audio_decoder.due(utterance, ended=ended, pausing=turned)

    def _next_turn(self, utterance: Utterance) -> bool:
        """Lead on to the next piece of the text, if there is one."""
        if utterance.turn + 1 == len(utterance.turns):
            return False
        utterance.turn += 1
        turn, sequence, sampling = utterance.turns[utterance.turn], utterance.sequence, utterance.turn_sampling()
        length = sequence.length + len(turn.tail)
        longest = min(self.model.max_prompt, self.config.carried_columns or self.model.max_prompt)
        if length <= longest and self.scheduler.fits(length, sampling, sequence.most):
            sequence.begin_turn(turn.tail, sampling)
        else:
            # What was said no longer fits beside what comes; the voice alone leads on.
            self.scheduler.restart(sequence, turn.prompt, sampling)
        return True

    def _deliver(self, due: PlannedChunk, samples: Answer) -> list[Event]:
        utterance = due.utterance
        if isinstance(samples, GenerationFailed):
            return [self.fail(utterance, samples)]
        finding = self._judge(utterance, samples, ended=due.ended)
        if finding is not None:
            return self._reject(utterance, finding)
        if utterance.whole and not due.ended:
            utterance.held.append(samples)
            return []
        return [self._send(due, samples)]

    def _send(self, due: PlannedChunk, samples: Samples) -> Event:
        utterance, finish = due.utterance, None
        if utterance.held:
            samples = np.concatenate((*utterance.held, samples))
        if not utterance.sent:
            utterance.first_sent = self.clock()
        utterance.sent = utterance.decoded
        self.stats.samples += len(samples)
        if due.ended:
            finish = utterance.sequence.finish
            del self.active[utterance.id]
            self._leave(utterance, self.scheduler.release)
            self.stats.spoken += 1
        return Event(utterance, AudioChunk(samples, self.audio_decoder.codec.config.sample_rate, finish))

    def _judge(self, utterance: Utterance, samples: Samples, *, ended: bool) -> SpeechDefect | None:
        if utterance.guard is None:
            return None
        finding = utterance.guard.feed(samples)
        if finding is None and ended:
            finding = next(iter(utterance.guard.finish(cut=utterance.cut)), None)
        return finding

    def _reject(self, utterance: Utterance, finding: SpeechDefect) -> list[Event]:
        """Not speech: try once more with other dice if nothing has been heard, else say so."""
        if utterance.sent or utterance.attempt >= self.config.retries:
            return [self.fail(utterance, GenerationFailed(f"the model did not produce speech: {finding.value}"))]
        about = {"job": utterance.id}
        logger.warning("utterance %d: %s; trying again with another seed", utterance.id, finding.value, extra=about)
        self.stats.retried += 1
        utterance.restart()
        utterance.guard = self._new_guard(utterance)
        self.audio_decoder.clear(utterance.sequence.slot)
        self.scheduler.restart(utterance.sequence, utterance.turns[0].prompt, utterance.turn_sampling())
        return []

    def _leave(self, utterance: Utterance, by: Callable[[Sequence], None]) -> None:
        slot = utterance.sequence.slot
        by(utterance.sequence)
        if slot >= 0:
            self.audio_decoder.clear(slot)
