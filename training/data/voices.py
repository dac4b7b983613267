"""The speakers of the corpus: which teacher, which of its voices, and how its vocal tract is scaled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Voice:
    """One speaker: a teacher's voice, perhaps with its vocal tract scaled.

    A formant factor below one lengthens the vocal tract: the recording is resampled, which scales formants, pitch and
    tempo together, and the teacher speaks faster to win the tempo back. `pitch` is what the teacher is asked for, in
    percent, before the resampling scales it too. `volume` keeps Pico below the level at which it clips.
    """

    name: str
    teacher: str
    teacher_voice: str
    formants: float = 1.0
    pitch: int = 100
    volume: int = 100

    def request(self, text: str, tempo: float) -> str:
        speed = round(100 * tempo / self.formants)
        return f"{self.teacher_voice}\t{speed}\t{self.pitch}\t{self.volume}\t{text}\n"


VOICES = (
    Voice("us_f", "pico", "us", volume=50),
    Voice("gb_f", "pico", "gb", volume=50),
    Voice("slt", "flite", "slt"),
    Voice("rms", "flite", "rms"),
    Voice("awb", "flite", "awb"),
    Voice("us_m", "pico", "us", formants=0.90, pitch=70, volume=50),
    Voice("gb_m", "pico", "gb", formants=0.92, pitch=76, volume=50),
    Voice("us_b", "pico", "us", formants=1.08, pitch=108, volume=50),
)
