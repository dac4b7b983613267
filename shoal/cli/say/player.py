"""Audio playback through an external program, fed while the audio is generated."""

import os
import queue
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from shoal.errors import OutputError

if TYPE_CHECKING:
    from shoal.audio.pcm import Samples

VARIABLE = "SHOAL_PLAYER"
FILE = "{file}"


@dataclass(frozen=True, slots=True)
class Player:
    """A playback command. It reads `format` from stdin, or a complete file if `{file}` is among its arguments."""

    command: tuple[str, ...]
    format: str = "wav"

    @property
    def name(self) -> str:
        return self.command[0]

    @property
    def streams(self) -> bool:
        return FILE not in self.command

    def at(self, sample_rate: int, file: str = "") -> list[str]:
        return [part.replace("{rate}", str(sample_rate)).replace(FILE, file) for part in self.command]


# In order of preference: players that write to a sound server or card directly start fastest.
KNOWN = (
    Player(("paplay", "--raw", "--format=s16le", "--rate={rate}", "--channels=1"), "pcm"),
    Player(("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-r", "{rate}", "-c", "1", "-"), "pcm"),
    Player(("play", "-q", "-t", "raw", "-e", "signed", "-b", "16", "-r", "{rate}", "-c", "1", "-"), "pcm"),
    Player(("ffplay", "-nodisp", "-autoexit", "-loglevel", "error", "-i", "-")),
    Player(("mpv", "--no-terminal", "--no-video", "-")),
    Player(("afplay", FILE)),
    Player(("pw-play", FILE)),
)


def find_player() -> Player:
    """Return the command in SHOAL_PLAYER, which is fed WAV, or the first known player on the PATH.

    Raises OutputError if there is none.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Player(tuple(shlex.split(chosen)))
    for player in KNOWN:
        if shutil.which(player.name):
            return player
    names = ", ".join(player.name for player in KNOWN)
    raise OutputError(
        f"no audio player was found (looked for {names}): write a file with -o FILE, "
        f"or set {VARIABLE} to a command that reads WAV from standard input"
    )


@contextmanager
def playing(player: Player, sample_rate: int) -> "Iterator[Callable[[Samples], None]]":
    """Yield a function that plays samples; the block exits when playback has finished.

    An error or an interrupt stops playback immediately. Raises OutputError when the player fails.
    """
    play_with = streamed if player.streams else from_a_file
    with play_with(player, sample_rate) as play:
        yield play


@contextmanager
def streamed(player: Player, sample_rate: int) -> "Iterator[Callable[[Samples], None]]":
    from shoal.audio.encode import encoder

    encoding = encoder(player.format, sample_rate)
    with started(player.at(sample_rate), subprocess.PIPE) as process:
        assert process.stdin is not None
        pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # The player reads at playback speed; a thread feeds it, so that generation does not wait.
        feeder = threading.Thread(target=feed, args=(pieces, process.stdin), name="shoal-player", daemon=True)
        feeder.start()
        try:
            with ExitStack() as on_error:
                on_error.callback(process.kill)
                yield lambda samples: pieces.put(encoding.feed(samples))
                pieces.put(encoding.finish())
                on_error.pop_all()
        finally:
            pieces.put(None)
            feeder.join()


def feed(pieces: "queue.SimpleQueue[bytes | None]", sink: BinaryIO) -> None:
    """Write pieces to the player until None arrives. If the player exits early, drop the rest."""
    with suppress(OSError), sink:
        while (piece := pieces.get()) is not None:
            sink.write(piece)
            sink.flush()
        return
    while pieces.get() is not None:
        pass


@contextmanager
def from_a_file(player: Player, sample_rate: int) -> "Iterator[Callable[[Samples], None]]":
    """Write a temporary file and play it when complete, for players that cannot read from a pipe."""
    from shoal.audio.write import AudioFile

    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "speech.wav"
        with AudioFile(file, sample_rate) as audio:
            yield audio.write
        with started(player.at(sample_rate, str(file)), subprocess.DEVNULL):
            pass


@contextmanager
def started(command: list[str], stdin: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a player process for the block: wait for it at the end, kill it if the block fails.

    Raises OutputError with the last line of its standard error if it cannot be started or exits with an error.
    """
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr)
        except OSError as problem:
            raise OutputError(f"{command[0]} cannot be started: {problem.strerror}") from problem
        try:
            yield process
            process.wait()
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            stderr.seek(0)
            lines = stderr.read(8192).decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            raise OutputError(f"{command[0]} failed: {reason}; write a file with -o FILE instead")
