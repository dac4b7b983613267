"""Recordings cut out of the teacher's batches, with word times and phoneme ids, and written as shards."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data.shards import shard_stem, write_whole
from training.data.sound import Samples
from training.kokoro.speakers import speaker_name
from training.kokoro.teacher import BLOCK, FRAME, LEAD, SAMPLE_RATE, Speech, Teacher, audible_blocks, word_times
from training.kokoro.utterances import Utterance

BEFORE, AFTER = 5, 8  # frames of silence kept before the first and after the last audible frame
STRESS = "\u02c8\u02cc"
TRACT_SCALES = (0.89, 0.94, 1.07, 1.13)  # below one: shorter vocal tract, higher pitch, faster

Ids = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Recording:
    """Samples [n] int16, phoneme ids [n / FRAME] and word times in seconds of one utterance, silence trimmed."""

    utterance: Utterance
    samples: Samples
    phonemes: Ids
    words: list[tuple[str, float, float]]


def record(
    teacher: Teacher, utterances: Sequence[Utterance], rng: random.Random, scaled_share: float, batch_seconds: float
) -> Iterator[Recording]:
    """Speak the utterances in batches; `scaled_share` of the batches get another vocal tract length."""
    phonemes = [utterance.phonemes for utterance in utterances]
    styles = torch.stack([teacher.style(utterance.speaker, utterance.phonemes) for utterance in utterances])
    speeds = torch.tensor([utterance.speed for utterance in utterances])
    for speech in teacher.speak(phonemes, styles, speeds, batch_seconds):
        scale = rng.choice(TRACT_SCALES) if rng.random() < scaled_share else 1.0
        yield from cut_batch(teacher.vocab, utterances, speech, scale)


def cut_batch(
    vocab: dict[str, int], utterances: Sequence[Utterance], speech: Speech, scale: float = 1.0
) -> Iterator[Recording]:
    """Yield the rows of a batch, resampled by `scale`, without the silence around them."""
    audio = speech.audio if scale == 1.0 else scale_tract(speech.audio, scale)
    audible = speech.audible if scale == 1.0 else audible_blocks(audio)
    stretch = audio.shape[1] / speech.audio.shape[1]
    pcm = (audio * 32767).clamp(-32768, 32767).to(torch.int16).cpu().numpy()
    for place, (row, frames) in enumerate(zip(speech.rows, speech.frames, strict=True)):
        utterance = utterances[row]
        first, last = spoken_frames(audible[place])
        ids = phoneme_frames(phoneme_ids(vocab, utterance.phonemes), frames, audible.shape[1] * BLOCK // FRAME, stretch)
        times = word_times(utterance.words, utterance.phonemes, frames, speech.audible[place])
        words = [(word, moved(start, stretch, first), moved(end, stretch, first)) for word, start, end in times]
        yield Recording(utterance, pcm[place, first * FRAME : last * FRAME], ids[first:last], words)


def moved(seconds: float, stretch: float, first: int) -> float:
    """Return a time of the teacher's audio as a time of the recording, which begins at frame `first`."""
    return round(seconds * stretch - first * FRAME / SAMPLE_RATE, 3)


def scale_tract(audio: Tensor, scale: float) -> Tensor:
    """Resample audio [B, N] to N * scale samples, rounded to whole frames: formants and pitch move by 1 / scale."""
    length = audio.shape[1]
    wanted = round(length * scale / FRAME) * FRAME
    kept = min(length, wanted) // 2 + 1
    return torch.fft.irfft(torch.fft.rfft(audio)[:, :kept], wanted) * (wanted / length)


def phoneme_ids(vocab: dict[str, int], phonemes: str) -> list[int]:
    """Return the token id per character, with stress marks as the phoneme after them and spaces as the one before."""
    spoken = list(phonemes)
    for place in reversed(range(len(spoken) - 1)):
        if spoken[place] in STRESS:
            spoken[place] = spoken[place + 1]
    for place in range(1, len(spoken)):
        if spoken[place] == " ":
            spoken[place] = spoken[place - 1]
    return [vocab[character] for character in spoken]


def phoneme_frames(ids: Sequence[int], frames: Tensor, count: int, stretch: float) -> Ids:
    """Return the id of each of `count` frames of audio, 0 in silence. The audio runs LEAD frames ahead of `frames`."""
    per_frame = np.array([0, *ids, 0], dtype=np.uint8).repeat(frames.numpy())[LEAD:]
    places = (np.arange(count) / stretch).astype(np.int64)
    return np.where(places < len(per_frame), per_frame[np.minimum(places, len(per_frame) - 1)], 0).astype(np.uint8)


def spoken_frames(audible: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first and last + 1 frame to keep of a row of `Speech.audible`."""
    blocks = FRAME // BLOCK
    heard, total = np.flatnonzero(audible), len(audible) // blocks
    if not len(heard):
        return 0, total
    return max(0, int(heard[0]) // blocks - BEFORE), min(total, int(heard[-1]) // blocks + 1 + AFTER)


def write_recordings(out: Path, shard: int, recordings: Iterable[Recording]) -> float:
    """Write one shard, the `.jsonl` last; return its seconds of speech."""
    kept, lines, offset = list(recordings), [], 0
    for recording in kept:
        said, size = recording.utterance, len(recording.samples)
        line = {"voice": speaker_name(said.speaker), "text": said.text, "offset": offset, "samples": size}
        lines.append(json.dumps({**line, "speed": said.speed, "words": recording.words}) + "\n")
        offset += size
    stem = shard_stem(out, shard)
    pcm = np.concatenate([recording.samples for recording in kept])
    write_whole(stem.with_suffix(".pcm"), pcm.astype("<i2").tobytes())
    write_whole(stem.with_suffix(".phonemes"), np.concatenate([recording.phonemes for recording in kept]).tobytes())
    write_whole(stem.with_suffix(".jsonl"), "".join(lines).encode())
    return offset / SAMPLE_RATE
