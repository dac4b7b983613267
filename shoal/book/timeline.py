"""Lay the spoken pieces of a book end to end: silence trimmed, loudness even, pauses between sentences.

Two passes over the files, one piece in memory at a time: `measure` reads lengths and loudness, so that all times are
known before the first sample is encoded, and `render` yields the samples.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median

import numpy as np

from shoal.audio.loudness import LoudnessMeter, limit_peaks
from shoal.audio.wav import open_wav
from shoal.book.parts import part_cuts, words_of
from shoal.book.sentences import PIECE_PAUSE
from shoal.book.word_times import TimedWord, read_words
from shoal.book.work import PlannedChapter, PlannedPiece, PlannedSentence, Speaker, pieces_of
from shoal.errors import OutputError
from shoal.speech import Samples

TARGET_LUFS = -20.0  # audiobook shops ask for an RMS of -23 to -18 dB
MAX_PEAK = 0.7  # fraction of full scale, -3.1 dB
# Maximum correction of a piece relative to the median loudness of its voice, so that a whisper stays quiet.
MAX_DEVIATION = 6.0  # decibels
CHAPTER_START, CHAPTER_END = 0.5, 2.0  # seconds of silence
EDGE_SECONDS, FADE_SECONDS = 0.06, 0.005  # silence kept around speech; fade at each end
SILENCE = 10 ** (-40 / 20)  # relative to the loudest 10 ms of a piece


@dataclass(frozen=True, slots=True)
class Take:
    """A spoken piece: the samples of its file without silence, and its gain."""

    file: Path
    piece: PlannedPiece
    start: int  # samples
    end: int
    continued: bool = False  # speech continues without a pause in the piece of the next sentence
    continues: bool = False  # speech of the previous sentence continues without a pause in this piece
    gain: float = 1.0  # factor

    def samples(self, rate: int) -> Samples:
        pcm, _ = read_piece(self.file)
        # Limit the whole file: limiters for single sentences would change the volume where speech continues.
        speech = limit_peaks(pcm * np.float32(self.gain), rate, MAX_PEAK)[self.start : self.end]
        return _faded(speech, round(FADE_SECONDS * rate), start=not self.continues, end=not self.continued)


@dataclass(frozen=True, slots=True)
class TimedSentence:
    planned: PlannedSentence
    takes: tuple[Take, ...]
    start: int  # samples from the start of the chapter
    end: int

    def words(self, rate: int) -> list[TimedWord]:
        """Return the words with times in seconds from the start of the chapter; empty if some piece has none."""
        at, words = self.start, list[TimedWord]()
        for take in self.takes:
            found, length = words_of(read_words(take.file), take.piece), take.end - take.start
            if not found:
                return []
            words += [word.within((at - take.start) / rate, at / rate, (at + length) / rate) for word in found]
            at += length + round(PIECE_PAUSE * rate)
        return words


@dataclass(frozen=True, slots=True)
class TimedChapter:
    planned: PlannedChapter
    sentences: tuple[TimedSentence, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Chapters with the times of their sentences."""

    rate: int  # samples per second
    chapters: tuple[TimedChapter, ...]

    @property
    def seconds(self) -> float:
        return sum(chapter.samples for chapter in self.chapters) / self.rate

    def starts(self) -> Iterator[tuple[float, TimedChapter]]:
        """Yield each chapter with the second it starts at when all are in one file."""
        at = 0
        for chapter in self.chapters:
            yield at / self.rate, chapter
            at += chapter.samples


def build_timeline(chapters: Iterable[PlannedChapter], file_of: Callable[[str], Path | None]) -> Timeline:
    """Measure all pieces and return the times of every sentence. `file_of` returns the file of a piece.

    A sentence with a piece that has no file is left out. Raises OutputError for a file that another program changed.
    """
    chapters = list(chapters)
    measured: dict[PlannedPiece, _Measured] = {}
    for piece in dict.fromkeys(piece for chapter in chapters for piece in pieces_of(chapter)):
        if (path := file_of(piece.id)) is not None:
            measured[piece] = _measure(path, piece)
    rates = {each.rate for each in measured.values()}
    if len(rates) != 1:
        raise OutputError("the work folder has pieces of several sample rates, or none: remove it and start again")
    takes, rate = _takes(measured), rates.pop()
    return Timeline(rate, tuple(_time_chapter(chapter, takes, rate) for chapter in chapters))


def render(chapter: TimedChapter, rate: int) -> Iterator[Samples]:
    """Yield the samples of a chapter, as many as its `samples`."""
    at = 0
    for sentence in chapter.sentences:
        yield _silence(sentence.start - at)
        at = sentence.start
        for number, take in enumerate(sentence.takes):
            pause = round(PIECE_PAUSE * rate) if number else 0
            yield _silence(pause)
            yield take.samples(rate)
            at += pause + take.end - take.start
    yield _silence(chapter.samples - at)


def read_piece(path: Path) -> tuple[Samples, int]:
    """Return the samples of a file of the work folder, and their rate. Raises OutputError."""
    try:
        reader = open_wav(path.read_bytes())
    except OSError as problem:
        raise OutputError(f"cannot read {path}: {problem.strerror or problem}") from None
    if reader is None or reader.channels != 1:
        raise OutputError(f"{path} was changed by another program: remove it and run the command again")
    blocks = [block[:, 0] for _, block in reader.blocks()]
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32), reader.rate


@dataclass(frozen=True, slots=True)
class _Measured:
    take: Take
    rate: int
    lufs: float | None  # None for a piece too short to measure


def _measure(path: Path, piece: PlannedPiece) -> _Measured:
    samples, rate = read_piece(path)
    words = () if piece.part is None else read_words(path)
    begin, end = part_cuts(samples, rate, piece, words)
    first, last = (begin.sample + each for each in speech_span(samples[begin.sample : end.sample], rate))
    meter = LoudnessMeter(rate)
    # Measure the whole file: sentences that were spoken together have one loudness.
    whole = slice(*speech_span(samples, rate))
    if whole.stop > whole.start:
        meter.feed(samples[whole])
    first, last = first if begin.silent else begin.sample, last if end.silent else end.sample
    return _Measured(Take(path, piece, first, last, not end.silent, not begin.silent), rate, meter.lufs)


def _takes(measured: dict[PlannedPiece, _Measured]) -> dict[PlannedPiece, Take]:
    """Return the takes by piece, each with its gain."""
    by_speaker: dict[Speaker, list[float]] = {}
    for piece, each in measured.items():
        if each.lufs is not None:
            by_speaker.setdefault(piece.speaker, []).append(each.lufs)
    medians = {speaker: median(values) for speaker, values in by_speaker.items()}
    return {
        piece: replace(each.take, gain=_gain(each.lufs, medians.get(piece.speaker))) for piece, each in measured.items()
    }


def _gain(lufs: float | None, ordinary: float | None) -> float:
    """Return the factor that brings a piece to the target; one too short to measure gets that of its voice."""
    if ordinary is None:
        return 1.0
    own = ordinary if lufs is None else float(np.clip(lufs, ordinary - MAX_DEVIATION, ordinary + MAX_DEVIATION))
    return float(10 ** ((TARGET_LUFS - own) / 20))


def _time_chapter(chapter: PlannedChapter, takes: dict[PlannedPiece, Take], rate: int) -> TimedChapter:
    at, sentences = round(CHAPTER_START * rate), list[TimedSentence]()
    end = at
    spoken = [each for each in chapter.sentences if all(piece in takes for piece in each.pieces)]
    for planned, following in zip_longest(spoken, spoken[1:]):
        *before, last = (takes[piece] for piece in planned.pieces)
        if following is None or not takes[following.pieces[0]].continues:
            last = replace(last, continued=False)  # the sentence in which it continues was left out
        parts = (*before, last)
        length = sum(take.end - take.start for take in parts) + round(PIECE_PAUSE * rate) * (len(parts) - 1)
        end = at + length
        sentences.append(TimedSentence(planned, parts, at, end))
        at = end if parts[-1].continued else end + round(planned.sentence.pause * rate)
    return TimedChapter(chapter, tuple(sentences), end + round(CHAPTER_END * rate))


def speech_span(samples: Samples, rate: int) -> tuple[int, int]:
    """Return the span of speech without surrounding silence; the whole span for very short or silent samples."""
    window = max(1, rate // 100)
    whole = len(samples) // window
    if not whole:
        return 0, len(samples)
    power = np.square(samples[: whole * window].reshape(whole, window)).mean(axis=1)
    loud = np.flatnonzero(power > max(float(power.max()) * SILENCE**2, 1e-10))
    if not loud.size:
        return 0, len(samples)
    edge = round(EDGE_SECONDS * rate)
    return max(0, int(loud[0]) * window - edge), min(len(samples), (int(loud[-1]) + 1) * window + edge)


def _faded(samples: Samples, length: int, *, start: bool, end: bool) -> Samples:
    length = min(length, len(samples) // 2)
    if not length:
        return samples
    ramp = np.linspace(0, 1, length, dtype=np.float32)
    faded = samples.copy()
    if start:
        faded[:length] *= ramp
    if end:
        faded[-length:] *= ramp[::-1]
    return faded


def _silence(count: int) -> Samples:
    return np.zeros(count, dtype=np.float32)
