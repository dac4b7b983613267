"""Synthesise the training corpus of `nano`: teachers speak, workers write shards, training reads them at once.

A shard is two files. `shard-00000.pcm` holds its utterances one after another, int16 mono at 16 kHz, each a whole
number of frames; `shard-00000.jsonl` holds one line per utterance. The second file appears last and by renaming, so a
shard whose lines can be read is complete, and nothing else has to be locked, cleaned up or remembered.

What a shard says depends on the plan and the shard's index only. Hence the same seed gives the same corpus with any
number of workers, a second run makes exactly the shards that are missing, and asking for more hours extends a corpus.

    python -m training.data --text build/corpus/sentences.txt --teachers build/teachers --out build/speech --hours 60
"""

from training.data.command import main, make_plan, parse_arguments
from training.data.corpus import Corpus, Entry
from training.data.plan import UTTERANCES_PER_SHARD, HeldoutPlan, Plan, Utterance, joinable
from training.data.shards import (
    CorpusMismatch,
    Line,
    claim,
    is_complete,
    read_lines,
    record,
    shard_stem,
    write_shard,
    write_whole,
)
from training.data.sound import (
    FRAME,
    SAMPLE_RATE,
    TARGET_RMS,
    Samples,
    Signal,
    level,
    plausible,
    scale_formants,
    to_int16,
    trim,
    whole_frames,
)
from training.data.teachers import Teacher, TeacherFailed, Teachers
from training.data.voices import VOICES, Voice
from training.data.workers import generate, work

__all__ = [
    "FRAME",
    "SAMPLE_RATE",
    "TARGET_RMS",
    "UTTERANCES_PER_SHARD",
    "VOICES",
    "Corpus",
    "CorpusMismatch",
    "Entry",
    "HeldoutPlan",
    "Line",
    "Plan",
    "Samples",
    "Signal",
    "Teacher",
    "TeacherFailed",
    "Teachers",
    "Utterance",
    "Voice",
    "claim",
    "generate",
    "is_complete",
    "joinable",
    "level",
    "main",
    "make_plan",
    "parse_arguments",
    "plausible",
    "read_lines",
    "record",
    "scale_formants",
    "shard_stem",
    "to_int16",
    "trim",
    "whole_frames",
    "work",
    "write_shard",
    "write_whole",
]
