import json
from pathlib import Path

import numpy as np

from training.data import Corpus, Line, read_lines, shard_stem, to_int16, write_whole

TEXTS = ("Hello there.", "Good day.", "How are you?")


def write_shard(folder: Path, shard: int) -> None:
    """Write a shard as `training.kokoro.produce` does: samples first, lines last."""
    samples = [np.full(10 * (shard + number + 1), number + 1, np.int16) for number in range(len(TEXTS))]
    ends = np.cumsum([part.size for part in samples]).tolist()
    lines = [
        {"voice": f"v{number % 2}", "text": text, "offset": end - part.size, "samples": part.size, "words": []}
        for number, (text, part, end) in enumerate(zip(TEXTS, samples, ends, strict=True))
    ]
    stem = shard_stem(folder, shard)
    write_whole(stem.with_suffix(".pcm"), np.concatenate(samples).astype("<i2").tobytes())
    write_whole(stem.with_suffix(".jsonl"), "".join(json.dumps(line) + "\n" for line in lines).encode())


def test_a_shard_reads_back_what_was_written(tmp_path: Path) -> None:
    write_shard(tmp_path, 0)
    corpus = Corpus(tmp_path)
    assert [(text, voice) for _, text, voice in corpus] == list(zip(TEXTS, ("v0", "v1", "v0"), strict=True))
    for number, (samples, _, _) in enumerate(corpus):
        assert (samples.dtype, samples.size, set(samples.tolist())) == (np.int16, 10 * (number + 1), {number + 1})


def test_lines_have_the_place_of_their_samples_and_drop_other_fields(tmp_path: Path) -> None:
    write_shard(tmp_path, 3)
    lines = read_lines(tmp_path / "shard-00003.jsonl")
    assert lines[0] == Line("v0", TEXTS[0], 0, 40)
    ends = [line.offset + line.samples for line in lines]
    assert [line.offset for line in lines] == [0, *ends[:-1]]
    assert (tmp_path / "shard-00003.pcm").stat().st_size == 2 * ends[-1]


def test_refresh_adds_complete_shards_and_keeps_indices(tmp_path: Path) -> None:
    write_shard(tmp_path, 1)
    corpus = Corpus(tmp_path)
    before = corpus[0]
    (tmp_path / "shard-00002.pcm").write_bytes(b"torn")
    write_shard(tmp_path, 0)
    assert corpus.refresh() == len(TEXTS)
    assert corpus.refresh() == 0
    assert len(corpus) == 2 * len(TEXTS)
    assert corpus[0][1:] == before[1:]
    assert np.array_equal(corpus[0][0], before[0])


def test_a_shard_without_utterances_is_empty(tmp_path: Path) -> None:
    write_whole(tmp_path / "shard-00000.jsonl", b"")
    assert len(Corpus(tmp_path)) == 0


def test_a_written_file_replaces_the_old_one_and_leaves_no_other(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")
    write_whole(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]


def test_samples_are_rounded_and_clipped() -> None:
    assert to_int16(np.array([0.0, 0.5, 1.5, -1.5])).tolist() == [0, 16384, 32767, -32768]
