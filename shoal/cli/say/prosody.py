"""Speaking rate and volume of `shoal say`, applied in the same order as by the server."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cli.say import flags
from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    from shoal.audio.pcm import Samples
    from shoal.audio.tempo import Tempo


@dataclass(frozen=True)
class ProsodyOptions:
    """Speaking rate as a factor, and gain in decibels."""

    speed: flags.Speed = 1.0
    volume: flags.Volume = 0.0

    def check(self) -> None:
        """Raise InvalidRequest, or MissingExtra if the rate cannot be changed here."""
        if not 0.5 <= self.speed <= 2.0:
            raise InvalidRequest(f"--speed must be between 0.5 and 2, not {self.speed:g}")
        if not -20.0 <= self.volume <= 20.0:
            raise InvalidRequest(f"--volume must be between -20 and 20 decibels, not {self.volume:g}")
        if self.speed != 1.0:
            from shoal.audio.tempo import check_tempo

            check_tempo()

    def filter(self, sample_rate: int) -> "ProsodyFilter":
        return ProsodyFilter(self, sample_rate)


class ProsodyFilter:
    """Changes one stream of samples."""

    def __init__(self, prosody: ProsodyOptions, sample_rate: int) -> None:
        self._decibels = prosody.volume
        self._tempo = None if prosody.speed == 1.0 else _tempo(sample_rate, prosody.speed)

    def feed(self, samples: "Samples") -> "Samples":
        return self._gain(samples if self._tempo is None else self._tempo.feed(samples))

    def finish(self) -> "Samples":
        """Flush the tempo filter and return the last samples."""
        import numpy as np

        return self._gain(np.zeros(0, np.float32) if self._tempo is None else self._tempo.finish())

    def _gain(self, samples: "Samples") -> "Samples":
        if self._decibels == 0.0:
            return samples
        import numpy as np

        return samples * np.float32(10.0 ** (self._decibels / 20.0))


def _tempo(sample_rate: int, speed: float) -> "Tempo":
    from shoal.audio.tempo import Tempo

    return Tempo(sample_rate, speed)
