"""How far a speech has come, and how fast: a line on standard error while it is made."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.status import Status

if TYPE_CHECKING:
    from shoal.speech import AudioChunk, FinishReason


class SpeechProgress:
    """Counts seconds of audio against seconds of work, from the moment it is made."""

    def __init__(self, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._line: Status | None = console.status("reading the model") if shown and console.is_terminal else None
        self._started = time.perf_counter()
        self.seconds = 0.0  # of audio
        self.wall = 0.0  # until the last of it
        self.finish: FinishReason | None = None
        self.first_audio: float | None = None  # seconds until it came

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
        """Seconds of work per second of audio; None as long as there is none."""
        return self.wall / self.seconds if self.seconds else None

    def begin(self) -> None:
        """Everything is loaded: the speech begins now."""
        self._started = time.perf_counter()
        self._show("reading the text")

    def heard(self, chunk: "AudioChunk", turn: int = 1, turns: int = 1) -> None:
        """`turn` of `turns` is being spoken: how far a long text has come."""
        if chunk.seconds and self.first_audio is None:
            self.first_audio = self.elapsed
        self.seconds += chunk.seconds
        self.wall, self.finish = self.elapsed, chunk.finish
        bar = f"{_bar((turn - 1) / turns)} part {turn} of {turns}, " if turns > 1 else ""
        self._show(f"{bar}{self.seconds:.1f} s of speech, RTF {self.rtf or 0:.2f}")

    def only_playing(self) -> None:
        """All of it is made, and not all of it heard."""
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
        cut = ", cut off at its most frames" if self.finish is not None and self.finish.value == "length" else ""
        return f"{self.seconds:.1f} s of speech in {self.wall:.1f} s (RTF {self.rtf or 0:.2f}{first}){cut}"

    def _show(self, what: str) -> None:
        if self._line is not None:
            self._line.update(what)


def _bar(fraction: float, width: int = 20) -> str:
    full = round(width * fraction)
    return "[cyan]" + "━" * full + "[/][dim]" + "━" * (width - full) + "[/]"
