"""Audio of turns on its way to the caller: rate and volume of a turn, and silence before and after it."""

from dataclasses import dataclass

import numpy as np

from shoal.audio.tempo import Tempo
from shoal.engine.utterance import Turn
from shoal.speech import Samples


@dataclass(slots=True)
class TurnAudio:
    """Output state of one utterance. Used on the engine thread. Only turns with a rate build the tempo filter."""

    sample_rate: int
    silence_before: int = 0  # samples
    turn_begin: int = 0  # sample at which the audio of the current turn begins
    _sent: int = 0  # samples returned so far
    _between: bool = True  # whether the next samples are the first of a turn
    _tempo: Tempo | None = None

    def apply(self, turn: Turn, samples: Samples, *, turn_ended: bool) -> Samples:
        """Return the samples of a chunk as they are sent; the last chunk of a turn includes the silence after it."""
        if self._between:
            self.turn_begin = self._sent + self.silence_before
        parts = [np.zeros(self.silence_before, np.float32), self._delivered(turn, samples, turn_ended=turn_ended)]
        self.silence_before, self._between = 0, turn_ended
        if turn_ended:
            parts.append(np.zeros(turn.silence_after, np.float32))
        self._sent += sum(part.size for part in parts)
        filled = [part for part in parts if part.size]
        return filled[0] if len(filled) == 1 else np.concatenate(parts)

    def _delivered(self, turn: Turn, samples: Samples, *, turn_ended: bool) -> Samples:
        if turn.delivery.rate != 1.0:
            samples = self._at_rate(turn.delivery.rate, samples, turn_ended=turn_ended)
        gain = np.float32(10.0 ** (turn.delivery.decibels / 20.0))
        return samples if gain == 1 else samples * gain

    def _at_rate(self, rate: float, samples: Samples, *, turn_ended: bool) -> Samples:
        self._tempo = self._tempo or Tempo(self.sample_rate, rate)
        samples = self._tempo.feed(samples)
        if turn_ended:
            samples = np.concatenate((samples, self._tempo.finish()))
            self._tempo = None
        return samples
