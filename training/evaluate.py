"""Judge spoken clips and compare the systems that spoke them.

    python -m training.evaluate MANIFEST --json out.json --markdown out.md --gate "wer:resynthesis<=teacher+5"

The manifest has a JSON object per line: path (of a WAV file, relative to the manifest), text, voice, system. Clips of
different systems with the same voice and text form a pair. One system is the reference: it gives the voices' centroids
and the expected durations.
"""

import argparse
import hashlib
import json
import os
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.errors import AudioError, InvalidRequest, ShoalError
from training.judges import (
    ErrorCount,
    Judges,
    Samples,
    at_judge_rate,
    character_errors,
    cosine_similarity,
    standard_judges,
    word_errors,
)

SCHEMA = "shoal.quality/1"
RUNAWAY = 3.0
SHORTEST = 0.1
QUIETEST = 1e-3
FULL_SCALE = 0.9999
# One sample at full scale is a peak; several in a row are a peak cut off.
CLIPPED_RUN = 3
INTERRUPTED = 130


# --- what is judged -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clip:
    path: Path
    text: str
    voice: str
    system: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.voice, self.text


def read_manifest(manifest: Path) -> list[Clip]:
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"{manifest}: {error.strerror}") from error
    clips = [_clip(line, f"{manifest}:{n}", manifest.parent) for n, line in enumerate(lines, 1) if line.strip()]
    if not clips:
        raise InvalidRequest(f"{manifest}: no clips")
    return clips


def _clip(line: str, where: str, folder: Path) -> Clip:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: {error}") from error
    if not isinstance(row, dict) or set(row) != {"path", "text", "voice", "system"}:
        raise InvalidRequest(f"{where}: needs exactly path, text, voice and system")
    if not all(isinstance(value, str) and value for value in row.values()):
        raise InvalidRequest(f"{where}: every field is a string that is not empty")
    return Clip(folder / row["path"], row["text"], row["voice"], row["system"])


def first_sentences(clips: Sequence[Clip], limit: int) -> list[Clip]:
    """The clips of the first `limit` sentences, by all voices and systems, so that pairs stay whole."""
    kept = set(list(dict.fromkeys(clip.text for clip in clips))[:limit])
    return [clip for clip in clips if clip.text in kept]


# --- samples --------------------------------------------------------------------------------------------------------


def read_wav(content: bytes) -> tuple[Samples, int]:
    """Mono samples in [-1, 1] and their rate, of 16-bit PCM or of 32-bit float, which alone can carry NaN."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise AudioError("not a WAV file")
    chunks = dict(_chunks(content))
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise AudioError("a WAV file without format or samples")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunks[b"fmt "])
    kind = int.from_bytes(chunks[b"fmt "][24:26], "little") if kind == 0xFFFE else kind
    if (kind, bits) not in {(1, 16), (3, 32)} or not channels or not rate:
        raise AudioError(f"a WAV file of {bits} bits in format {kind}; 16-bit PCM or 32-bit float is read")
    data = chunks[b"data"]
    data = data[: len(data) // (channels * bits // 8) * (channels * bits // 8)]
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768 if kind == 1 else np.frombuffer(data, "<f4")
    return samples.reshape(-1, channels).mean(1, dtype=np.float32), rate


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        yield name, content[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def faults_of(samples: Samples, rate: int) -> list[str]:
    """What is wrong with the samples themselves: nan, empty or clipped."""
    if not np.isfinite(samples).all():
        return ["nan"]
    if samples.size < SHORTEST * rate or float(np.sqrt(np.mean(samples**2))) < QUIETEST:
        return ["empty"]
    return ["clipped"] if _longest_run(np.abs(samples) >= FULL_SCALE) >= CLIPPED_RUN else []


def _longest_run(flags: NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))


# --- verdicts, kept per content -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that the samples alone decide, so it can be kept under their hash."""

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
    """Verdicts by content and judges in a file of JSON lines; a line is added as soon as a clip is judged."""

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
    """The judged clips and whether they are all; Ctrl-C ends the work and keeps what is done."""
    judged = []
    try:
        for clip in clips:
            content = clip.path.read_bytes() if clip.path.is_file() else b""
            judged.append((clip, store.verdict(content, judges)))
    except KeyboardInterrupt:
        return judged, False
    return judged, True


# --- scores ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """A clip against its text, its voice and the reference system."""

    clip: Clip
    verdict: Verdict
    words: ErrorCount
    characters: ErrorCount
    similarity: float | None
    nearest: str | None
    expected_seconds: float | None
    faults: list[str]


def score_clips(judged: Sequence[tuple[Clip, Verdict]], reference: str) -> list[Score]:
    spoken = [(clip, verdict) for clip, verdict in judged if clip.system == reference]
    voices, durations = Centroids(spoken), Durations(spoken)
    return [_score(clip, verdict, voices, durations) for clip, verdict in judged]


def _score(clip: Clip, verdict: Verdict, voices: "Centroids", durations: "Durations") -> Score:
    similarity = voices.similarity(clip.text, verdict.embedding)
    expected = durations.expected(clip)
    runaway = expected is not None and verdict.seconds > RUNAWAY * expected
    return Score(
        clip=clip,
        verdict=verdict,
        words=word_errors(clip.text, verdict.heard),
        characters=character_errors(clip.text, verdict.heard),
        similarity=similarity.get(clip.voice),
        nearest=max(similarity, key=lambda voice: similarity[voice]) if clip.voice in similarity else None,
        expected_seconds=expected,
        faults=[*verdict.faults, "runaway"] if runaway else verdict.faults,
    )


class Centroids:
    """Mean embedding per voice of the reference system, each time without the sentence in question: a clip must be
    like its voice, not like itself or like the same words."""

    def __init__(self, spoken: Sequence[tuple[Clip, Verdict]]) -> None:
        self._by_voice: dict[str, dict[str, Samples]] = defaultdict(dict)
        for clip, verdict in spoken:
            if verdict.embedding is not None:
                self._by_voice[clip.voice][clip.text] = np.array(verdict.embedding, dtype=np.float32)

    def similarity(self, text: str, embedding: list[float] | None) -> dict[str, float]:
        if embedding is None:
            return {}
        own, found = np.array(embedding, dtype=np.float32), {}
        for voice, sentences in self._by_voice.items():
            others = [vector for sentence, vector in sentences.items() if sentence != text]
            if others:
                found[voice] = cosine_similarity(own, np.mean(others, axis=0))
        return found


class Durations:
    """Expected seconds: those of the pair in the reference system, else by the pace of its voice, else by its pace."""

    def __init__(self, spoken: Sequence[tuple[Clip, Verdict]]) -> None:
        sound = [(clip, verdict.seconds) for clip, verdict in spoken if verdict.embedding is not None]
        self._pairs = {clip.pair: seconds for clip, seconds in sound}
        self._pace: dict[str, list[float]] = defaultdict(list)
        for clip, seconds in sound:
            self._pace[clip.voice].append(seconds / len(clip.text))

    def expected(self, clip: Clip) -> float | None:
        if clip.pair in self._pairs:
            return self._pairs[clip.pair]
        paces = self._pace.get(clip.voice) or [pace for paces in self._pace.values() for pace in paces]
        return float(np.median(paces)) * len(clip.text) if paces else None


# --- metrics: every one is a sum over a sum, so that clips pool and resample alike -----------------------------------


def _mean_of(value: float | None) -> tuple[float, float]:
    return (0.0, 0.0) if value is None else (value, 1.0)


METRICS: dict[str, Callable[[Score], tuple[float, float]]] = {
    "wer": lambda score: (100.0 * score.words.edits, score.words.length),
    "cer": lambda score: (100.0 * score.characters.edits, score.characters.length),
    "mos": lambda score: _mean_of(score.verdict.mos),
    "similarity": lambda score: _mean_of(score.similarity),
    "nearest": lambda score: _mean_of(None if score.nearest is None else 100.0 * (score.nearest == score.clip.voice)),
    "seconds": lambda score: _mean_of(score.verdict.seconds),
    "length": lambda score: (score.verdict.seconds, score.expected_seconds) if score.expected_seconds else (0.0, 0.0),
    "faults": lambda score: (100.0 * bool(score.faults), 1.0),
}
COMPARED = ("wer", "cer", "mos", "similarity")


def measure(metric: str, scores: Iterable[Score]) -> float | None:
    parts = [METRICS[metric](score) for score in scores]
    below = sum(part[1] for part in parts)
    return sum(part[0] for part in parts) / below if below else None


@dataclass(frozen=True, slots=True)
class Summary:
    system: str
    voice: str
    clips: int
    metrics: dict[str, float | None]
    faults: dict[str, int]


def summarise(scores: Sequence[Score]) -> list[Summary]:
    """Per system: each voice, then all of them as voice "all"."""
    found = []
    for system in dict.fromkeys(score.clip.system for score in scores):
        own = [score for score in scores if score.clip.system == system]
        for voice in dict.fromkeys(score.clip.voice for score in own):
            found.append(_summary(system, voice, [score for score in own if score.clip.voice == voice]))
        found.append(_summary(system, "all", own))
    return found


def _summary(system: str, voice: str, scores: Sequence[Score]) -> Summary:
    faults: dict[str, int] = defaultdict(int)
    for score in scores:
        for fault in score.faults:
            faults[fault] += 1
    return Summary(system, voice, len(scores), {metric: measure(metric, scores) for metric in METRICS}, dict(faults))


# --- pairs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """`after` against `before` on the sentences both spoke; the difference with its 95 % interval."""

    metric: str
    before: str
    after: str
    sentences: int
    before_value: float
    after_value: float
    difference: float
    low: float | None
    high: float | None


def paired(scores: Sequence[Score], before: str, after: str) -> tuple[list[Score], list[Score]]:
    """The scores of two systems on the voices and sentences that both have."""
    first = [score for score in scores if score.clip.system == before]
    second = [score for score in scores if score.clip.system == after]
    shared = {score.clip.pair for score in first} & {score.clip.pair for score in second}
    return [s for s in first if s.clip.pair in shared], [s for s in second if s.clip.pair in shared]


def compare(scores: Sequence[Score]) -> list[Comparison]:
    systems = list(dict.fromkeys(score.clip.system for score in scores))
    found = [_comparison(m, b, a, *paired(scores, b, a)) for b, a in combinations(systems, 2) for m in COMPARED]
    return [comparison for comparison in found if comparison is not None]


def _comparison(metric: str, before: str, after: str, old: list[Score], new: list[Score]) -> Comparison | None:
    old_value, new_value = measure(metric, old), measure(metric, new)
    if old_value is None or new_value is None:
        return None
    texts = list(dict.fromkeys(score.clip.text for score in old))
    interval = bootstrap(_sums(metric, old, texts), _sums(metric, new, texts))
    return Comparison(metric, before, after, len(texts), old_value, new_value, new_value - old_value, *interval)


def _sums(metric: str, scores: Sequence[Score], texts: Sequence[str]) -> NDArray[np.float64]:
    """[sentences, 2]: the two sums of the metric over all voices of a sentence."""
    row = {text: n for n, text in enumerate(texts)}
    sums = np.zeros((len(texts), 2))
    for score in scores:
        sums[row[score.clip.text]] += METRICS[metric](score)
    return sums


def bootstrap(
    before: NDArray[np.float64], after: NDArray[np.float64], rounds: int = 2000, seed: int = 0
) -> tuple[float | None, float | None]:
    """95 % interval of the difference of two ratios of sums [sentences, 2].

    Whole sentences are drawn, with all voices and both systems: a hard sentence is hard for every voice, so clips of it
    are not independent.
    """
    count = len(before)
    if count < 2:
        return None, None
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=rounds).astype(np.float64)
    old, new = draws @ before, draws @ after
    usable = (old[:, 1] > 0) & (new[:, 1] > 0)
    differences = new[usable, 0] / new[usable, 1] - old[usable, 0] / old[usable, 1]
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


# --- gates ----------------------------------------------------------------------------------------------------------

NAME = r"[A-Za-z_]\w*(?:-[A-Za-z]\w*)*"
NUMBER = r"-?\d+(?:\.\d+)?"
GATE = re.compile(
    rf"(?P<metric>\w+):(?P<system>{NAME})(?P<test><=|>=)"
    rf"(?:(?P<limit>{NUMBER})|(?P<other>{NAME})(?:(?P<change>[+*-])(?P<amount>\d+(?:\.\d+)?))?)"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """`wer:tts<=20`, or against another system on the sentences both spoke: `mos:tts>=teacher-0.5`, `cer:a<=b*1.05`."""

    text: str
    metric: str
    system: str
    test: str
    other: str | None
    change: str
    amount: float

    def limit(self, other: float) -> float:
        return other * self.amount if self.change == "*" else other + float(f"{self.change}{self.amount}")


@dataclass(frozen=True, slots=True)
class GateResult:
    gate: str
    value: float | None
    limit: float | None
    passed: bool


def parse_gates(text: str) -> list[Gate]:
    return [_gate(part) for part in re.sub(r"\s", "", text).split(",") if part]


def _gate(text: str) -> Gate:
    match = GATE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"gate {text!r}: write METRIC:SYSTEM<=NUMBER or METRIC:SYSTEM>=SYSTEM-NUMBER")
    if match["metric"] not in METRICS:
        raise InvalidRequest(f"gate {text!r}: the metrics are {', '.join(METRICS)}")
    amount = float(match["limit"] or match["amount"] or 0)
    return Gate(text, match["metric"], match["system"], match["test"], match["other"], match["change"] or "+", amount)


def check_gate(gate: Gate, scores: Sequence[Score]) -> GateResult:
    """A gate whose value could not be measured is missed."""
    limit: float | None = gate.amount
    own = [score for score in scores if score.clip.system == gate.system]
    if gate.other is not None:
        others, own = paired(scores, gate.other, gate.system)
        base = measure(gate.metric, others)
        limit = None if base is None else gate.limit(base)
    value = measure(gate.metric, own)
    if value is None or limit is None:
        return GateResult(gate.text, value, limit, False)
    # The last digits of a sum of floats are not a miss.
    slack = 1e-9
    passed = value <= limit + slack if gate.test == "<=" else value >= limit - slack
    return GateResult(gate.text, value, limit, passed)


def _check_gate_systems(gates: Iterable[Gate], systems: set[str]) -> None:
    for gate in gates:
        for system in filter(None, (gate.system, gate.other)):
            if system not in systems:
                raise InvalidRequest(f"gate {gate.text!r}: no system {system!r} among {', '.join(sorted(systems))}")


# --- report ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    judges: str
    reference: str
    complete: bool
    systems: list[Summary]
    comparisons: list[Comparison]
    gates: list[GateResult]
    clips: list[Score]

    def as_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self), "clips": [_row(score) for score in self.clips]}, indent=1)


def _row(score: Score) -> dict[str, object]:
    clip, verdict = score.clip, score.verdict
    return {
        "path": clip.path.name,
        "system": clip.system,
        "voice": clip.voice,
        "text": clip.text,
        "heard": verdict.heard,
        "word_errors": score.words.edits,
        "words": score.words.length,
        "character_errors": score.characters.edits,
        "characters": score.characters.length,
        "mos": verdict.mos,
        "similarity": score.similarity,
        "nearest": score.nearest,
        "seconds": verdict.seconds,
        "expected_seconds": score.expected_seconds,
        "faults": score.faults,
    }


SHOWN = {
    "wer": ("WER %", ".1f"),
    "cer": ("CER %", ".1f"),
    "mos": ("MOS", ".2f"),
    "similarity": ("voice sim.", ".3f"),
    "nearest": ("nearest %", ".0f"),
    "seconds": ("seconds", ".2f"),
    "length": ("length x", ".2f"),
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table before it is drawn."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for n, column in enumerate(self.columns):
            table.add_column(column, justify="left" if n < 2 else "right")
        for row in self.rows:
            table.add_row(*row, style="bold" if row[1] == "all" else None)
        return table


def sheets(report: Report) -> list[Sheet]:
    found = [_systems_sheet(report)]
    if report.comparisons:
        found.append(_comparisons_sheet(report))
    if report.gates:
        rows = [
            [
                result.gate,
                "passed" if result.passed else "MISSED",
                _number(result.value, ".3f"),
                _number(result.limit, ".3f"),
            ]
            for result in report.gates
        ]
        found.append(Sheet("Gates", ["gate", "result", "value", "limit"], rows))
    return found


def _systems_sheet(report: Report) -> Sheet:
    rows = []
    for summary in report.systems:
        faults = ", ".join(f"{count} {fault}" for fault, count in summary.faults.items()) or "none"
        values = [_number(summary.metrics[metric], form) for metric, (_, form) in SHOWN.items()]
        rows.append([summary.system, summary.voice, str(summary.clips), *values, faults])
    title = f"Quality, reference {report.reference}" + ("" if report.complete else " (interrupted: part of the clips)")
    return Sheet(title, ["system", "voice", "clips", *(name for name, _ in SHOWN.values()), "faults"], rows)


def _comparisons_sheet(report: Report) -> Sheet:
    rows = []
    for c in report.comparisons:
        name, form = SHOWN[c.metric]
        interval = "-" if c.low is None or c.high is None else f"{c.low:+{form}} to {c.high:+{form}}"
        values = [f"{c.before_value:{form}}", f"{c.after_value:{form}}", f"{c.difference:+{form}}", interval]
        rows.append([f"{c.before} -> {c.after}", name, str(c.sentences), *values])
    return Sheet("Pairs", ["systems", "metric", "sentences", "before", "after", "difference", "95 % interval"], rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


# --- command --------------------------------------------------------------------------------------------------------


def evaluate(
    clips: Sequence[Clip], judges: Judges, store: VerdictStore, reference: str, gates: Sequence[Gate] = ()
) -> Report:
    """Judge, score, compare and check; shows progress on stderr."""
    systems = {clip.system for clip in clips}
    if reference not in systems:
        raise InvalidRequest(f"no reference system {reference!r} among {', '.join(sorted(systems))}")
    _check_gate_systems(gates, systems)
    progress = track(clips, "judging", console=Console(stderr=True), total=len(clips))
    judged, complete = judge_clips(progress, judges, store)
    scores = score_clips(judged, reference)
    results = [check_gate(gate, scores) for gate in gates]
    return Report(judges.name, reference, complete, summarise(scores), compare(scores), results, scores)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "verdicts.jsonl"
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("manifest", type=Path, help="JSON lines of path, text, voice, system")
    parser.add_argument("--json", type=Path, help="write the whole report here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--limit", type=int, help="judge only the first N sentences (all voices and systems of each)")
    parser.add_argument("--reference", help="the system compared against (default: that of the first clip)")
    parser.add_argument(
        "--gate", default="", help='such as "wer:tts<=20,mos:tts>=teacher-0.5"; exit code 1 when missed'
    )
    parser.add_argument("--cache", type=Path, default=cache, help="verdicts of earlier runs (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, judges: Judges | None = None) -> int:
    arguments = _arguments(argv)
    try:
        gates = parse_gates(arguments.gate)
        clips = read_manifest(arguments.manifest)
        clips = clips if arguments.limit is None else first_sentences(clips, arguments.limit)
        reference = arguments.reference or clips[0].system
        report = evaluate(clips, judges or standard_judges(), VerdictStore(arguments.cache), reference, gates)
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    _publish(report, arguments.json, arguments.markdown)
    if not report.complete:
        return INTERRUPTED
    return 0 if all(result.passed for result in report.gates) else 1


def _publish(report: Report, json_path: Path | None, markdown_path: Path | None) -> None:
    tables = sheets(report)
    # A log has no width of its own, and a table cut to 80 columns loses its figures.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for sheet in tables:
        console.print(sheet.rich())
    if json_path is not None:
        json_path.write_text(report.as_json() + "\n", encoding="utf-8")
    if markdown_path is not None:
        markdown_path.write_text("\n".join(sheet.markdown() for sheet in tables), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
