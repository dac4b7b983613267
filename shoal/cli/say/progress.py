"""Progress of `shoal say`: a status line on standard error and the final figures."""

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.status import Status

    from shoal.speech import AudioChunk, FinishReason


class SpeechProgress:
    """Measures seconds of audio against wall time, from construction or the last `begin`."""

    def __init__(self, *, shown: bool) -> None:
        self._line = _status_line("loading the model") if shown else None
        self._started = time.perf_counter()
        self.seconds = 0.0  # seconds of audio
        self.wall = 0.0  # seconds until the last chunk
        self.finish: FinishReason | None = None
        self.first_audio: float | None = None  # seconds until the first chunk

    def __enter__(self) -> Self:
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    @property
    def rtf(self) -> float | None:
        """Seconds of work per second of audio; None before the first audio."""
        return self.wall / self.seconds if self.seconds else None

    def begin(self) -> None:
        """Restart the clock: the model is loaded and generation begins."""
        self._started = time.perf_counter()
        self._show("preparing the text")

    def record(self, chunk: "AudioChunk", turn: int = 1, turns: int = 1, *, speed: float = 1.0) -> None:
        """Count a chunk of turn `turn` of `turns`, which is written at `speed`, and update the status line."""
        if chunk.seconds and self.first_audio is None:
            self.first_audio = self.elapsed
        self.seconds += chunk.seconds / speed
        self.wall, self.finish = self.elapsed, chunk.finish
        bar = f"{_bar((turn - 1) / turns)} turn {turn} of {turns}, " if turns > 1 else ""
        self._show(f"{bar}{self.seconds:.1f} s of speech, RTF {self.rtf or 0:.2f}")

    def show_playing(self) -> None:
        """Show that generation is done and playback continues."""
        self._show("playing")

    def as_json(self) -> dict[str, object]:
        return {
            "seconds": round(self.seconds, 3),
            "wall_seconds": round(self.wall, 3),
            "first_audio_seconds": None if self.first_audio is None else round(self.first_audio, 3),
            "rtf": None if self.rtf is None else round(self.rtf, 3),
            "finish": self.finish.value if self.finish else None,
        }

    def __str__(self) -> str:
        first = f", first audio after {self.first_audio:.2f} s" if self.first_audio is not None else ""
        cut = (
            ", cut off at the maximum number of frames"
            if self.finish is not None and self.finish.value == "length"
            else ""
        )
        return f"{self.seconds:.1f} s of speech in {self.wall:.1f} s (RTF {self.rtf or 0:.2f}{first}){cut}"

    def _show(self, status: str) -> None:
        if self._line is not None:
            self._line.update(status)


def _status_line(text: str) -> "Status | None":
    """Return a status line on standard error; None if that is not a terminal. Importing rich takes 25 ms."""
    forced = os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE")
    if not (sys.stderr.isatty() or forced):
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else None


def _bar(fraction: float, width: int = 20) -> str:
    full = round(width * fraction)
    return "[cyan]" + "━" * full + "[/][dim]" + "━" * (width - full) + "[/]"
