"""Something on this machine that plays sound: it gets the samples while they are made."""

import os
import queue
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    """A command that reads `format` from its standard input, or plays a finished file where `{file}` stands."""

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


# Those that talk to a sound server or card directly come first; they begin soonest.
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
    """The command of SHOAL_PLAYER, which gets wav, or the first known one on the PATH. Raises OutputError."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Player(tuple(shlex.split(chosen)))
    for player in KNOWN:
        if shutil.which(player.name):
            return player
    names = ", ".join(player.name for player in KNOWN)
    raise OutputError(
        f"no program that plays sound was found (looked for {names}): write a file with -o FILE, "
        f"or name a command that reads wav in {VARIABLE}"
    )


@contextmanager
def playing(player: Player, sample_rate: int) -> "Iterator[Callable[[Samples], None]]":
    """Plays the samples that the given function is called with; the block ends when the sound does.

    An error or an interrupt ends the sound at once. Raises OutputError when the player fails.
    """
    way = streamed if player.streams else from_a_file
    with way(player, sample_rate) as play:
        yield play


@contextmanager
def streamed(player: Player, sample_rate: int) -> "Iterator[Callable[[Samples], None]]":
    from shoal.audio.encode import encoder

    encoding = encoder(player.format, sample_rate)
    with started(player.at(sample_rate), subprocess.PIPE) as process:
        assert process.stdin is not None
        pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A player takes no more than it plays; whoever makes the speech need not wait for that.
        feeder = threading.Thread(target=feed, args=(pieces, process.stdin), name="shoal-player", daemon=True)
        feeder.start()
        try:
            yield lambda samples: pieces.put(encoding.feed(samples))
            pieces.put(encoding.finish())
        except BaseException:
            process.kill()
            raise
        finally:
            pieces.put(None)
            feeder.join()


def feed(pieces: "queue.SimpleQueue[bytes | None]", sink: BinaryIO) -> None:
    """Until None comes. A player that went away says why by its exit code; what is left for it is dropped."""
    with suppress(OSError), sink:
        while (piece := pieces.get()) is not None:
            sink.write(piece)
            sink.flush()
        return
    while pieces.get() is not None:
        pass


@contextmanager
def from_a_file(player: Player, sample_rate: int) -> "Iterator[Callable[[Samples], None]]":
    """For players that need all of it before they begin."""
    from shoal.audio.write import AudioFile

    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "speech.wav"
        with AudioFile(file, sample_rate) as audio:
            yield audio.write
        with started(player.at(sample_rate, str(file)), subprocess.DEVNULL):
            pass


@contextmanager
def started(command: list[str], stdin: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is waited for, or ended if the block fails. Raises OutputError with what it said last."""
    with tempfile.TemporaryFile() as told:
        try:
            process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=told)
        except OSError as problem:
            raise OutputError(f"{command[0]} cannot be started: {problem.strerror}") from problem
        try:
            yield process
            process.wait()
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            told.seek(0)
            lines = told.read(8192).decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"it ended with code {process.returncode}"
            raise OutputError(f"{command[0]} did not play: {reason}; write a file with -o FILE instead")
