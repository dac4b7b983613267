"""Judge spoken clips and compare the systems that spoke them.

    python -m training.evaluate MANIFEST --json out.json --markdown out.md --gate "wer:resynthesis<=teacher+5"

The manifest has a JSON object per line: path (of a WAV file, relative to the manifest), text, voice, system. Clips of
different systems with the same voice and text form a pair. One system is the reference: it gives the voices' centroids
and the expected durations.
"""

from training.evaluate.command import evaluate, main
from training.evaluate.gates import Gate, GateResult, check_gate, parse_gates
from training.evaluate.manifest import Clip, first_sentences, read_manifest
from training.evaluate.metrics import METRICS, Summary, measure, summarise
from training.evaluate.pairs import Comparison, bootstrap, compare, paired
from training.evaluate.report import Report, sheets
from training.evaluate.scores import Score, score_clips
from training.evaluate.verdicts import Verdict, VerdictStore, judge, judge_clips
from training.evaluate.wav import faults_of, read_wav

__all__ = [
    "METRICS",
    "Clip",
    "Comparison",
    "Gate",
    "GateResult",
    "Report",
    "Score",
    "Summary",
    "Verdict",
    "VerdictStore",
    "bootstrap",
    "check_gate",
    "compare",
    "evaluate",
    "faults_of",
    "first_sentences",
    "judge",
    "judge_clips",
    "main",
    "measure",
    "paired",
    "parse_gates",
    "read_manifest",
    "read_wav",
    "score_clips",
    "sheets",
    "summarise",
]
