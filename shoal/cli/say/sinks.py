"""Write audio as it is generated: to a file, a player or both, and its subtitles."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.say.options import write_subtitles
from shoal.cli.say.prosody import ProsodyOptions

if TYPE_CHECKING:
    from shoal.audio.pcm import Samples
    from shoal.cli.say.player import Player
    from shoal.cli.say.progress import SpeechProgress
    from shoal.speech import AudioChunk, Word


@dataclass(frozen=True)
class AudioSinks:
    """Destinations of the audio: a file, a player, or both; and of its subtitles."""

    output: Path | None
    format: str | None
    player: "Player | None"
    prosody: ProsodyOptions
    subtitles: Path | None = None

    def write(
        self, sample_rate: int, chunks: "Iterable[tuple[AudioChunk, tuple[int, int]]]", progress: "SpeechProgress"
    ) -> None:
        """Write chunks as they arrive, each with its turn and the number of turns."""
        with ExitStack() as stack:
            writers, adjust = self.open(stack, sample_rate), self.prosody.filter(sample_rate)
            words: list[Word] = []
            for chunk, turn in chunks:
                words += chunk.words
                _write(writers, adjust.feed(chunk.samples))
                progress.record(chunk, *turn, speed=self.prosody.speed)
            _write(writers, adjust.finish())
            if self.subtitles is not None:
                write_subtitles(self.subtitles, words, self.prosody.speed)
            if self.player is not None:
                progress.show_playing()

    def open(self, stack: ExitStack, sample_rate: int) -> "list[Callable[[Samples], None]]":
        """Open the destinations on `stack` and return the functions that write samples to them."""
        from shoal.audio.write import AudioFile
        from shoal.cli.say.player import playing

        writers: list[Callable[[Samples], None]] = []
        if self.player is not None:
            writers.append(stack.enter_context(playing(self.player, sample_rate)))
        # The file is opened last and so closed first: it is complete before playback has finished.
        if self.output is not None:
            writers.append(stack.enter_context(AudioFile(self.output, sample_rate, format=self.format)).write)
        return writers

    def as_json(self) -> dict[str, object]:
        player = None if self.player is None else self.player.name
        found: dict[str, object] = {"output": None if self.output is None else str(self.output), "player": player}
        return found if self.subtitles is None else {**found, "subtitles": str(self.subtitles)}

    def __str__(self) -> str:
        return str(self.output) if self.output is not None else self.player.name if self.player is not None else ""


def _write(writers: "list[Callable[[Samples], None]]", samples: "Samples") -> None:
    for write in writers:
        write(samples)
