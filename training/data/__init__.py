"""Recorded speech on disk, in shards that training reads while others are being written.

A shard is two files. `shard-00000.pcm` holds its utterances one after another, int16 mono; `shard-00000.jsonl` holds
one line per utterance. The second file appears last and by renaming, so a shard whose lines can be read is complete.
`training.kokoro.produce` writes shards.
"""

from training.data.corpus import Corpus, Entry
from training.data.shards import Line, read_lines, shard_stem, write_whole
from training.data.sound import Samples, Signal, to_int16, wav_bytes

__all__ = [
    "Corpus",
    "Entry",
    "Line",
    "Samples",
    "Signal",
    "read_lines",
    "shard_stem",
    "to_int16",
    "wav_bytes",
    "write_whole",
]
