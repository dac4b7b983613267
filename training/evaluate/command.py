"""Command line of the evaluation: `python -m training.evaluate`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from shoal.errors import InvalidRequest, ShoalError
from training.evaluate.gates import Gate, check_gate, check_gate_systems, parse_gates
from training.evaluate.manifest import Clip, first_sentences, read_manifest
from training.evaluate.metrics import summarise
from training.evaluate.pairs import compare
from training.evaluate.report import Report, sheets
from training.evaluate.scores import score_clips
from training.evaluate.verdicts import VerdictStore, judge_clips
from training.judges import Judges, standard_judges

ABOUT = "Judge spoken clips and compare the systems that spoke them."
INTERRUPTED = 130


def evaluate(
    clips: Sequence[Clip], judges: Judges, store: VerdictStore, reference: str, gates: Sequence[Gate] = ()
) -> Report:
    """Judge, score, compare and check; shows progress on stderr."""
    systems = {clip.system for clip in clips}
    if reference not in systems:
        raise InvalidRequest(f"no reference system {reference!r} among {', '.join(sorted(systems))}")
    check_gate_systems(gates, systems)
    progress = track(clips, "judging", console=Console(stderr=True), total=len(clips))
    judged, complete = judge_clips(progress, judges, store)
    scores = score_clips(judged, reference)
    results = [check_gate(gate, scores) for gate in gates]
    return Report(judges.name, reference, complete, summarise(scores), compare(scores), results, scores)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "verdicts.jsonl"
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=ABOUT)
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
    # A log has no width, and a table cut to 80 columns would lose figures.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for sheet in tables:
        console.print(sheet.rich())
    if json_path is not None:
        json_path.write_text(report.as_json() + "\n", encoding="utf-8")
    if markdown_path is not None:
        markdown_path.write_text("\n".join(sheet.markdown() for sheet in tables), encoding="utf-8")
