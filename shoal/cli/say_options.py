"""What the flags of `say` ask for, read and refused before any model is loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from shoal.errors import InvalidRequest, TextError

if TYPE_CHECKING:
    from shoal.speech import Recording, Sampling, SpeechRequest

STDIN = "-"
STDOUT = Path("-")
# More than any text limit lets through, and little enough to hold.
MOST_BYTES = 8 << 20


def read_text_option(text: str | None, file: Path | None) -> str:
    """From the argument, a file, or standard input when it is `-` or a pipe. Raises TextError, InvalidRequest."""
    if text not in (None, STDIN) and file is not None:
        raise InvalidRequest("give the text or --file, not both")
    if file is not None:
        words = _file_words(file)
    elif text == STDIN or (text is None and not sys.stdin.isatty()):
        words = _decoded(sys.stdin.buffer, "standard input")
    elif text is None:
        raise InvalidRequest('what shall be said? Give a text: shoal say "Hello."; or a file: shoal say --file a.txt')
    else:
        words = text
    if not words.strip():
        raise TextError('the text is empty; give some words: shoal say "Hello."')
    return words


def sampling_overrides(**wishes: float | int | str | None) -> dict[str, Any]:
    """Those that were given; the model's own habits stand for the rest. Raises InvalidRequest."""
    from shoal.speech import Sampling

    given = {name: value for name, value in wishes.items() if value is not None}
    Sampling(**given)  # type: ignore[arg-type]  # checks the values
    return given


def check_output(output: Path | None, format: str | None, *, json: bool) -> None:
    """Raises InvalidRequest for a format that nobody can write."""
    from shoal.audio.formats import audio_format, format_of

    if output is None:
        if format is not None:
            raise InvalidRequest("--format is for a file: name one with -o")
        return
    if output == STDOUT and json:
        raise InvalidRequest("-o - and --json both want standard output; choose one")
    if output.is_dir():
        raise InvalidRequest(f"{output} is a directory: name a file in it")
    if format is not None:
        audio_format(format)
    elif output != STDOUT:
        format_of(output)


@dataclass(frozen=True)
class VoiceOption:
    """The name of a stored voice, a recording to imitate, or neither."""

    name: str | None = None
    recording: "Recording | None" = None

    def request(self, text: str, sampling: "Sampling") -> "SpeechRequest":
        from shoal.speech import SpeechRequest

        recordings = () if self.recording is None else (self.recording,)
        return SpeechRequest(text, voice=self.name, recordings=recordings, sampling=sampling)


def parse_voice(voice: str | None, transcript: str | None) -> VoiceOption:
    """What is or looks like a file is a recording and needs its words; anything else is the name of a voice.

    Raises AudioError, TextError, InvalidRequest.
    """
    if transcript is None:
        if voice is not None and (Path(voice).suffix or Path(voice).is_file()):
            raise InvalidRequest("--voice with a recording needs --transcript: the words that are spoken in it")
        return VoiceOption(name=voice)
    if voice is None:
        raise InvalidRequest("--transcript tells what is said in a recording: give that too, with --voice")
    from shoal.speech import Recording
    from shoal.voices.voice import DEFAULT_LIMITS, audio_bytes, check_transcript

    words = check_transcript(transcript, DEFAULT_LIMITS)
    return VoiceOption(recording=Recording(audio_bytes(Path(voice), DEFAULT_LIMITS), words))


def _file_words(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return _decoded(stream, str(file))
    except OSError as problem:
        raise TextError(f"cannot read {file}: {problem.strerror}") from problem


def _decoded(stream: BinaryIO, place: str) -> str:
    content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TextError(f"{place} holds more than {MOST_BYTES >> 20} MB of text")
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise TextError(f"{place} is not UTF-8 text: byte {problem.start} belongs to no character") from problem
