"""Verdicts of the judges, cached by the content of a clip: judging is slow, and most clips do not change."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.errors import AudioError
from training.evaluate.manifest import Clip
from training.evaluate.wav import faults_of, read_wav
from training.judges import Judges, at_judge_rate


@dataclass(frozen=True, slots=True)
class Verdict:
    """Results that depend on the samples alone, so they are cached under their hash."""

    heard: str
    mos: float | None
    embedding: list[float] | None
    seconds: float
    faults: list[str]


def judge(content: bytes, judges: Judges) -> Verdict:
    try:
        samples, rate = read_wav(content)
    except AudioError:
        return Verdict("", None, None, 0.0, ["unreadable"])
    faults, seconds = faults_of(samples, rate), len(samples) / rate
    if "nan" in faults or "empty" in faults:
        return Verdict("", None, None, seconds, faults)
    samples = at_judge_rate(samples, rate)
    embedding = [round(float(value), 5) for value in judges.embed(samples)]
    return Verdict(judges.transcribe(samples), round(judges.score(samples), 4), embedding, seconds, faults)


@dataclass(slots=True)
class VerdictStore:
    """Cache of verdicts in a JSON lines file, by content and judges; a line is appended per judged clip."""

    path: Path
    known: dict[str, Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            # A line cut short by a crash, or of an older shape, only costs judging that clip again.
            try:
                row = json.loads(line)
                key = row.pop("key")
                self.known[key] = Verdict(**row)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue

    def verdict(self, content: bytes, judges: Judges) -> Verdict:
        key = hashlib.sha256(judges.name.encode() + b"\0" + content).hexdigest()
        if key not in self.known:
            self.known[key] = judge(content, judges)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(self.known[key])}) + "\n")
        return self.known[key]


def judge_clips(clips: Iterable[Clip], judges: Judges, store: VerdictStore) -> tuple[list[tuple[Clip, Verdict]], bool]:
    """Return the judged clips and whether all were judged; Ctrl-C keeps the finished ones."""
    judged = []
    try:
        for clip in clips:
            content = clip.path.read_bytes() if clip.path.is_file() else b""
            judged.append((clip, store.verdict(content, judges)))
    except KeyboardInterrupt:
        return judged, False
    return judged, True
