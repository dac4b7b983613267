"""Synthesise the training corpus of `nano`: teachers speak, workers write shards, training reads them at once.

A shard is two files. `shard-00000.pcm` holds its utterances one after another, int16 mono at 16 kHz, each a whole
number of frames; `shard-00000.jsonl` holds one line per utterance. The second file appears last and by renaming, so a
shard whose lines can be read is complete, and nothing else has to be locked, cleaned up or remembered.

What a shard says depends on the plan and the shard's index only. Hence the same seed gives the same corpus with any
number of workers, a second run makes exactly the shards that are missing, and asking for more hours extends a corpus.

    python -m training.data --text build/corpus/sentences.txt --teachers build/teachers --out build/speech --hours 60
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import random
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from multiprocessing import connection
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly  # type: ignore[import-untyped]

from training.text_corpus import read_sentences

logger = logging.getLogger(__name__)

SAMPLE_RATE = 16_000
FRAME = 640  # samples per codec frame, 25 frames a second
UTTERANCES_PER_SHARD = 200

LEAD_SECONDS, TAIL_SECONDS = 0.060, 0.150
SILENCE_FLOOR = 0.02  # of the utterance's peak: below it is silence, above it is speech
TARGET_RMS, PEAK_LIMIT = 0.10, 0.97
JOIN_GAP_SECONDS = 0.25

TEMPO_RANGE = 0.08
JOIN_SHARE = 0.25
MAX_JOINED_CHARACTERS = 200
# Seconds = intercept + slope * characters, over all voices; only to turn hours into a number of shards beforehand.
SECONDS_PER_UTTERANCE, SECONDS_PER_CHARACTER = 0.33, 0.0563
# Slower or faster than this and the teacher dropped words or stumbled; such an utterance would teach a wrong text.
PLAUSIBLE_SECONDS_PER_CHARACTER = (0.025, 0.30)
TEACHER_TIMEOUT_SECONDS = 30.0

Samples = NDArray[np.int16]
Signal = NDArray[np.float64]


class TeacherFailed(RuntimeError):
    """The teacher's process died, hung or refused the sentence."""


class CorpusMismatch(ValueError):
    """The folder holds a corpus made from another plan."""


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


@dataclass(frozen=True, slots=True)
class Utterance:
    """What one voice says: usually one sentence, several when joined."""

    voice: Voice
    sentences: tuple[str, ...]
    tempo: float = 1.0

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a shard's `.jsonl`: who says what, and where in the `.pcm` (both counted in samples)."""

    voice: str
    text: str
    offset: int
    samples: int


# ---------------------------------------------------------------------------------------------------------------------
# The plan: which voice says what in which shard.


@dataclass(frozen=True)
class Plan:
    """The whole corpus as a function of an index.

    Sentences are shuffled once and read over and over. Voices take turns, and each pass over the text starts one voice
    later, so every stretch of the corpus is evenly mixed and a sentence comes back in another voice.
    """

    sentences: Sequence[str]
    voices: Sequence[Voice] = VOICES
    seed: int = 0
    vary_tempo: bool = False
    join: bool = False

    @cached_property
    def order(self) -> list[int]:
        order = list(range(len(self.sentences)))
        random.Random(f"order {self.seed}").shuffle(order)
        return order

    def utterance(self, index: int) -> Utterance:
        lap, place = divmod(index, len(self.sentences))
        voice = self.voices[(place + lap) % len(self.voices)]
        rng = random.Random(f"utterance {self.seed} {index}")
        tempo = round(1 + rng.uniform(-TEMPO_RANGE, TEMPO_RANGE), 3) if self.vary_tempo else 1.0
        sentences: tuple[str, ...] = (self.sentences[self.order[place]],)
        if self.join and rng.random() < JOIN_SHARE:
            sentences = joinable((*sentences, rng.choice(self.sentences)))
        return Utterance(voice, sentences, tempo)

    def shard(self, shard: int) -> list[Utterance]:
        first = shard * UTTERANCES_PER_SHARD
        return [self.utterance(index) for index in range(first, first + UTTERANCES_PER_SHARD)]

    def shards_for(self, hours: float) -> int:
        """Shards that last about `hours`, from the length of the text alone, so the count never depends on a run."""
        mean = sum(map(len, self.sentences)) / len(self.sentences)
        mean *= 1 + JOIN_SHARE * self.join
        seconds = SECONDS_PER_UTTERANCE + SECONDS_PER_CHARACTER * mean
        return math.ceil(hours * 3600 / (seconds * UTTERANCES_PER_SHARD))

    def settings(self) -> dict[str, object]:
        """What two runs must share to write into one folder. Hours and workers are free."""
        digest = hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()
        return {
            "text_sha256": digest,
            "voices": [asdict(voice) for voice in self.voices],
            "seed": self.seed,
            "vary_tempo": self.vary_tempo,
            "join": self.join,
        }


@dataclass(frozen=True)
class HeldoutPlan(Plan):
    """Every sentence in every voice, once, as the teacher says it."""

    def utterance(self, index: int) -> Utterance:
        sentence, voice = divmod(index, len(self.voices))
        return Utterance(self.voices[voice], (self.sentences[sentence],))

    def shard(self, shard: int) -> list[Utterance]:
        first = shard * UTTERANCES_PER_SHARD
        last = min(first + UTTERANCES_PER_SHARD, len(self.sentences) * len(self.voices))
        return [self.utterance(index) for index in range(first, last)]

    def shards_for(self, hours: float) -> int:
        return math.ceil(len(self.sentences) * len(self.voices) / UTTERANCES_PER_SHARD)


def joinable(sentences: tuple[str, ...]) -> tuple[str, ...]:
    """The sentences if they make one utterance: each but the last closed, and short enough together."""
    if sum(map(len, sentences)) > MAX_JOINED_CHARACTERS:
        return sentences[:1]
    closed = (text if text[-1] in ".?!" else text.rstrip(",;:-") + "." for text in sentences[:-1])
    return (*closed, sentences[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Teachers: one process each, a line in, samples out (training/teachers/protocol.h).


@dataclass(slots=True)
class Teacher:
    """A running teacher program."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, name: str) -> Teacher:
        command = [str((folder / name).resolve()), str((folder / f"{name}-data").resolve())]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        return cls(process)

    def ask(self, request: str) -> Samples:
        """The teacher's answer; raises TeacherFailed, after which this teacher is closed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request.encode())
            (count,) = struct.unpack("<I", self._read(4))
            samples = np.frombuffer(self._read(2 * count), dtype="<i2").astype(np.int16)
        except (OSError, TeacherFailed) as error:
            self.close()
            raise TeacherFailed(f"{error}: {request.strip()!r}") from None
        if not count:
            raise TeacherFailed(f"nothing was said: {request.strip()!r}")
        return samples

    def _read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        source = self.process.stdout.fileno()
        received = bytearray()
        while len(received) < count:
            if not select.select([source], [], [], TEACHER_TIMEOUT_SECONDS)[0]:
                raise TeacherFailed("no answer in time")
            piece = os.read(source, count - len(received))
            if not piece:
                raise TeacherFailed("the process ended")
            received += piece
        return bytes(received)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass(slots=True)
class Teachers:
    """The teachers one shard needs, started when first asked.

    They live as long as one shard: both programs draw noise from a generator that runs on from sentence to sentence,
    so a fresh start is what makes a shard's sound independent of the shards its worker made before.
    """

    folder: Path
    running: dict[str, Teacher] = field(default_factory=dict)

    def speak(self, voice: Voice, text: str, tempo: float) -> Signal:
        """Speech in [-1, 1] as the voice says it, before post-processing."""
        teacher = self.running.get(voice.teacher)
        if teacher is None or not teacher.alive:
            teacher = self.running[voice.teacher] = Teacher.start(self.folder, voice.teacher)
        samples = teacher.ask(voice.request(text, tempo))
        return scale_formants(samples / 32768.0, voice.formants)

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for teacher in self.running.values():
            teacher.close()


# ---------------------------------------------------------------------------------------------------------------------
# Sound: from what a teacher says to what a shard holds.


def scale_formants(speech: Signal, factor: float) -> Signal:
    """Speech with all frequencies times `factor`, and hence 1/factor times as long."""
    if factor == 1.0:
        return speech
    down = round(100 * factor)
    common = math.gcd(100, down)
    return np.asarray(resample_poly(speech, 100 // common, down // common), dtype=np.float64)


def trim(speech: Signal) -> Signal:
    """Speech with exactly the lead and tail of silence we want, whatever the teacher left around it."""
    loud = np.flatnonzero(np.abs(speech) > SILENCE_FLOOR * np.abs(speech).max(initial=0.0))
    if not loud.size:
        return speech[:0]
    lead, tail = round(LEAD_SECONDS * SAMPLE_RATE), round(TAIL_SECONDS * SAMPLE_RATE)
    start, end = loud[0] - lead, loud[-1] + 1 + tail
    inside = speech[max(start, 0) : end]
    return np.pad(inside, (max(-start, 0), max(end - speech.size, 0)))


def level(speech: Signal) -> Signal:
    """Speech whose active samples have the target RMS, or as near to it as the peak limit allows."""
    peak = float(np.abs(speech).max(initial=0.0))
    if not peak:
        return speech
    active = speech[np.abs(speech) > SILENCE_FLOOR * peak]
    gain = TARGET_RMS / float(np.sqrt(np.mean(active**2)))
    return speech * min(gain, PEAK_LIMIT / peak)


def whole_frames(speech: Signal) -> Signal:
    return np.pad(speech, (0, -speech.size % FRAME))


def to_int16(speech: Signal) -> Samples:
    return np.clip(np.rint(speech * 32767), -32768, 32767).astype(np.int16)


def plausible(text: str, samples: int) -> bool:
    """Whether speech of this length can be this text."""
    low, high = PLAUSIBLE_SECONDS_PER_CHARACTER
    seconds = samples / SAMPLE_RATE - LEAD_SECONDS - TAIL_SECONDS
    return low * len(text) < seconds < 1.0 + high * len(text)


def record(utterance: Utterance, teachers: Teachers) -> Samples:
    """The finished samples of an utterance; raises TeacherFailed."""
    gap = np.zeros(round(JOIN_GAP_SECONDS * SAMPLE_RATE))
    parts: list[Signal] = []
    for sentence in utterance.sentences:
        speech = level(trim(teachers.speak(utterance.voice, sentence, utterance.tempo)))
        if not plausible(sentence, speech.size):
            raise TeacherFailed(f"{speech.size} samples cannot be {sentence!r}")
        parts += [gap, speech] if parts else [speech]
    return to_int16(whole_frames(np.concatenate(parts)))


# ---------------------------------------------------------------------------------------------------------------------
# Shards on disk.


def shard_stem(out: Path, shard: int) -> Path:
    return out / f"shard-{shard:05d}"


def is_complete(out: Path, shard: int) -> bool:
    return shard_stem(out, shard).with_suffix(".jsonl").exists()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either absent or complete, whenever we are stopped."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_shard(out: Path, shard: int, utterances: Iterable[Utterance], teachers: Teachers) -> None:
    """Record and store one shard. A sentence its teacher cannot say is left out, and said so."""
    lines: list[Line] = []
    recordings: list[Samples] = []
    offset = 0
    for utterance in utterances:
        try:
            samples = record(utterance, teachers)
        except TeacherFailed as error:
            logger.warning("shard %d leaves out an utterance of %s: %s", shard, utterance.voice.name, error)
            continue
        lines.append(Line(utterance.voice.name, utterance.text, offset, samples.size))
        recordings.append(samples)
        offset += samples.size
    stem = shard_stem(out, shard)
    pcm = b"".join(samples.astype("<i2").tobytes() for samples in recordings)
    write_whole(stem.with_suffix(".pcm"), pcm)
    # Last: readers take this file as the promise that the samples are there.
    write_whole(stem.with_suffix(".jsonl"), b"".join(json.dumps(asdict(line)).encode() + b"\n" for line in lines))


def read_lines(path: Path) -> list[Line]:
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()]


def claim(out: Path, plan: Plan) -> None:
    """Make the folder this plan's own, or raise CorpusMismatch if it holds another corpus."""
    out.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(plan.settings(), indent=1)
    path = out / "plan.json"
    if path.exists() and path.read_text() != settings:
        raise CorpusMismatch(
            f"{out} holds a corpus made from other text, voices, seed or options; choose another --out"
        )
    write_whole(path, settings.encode())
    write_whole(out / "voices.json", json.dumps([voice.name for voice in plan.voices]).encode())


# ---------------------------------------------------------------------------------------------------------------------
# Reading.


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one utterance lies: its shard's mapped samples and its line."""

    pcm: Samples
    line: Line


class Corpus:
    """The complete shards of a folder; `refresh` adds those finished since. Indices never change meaning.

    `corpus[i]` is (int16 samples, text, voice); the samples are a read-only view into the mapped file.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.entries: list[Entry] = []
        self._seen: set[str] = set()
        self.refresh()

    def refresh(self) -> int:
        """Map newly completed shards; returns how many utterances were added."""
        before = len(self.entries)
        for path in sorted(self.folder.glob("shard-*.jsonl")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                self.entries += self._map(path)
        return len(self.entries) - before

    @staticmethod
    def _map(path: Path) -> list[Entry]:
        lines = read_lines(path)
        if not lines:
            return []
        pcm: Samples = np.memmap(path.with_suffix(".pcm"), dtype="<i2", mode="r")
        return [Entry(pcm, line) for line in lines]

    @property
    def samples(self) -> int:
        return sum(entry.line.samples for entry in self.entries)

    @property
    def hours(self) -> float:
        return self.samples / SAMPLE_RATE / 3600

    @property
    def voices(self) -> list[str]:
        return [str(name) for name in json.loads((self.folder / "voices.json").read_text())]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Samples, str, str]:
        entry = self.entries[index]
        line = entry.line
        return entry.pcm[line.offset : line.offset + line.samples], line.text, line.voice

    def __iter__(self) -> Iterator[tuple[Samples, str, str]]:
        return (self[index] for index in range(len(self)))

    def by_voice(self) -> dict[str, list[int]]:
        """Indices of each voice's utterances."""
        ranked = sorted(range(len(self)), key=lambda index: self.entries[index].line.voice)
        return {v: list(group) for v, group in groupby(ranked, key=lambda index: self.entries[index].line.voice)}


# ---------------------------------------------------------------------------------------------------------------------
# Workers and progress.


def work(plan: Plan, teachers: Path, out: Path, shards: Sequence[int]) -> None:
    """Make these shards, one after another. Leaves between shards when the parent is gone."""
    # The parent decides when to stop; a Ctrl-C must not kill the teachers under a half-made shard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    for shard in shards:
        if parent is not None and not parent.is_alive():
            return
        with Teachers(teachers) as running:
            write_shard(out, shard, plan.shard(shard), running)


def generate(plan: Plan, teachers: Path, out: Path, hours: float, processes: int) -> int:
    """Make the shards of the plan that are missing and return how many there were; raises on a failed worker."""
    claim(out, plan)
    missing = [shard for shard in range(plan.shards_for(hours)) if not is_complete(out, shard)]
    # Striding hands out the first shards first, so training can start on them while the last are made.
    shares = [missing[k::processes] for k in range(min(processes, len(missing)))]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(plan, teachers, out, share), daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    try:
        follow(workers, out, missing)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        for leftover in out.glob(".*.tmp"):
            leftover.unlink()
    return len(missing)


def follow(workers: Sequence[multiprocessing.process.BaseProcess], out: Path, missing: Sequence[int]) -> None:
    """Report progress until every worker is done; raises if one fails."""
    started, reported, running = time.monotonic(), -1, bool(workers)
    while running:
        workers_wait(workers, 2.0)
        # Looked at before the exit codes: a worker that ends in between is seen in another round.
        running = any(worker.is_alive() for worker in workers)
        if any(worker.exitcode for worker in workers):
            raise RuntimeError("a worker failed; complete shards are kept, run again to go on")
        done = [shard for shard in missing if is_complete(out, shard)]
        if len(done) != reported:
            reported = len(done)
            print(progress(out, done, len(missing), time.monotonic() - started), flush=True)


def workers_wait(workers: Sequence[multiprocessing.process.BaseProcess], seconds: float) -> None:
    """Sleep until a worker ends or the time is over."""
    connection.wait([worker.sentinel for worker in workers if worker.is_alive()], seconds)


def progress(out: Path, done: Sequence[int], total: int, elapsed: float) -> str:
    stored = sum(shard_stem(out, shard).with_suffix(".pcm").stat().st_size for shard in done)
    seconds = stored / 2 / SAMPLE_RATE
    left = elapsed / len(done) * (total - len(done)) if done else math.inf
    eta = f"{left:.0f} s left" if done else "starting"
    return f"{len(done)}/{total} shards, {seconds / 3600:.2f} h, {seconds / elapsed:.0f}x real time, {eta}"


# ---------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="one sentence per line (.gz read too)")
    parser.add_argument("--teachers", type=Path, required=True, help="folder made by training/teachers/build.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--hours", type=float, default=1.0, help="length of the corpus, about")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--voices", nargs="+", choices=[voice.name for voice in VOICES], metavar="VOICE")
    parser.add_argument("--vary-tempo", action="store_true", help=f"each utterance up to {TEMPO_RANGE:.0%} off tempo")
    parser.add_argument("--join", action="store_true", help=f"{JOIN_SHARE:.0%} of utterances are two sentences")
    parser.add_argument("--heldout", action="store_true", help="every sentence of --text once in every voice")
    return parser.parse_args(arguments)


def make_plan(options: argparse.Namespace) -> Plan:
    voices = [voice for voice in VOICES if options.voices is None or voice.name in options.voices]
    sentences = read_sentences(options.text)
    if options.heldout:
        return HeldoutPlan(sentences, voices)
    return Plan(sentences, voices, options.seed, options.vary_tempo, options.join)


def stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, stop)
    try:
        made = generate(make_plan(options), options.teachers, options.out, options.hours, options.processes)
    except KeyboardInterrupt:
        raise SystemExit("stopped; complete shards are kept, run again to go on") from None
    corpus = Corpus(options.out)
    print(f"{made} shards made; {options.out} holds {len(corpus)} utterances, {corpus.hours:.2f} h")


if __name__ == "__main__":
    main()
