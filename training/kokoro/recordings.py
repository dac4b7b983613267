"""Recordings cut out of the teacher's batches, with word times and phoneme ids, and written as shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data.shards import shard_stem, write_whole
from training.data.sound import Samples
from training.kokoro.speakers import voice_name
from training.kokoro.teacher import BLOCK, FRAME, LEAD, SAMPLE_RATE, Speech, Teacher, audible_blocks, word_times
from training.kokoro.utterances import Utterance

BEFORE, AFTER = 5, 8  # frames of silence kept before the first and after the last audible frame
STRESS = "\u02c8\u02cc"
RESPONSE_DB = 5.0  # spread of the gain at the control points of a frequency response
RESPONSE_POINTS = 9
CUT_SHARE, CUT_HZ = 0.25, (4500, 11000)  # responses that end at a frequency in between, as of a poor microphone

Ids = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Recording:
    """Samples [n] int16, phoneme ids [n / FRAME] and word times in seconds of one utterance, silence trimmed."""

    utterance: Utterance
    samples: Samples
    phonemes: Ids
    words: list[tuple[str, float, float]]


def record(teacher: Teacher, utterances: Sequence[Utterance], batch_seconds: float) -> Iterator[Recording]:
    """Speak the utterances in batches, each in its timbre."""
    phonemes = [utterance.phonemes for utterance in utterances]
    styles = torch.stack([teacher.style(utterance.speaker, utterance.phonemes) for utterance in utterances])
    # Scaling to a longer tract makes speech slower, so the teacher speaks faster by the same factor.
    speeds = torch.tensor([utterance.speed * utterance.timbre.tract for utterance in utterances])
    pitches = torch.tensor([utterance.timbre.pitch for utterance in utterances])
    for speech in teacher.speak(phonemes, styles, speeds, batch_seconds, pitches):
        yield from cut_batch(teacher.vocab, utterances, speech)


def cut_batch(vocab: dict[str, int], utterances: Sequence[Utterance], speech: Speech) -> Iterator[Recording]:
    """Yield the rows of a batch in their timbres, without the silence around them."""
    places: dict[float, list[int]] = {}
    for place, row in enumerate(speech.rows):
        places.setdefault(utterances[row].timbre.tract, []).append(place)
    for tract, chosen in places.items():
        rows, frames = [speech.rows[place] for place in chosen], [speech.frames[place] for place in chosen]
        audio = coloured(speech.audio[chosen], [utterances[row].timbre.response for row in rows])
        yield from cut_rows(vocab, utterances, Speech(rows, audio, frames, speech.audible[chosen]), tract)


def cut_rows(
    vocab: dict[str, int], utterances: Sequence[Utterance], speech: Speech, scale: float
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


def coloured(audio: Tensor, seeds: Sequence[int]) -> Tensor:
    """Return audio [B, N] with the frequency response of each row's seed, at the level it had; 0 changes nothing."""
    if not any(seeds):
        return audio
    spectrum = torch.fft.rfft(audio)
    gains = torch.stack([frequency_response(seed, spectrum.shape[1]) for seed in seeds]).to(audio.device)
    changed = torch.fft.irfft(spectrum * gains, audio.shape[1])
    level = audio.square().mean(1, keepdim=True) / changed.square().mean(1, keepdim=True).clamp(min=1e-12)
    return changed * level.sqrt()


def frequency_response(seed: int, bins: int) -> Tensor:
    """Return a smooth gain [bins] from 0 Hz to half the sample rate."""
    if not seed:
        return torch.ones(bins)
    rng = np.random.default_rng(seed)
    half = SAMPLE_RATE / 2
    at = np.linspace(0, half, bins)
    # Control points at equal distances on a scale that is close to the ear's.
    points = 600 * np.expm1(np.linspace(0, np.log1p(half / 600), RESPONSE_POINTS))
    gain = np.interp(at, points, rng.normal(0, RESPONSE_DB, RESPONSE_POINTS))
    if rng.random() < CUT_SHARE:
        gain = gain - np.clip((at - rng.uniform(*CUT_HZ)) / 25, 0, 60)
    return torch.from_numpy(10 ** (gain / 20)).float()


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
        line = {"voice": voice_name(said.speaker, said.timbre), "text": said.text, "offset": offset, "samples": size}
        lines.append(json.dumps({**line, "speed": said.speed, "words": recording.words}) + "\n")
        offset += size
    stem = shard_stem(out, shard)
    pcm = np.concatenate([recording.samples for recording in kept])
    write_whole(stem.with_suffix(".pcm"), pcm.astype("<i2").tobytes())
    write_whole(stem.with_suffix(".phonemes"), np.concatenate([recording.phonemes for recording in kept]).tobytes())
    write_whole(stem.with_suffix(".jsonl"), "".join(lines).encode())
    return offset / SAMPLE_RATE
