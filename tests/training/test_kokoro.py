"""Teacher speech without the teacher: speakers, utterances, recordings, word times and the weight format."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from training.codec.reel import Reel
from training.data import Corpus
from training.kokoro import network
from training.kokoro.produce import parse_arguments, pools, produce
from training.kokoro.recordings import (
    AFTER,
    BEFORE,
    coloured,
    cut_batch,
    cut_rows,
    frequency_response,
    phoneme_frames,
    phoneme_ids,
    record,
    scale_tract,
    spoken_frames,
    write_recordings,
)
from training.kokoro.speakers import (
    HELDOUT_SHARE,
    PLAIN,
    Timbre,
    accent_of,
    heldout_mixes,
    is_held_out,
    random_mix,
    speaker_name,
    training_speakers,
    voice_name,
)
from training.kokoro.teacher import BLOCK, FRAME, LEAD, SAMPLE_RATE, Speech, audible_blocks, batch_size, word_times
from training.kokoro.utterances import (
    HELDOUT_VOICES,
    Line,
    Utterance,
    heldout_utterances,
    read_phonemized,
    training_utterances,
)

VOCAB = {" ": 16, ".": 4, "a": 43, "b": 44, "k": 53, "\u02c8": 156}
FRAMES = torch.tensor([8, 4, 1, 6, 2, 6, 12])  # silence, b, stress, a, space, k, silence


def tone(frames: Tensor) -> Tensor:
    """Audio [1, samples] that is loud where the durations, moved by LEAD, have no silence."""
    total = int(frames.sum())
    at = torch.arange(total * FRAME)
    first, last = int(frames[0]) - LEAD, total - int(frames[-1]) - LEAD
    return torch.where((at >= first * FRAME) & (at < last * FRAME), 0.3 * torch.sin(0.05 * at), 0.0)[None]


class FakeTeacher:
    """Speaks every utterance as the same tone, in one batch."""

    vocab = VOCAB

    def style(self, mix: dict[str, float], phonemes: str) -> Tensor:
        return torch.zeros(256)

    def speak(
        self, phonemes: Sequence[str], styles: Tensor, speeds: Tensor, batch_seconds: float, pitches: Tensor
    ) -> Iterator[Speech]:
        assert len(pitches) == len(speeds) == len(phonemes)
        audio = tone(FRAMES).repeat(len(phonemes), 1)
        yield Speech(list(range(len(phonemes))), audio, [FRAMES] * len(phonemes), audible_blocks(audio))


def utterance(text: str = "ba k", **speaker: float) -> Utterance:
    return Utterance(text, "b\u02c8a k", [("ba", 0, 3), ("k", 4, 5)], speaker or {"af_heart": 1.0})


def line(text: str, accent: str = "us") -> Line:
    return {"text": text, "accent": accent, "phonemes": "b\u02c8a k", "words": [["ba", 0, 3], ["k", 4, 5]]}


def test_a_mix_is_convex_has_the_accent_of_its_heaviest_voice_and_avoids_the_bad_voices() -> None:
    rng = random.Random(0)
    for accent in ("us", "gb") * 200:
        mix = random_mix(rng, accent)
        assert accent_of(mix) == accent
        assert len(mix) in (2, 3)
        assert sum(mix.values()) == pytest.approx(1, abs=0.002)
        assert list(mix.values()) == sorted(mix.values(), reverse=True)
        assert not {"bm_fable", "bm_lewis"} & mix.keys()


def test_about_five_percent_of_the_mixes_are_held_out_and_training_never_uses_them() -> None:
    rng = random.Random(0)
    share = sum(is_held_out(random_mix(rng, "us")) for _ in range(4000)) / 4000
    assert share == pytest.approx(HELDOUT_SHARE, abs=0.015)
    assert not any(is_held_out(speaker) for speaker, _ in islice(training_speakers(rng, "gb", 0.9), 2000))
    assert all(is_held_out(mix) for mix in heldout_mixes(rng, 6))
    assert not is_held_out({"af_heart": 1.0})


def test_whether_a_mix_is_held_out_does_not_depend_on_the_order_of_its_voices() -> None:
    for mix in heldout_mixes(random.Random(1), 5):
        assert is_held_out(dict(reversed(mix.items())))


def test_mixed_speakers_say_two_to_six_utterances_and_their_share_of_them_is_as_asked() -> None:
    speakers = [speaker for speaker, _ in islice(training_speakers(random.Random(0), "us", 0.6), 8000)]
    assert sum(len(speaker) > 1 for speaker in speakers) / 8000 == pytest.approx(0.6, abs=0.04)
    runs = [len(list(run)) for mixed, run in groupby(speakers, key=speaker_name) if "+" in mixed]
    assert set(runs[:-1]) == {2, 3, 4, 5, 6}


def test_a_line_is_spoken_by_a_speaker_of_its_accent() -> None:
    lines = [line(str(number), ("us", "gb")[number % 2]) for number in range(60)]
    made = training_utterances(lines, random.Random(0), 0.5)
    assert sorted(one.text for one in made) == sorted(one["text"] for one in lines)
    accents = {one["text"]: one["accent"] for one in lines}
    assert all(accent_of(one.speaker) == accents[one.text] for one in made)
    assert all(0.9 <= one.speed <= 1.15 for one in made)


def test_held_out_voices_say_the_same_sentences_and_mixes_say_others() -> None:
    made = heldout_utterances([line(str(n), accent) for accent in ("us", "gb") for n in range(80)], random.Random(0))
    said = {name: [one.text for one in made if speaker_name(one.speaker) == name] for name in HELDOUT_VOICES}
    assert len({tuple(texts) for texts in said.values()}) == 1
    mixed = [one for one in made if len(one.speaker) > 1]
    assert mixed
    assert all(is_held_out(one.speaker) and one.text not in said["af_heart"] for one in mixed)


def test_phonemized_files_are_read_in_order(tmp_path: Path) -> None:
    for name in ("us", "gb"):
        (tmp_path / name).write_bytes(gzip.compress(json.dumps(line(name, name)).encode() + b"\n"))
    assert [one["accent"] for one in read_phonemized([tmp_path / "us", tmp_path / "gb"])] == ["us", "gb"]


def test_stress_marks_count_as_the_next_phoneme_and_spaces_as_the_last() -> None:
    assert phoneme_ids(VOCAB, "b\u02c8a k") == [44, 43, 43, 43, 53]


def test_phoneme_frames_follow_the_durations_ahead_by_the_lead_and_stretched() -> None:
    ids = phoneme_frames([44, 43], torch.tensor([5, 2, 3, 4]), 14, 1.0)
    assert ids.tolist() == [0] * (5 - LEAD) + [44] * 2 + [43] * 3 + [0] * (4 + LEAD)
    assert phoneme_frames([44, 43], torch.tensor([5, 2, 3, 4]), 28, 2.0).tolist() == ids.repeat(2).tolist()


def test_silence_is_cut_to_a_margin_and_never_beyond_the_audio() -> None:
    blocks = FRAME // BLOCK
    audible = np.zeros(40 * blocks, dtype=bool)
    audible[20 * blocks : 25 * blocks] = True
    assert spoken_frames(audible) == (20 - BEFORE, 25 + AFTER)
    audible[:] = True
    assert spoken_frames(audible) == (0, 40)
    assert spoken_frames(np.zeros(40 * blocks, dtype=bool)) == (0, 40)


@pytest.mark.parametrize("scale", [0.89, 1.13])
def test_a_scaled_vocal_tract_moves_a_tone_by_the_inverse_scale_at_the_same_level(scale: float) -> None:
    length = 40 * FRAME
    audio = torch.sin(2 * torch.pi * 1000 / SAMPLE_RATE * torch.arange(length))[None]
    scaled = scale_tract(audio, scale)
    assert scaled.shape[1] % FRAME == 0
    peak = torch.fft.rfft(scaled[0]).abs().argmax().item() * SAMPLE_RATE / scaled.shape[1]
    assert peak == pytest.approx(1000 * length / scaled.shape[1], rel=0.01)
    assert scaled.std().item() == pytest.approx(audio.std().item(), rel=0.02)


def test_a_recording_starts_near_its_first_word_and_its_ids_match_its_samples() -> None:
    audio = tone(FRAMES)
    speech = Speech([0], audio, [FRAMES], audible_blocks(audio))
    (made,) = cut_batch(VOCAB, [utterance()], speech)
    assert len(made.samples) == FRAME * len(made.phonemes)
    loud = np.abs(made.samples.reshape(-1, FRAME)).max(1) > 1000
    assert ((made.phonemes > 0) == loud).all()
    (first, start, _), (last, _, end) = made.words
    assert (first, last) == ("ba", "k")
    assert start * SAMPLE_RATE == pytest.approx(loud.argmax() * FRAME, abs=FRAME)
    assert end * SAMPLE_RATE == pytest.approx((len(loud) - loud[::-1].argmax()) * FRAME, abs=FRAME)


def test_word_times_of_a_scaled_recording_scale_too() -> None:
    audio = tone(FRAMES)
    speech = Speech([0], audio, [FRAMES], audible_blocks(audio))
    (plain,), (slow,) = (list(cut_rows(VOCAB, [utterance()], speech, scale)) for scale in (1.0, 2.0))
    length = [made.words[-1][2] - made.words[0][1] for made in (plain, slow)]
    assert length[1] == pytest.approx(2 * length[0], rel=0.05)


def test_a_mixed_speaker_keeps_its_timbre_and_voices_alone_have_their_own() -> None:
    drawn = list(islice(training_speakers(random.Random(0), "us", 0.6, 0.5), 4000))
    assert all(timbre == PLAIN for speaker, timbre in drawn if len(speaker) == 1)
    of_mix: dict[str, set[Timbre]] = {}
    for speaker, timbre in drawn:
        if len(speaker) > 1:
            of_mix.setdefault(speaker_name(speaker), set()).add(timbre)
    assert all(len(timbres) == 1 for timbres in of_mix.values())
    other = [timbres for timbres in of_mix.values() if PLAIN not in timbres]
    assert len(other) / len(of_mix) == pytest.approx(0.5, abs=0.07)
    assert voice_name({"af_sky": 1.0}, PLAIN) == "af_sky"
    assert voice_name({"af_sky": 1.0}, Timbre(0.9, 1.1, 7)) == "af_sky*t0.90p1.10r7"


def test_a_batch_holds_rows_of_several_timbres() -> None:
    audio = tone(FRAMES).repeat(3, 1)
    speech = Speech([0, 1, 2], audio, [FRAMES] * 3, audible_blocks(audio))
    timbres = (PLAIN, Timbre(1.16, 1.0, 5), PLAIN)
    said = [Utterance("ba k", "b\u02c8a k", [("ba", 0, 3), ("k", 4, 5)], {"af_sky": 1.0}, 1.0, one) for one in timbres]
    made = {one.utterance.timbre: len(one.samples) for one in cut_batch(VOCAB, said, speech)}
    assert made[timbres[1]] > 1.05 * made[PLAIN]


def test_a_frequency_response_depends_on_its_seed_and_keeps_the_level() -> None:
    noise = torch.randn(3, 24_000, generator=torch.Generator().manual_seed(0))
    changed = coloured(noise, [0, 3, 4])
    assert torch.allclose(changed[0], noise[0], atol=1e-4)
    assert torch.allclose(changed.square().mean(1), noise.square().mean(1), rtol=1e-3)
    assert not torch.allclose(frequency_response(3, 100), frequency_response(4, 100))
    assert torch.equal(frequency_response(3, 100), frequency_response(3, 100))


def test_two_words_share_the_space_between_them() -> None:
    audible = np.ones(40 * FRAME // BLOCK, dtype=bool)
    (_, _, end), (_, start, _) = word_times([("ba", 0, 3), ("k", 4, 5)], "b\u02c8a k", FRAMES, audible)
    assert end == start == pytest.approx((8 + 4 + 1 + 6 + 1 - LEAD) * FRAME / SAMPLE_RATE)


def test_the_codec_reads_the_shards_that_the_teacher_writes(tmp_path: Path) -> None:
    for shard in range(3):
        made = record(FakeTeacher(), [utterance(), utterance(bm_george=0.6, af_sky=0.4)], 60)
        assert write_recordings(tmp_path, shard, made) > 1
    lines = [json.loads(text) for text in (tmp_path / "shard-00001.jsonl").read_text().splitlines()]
    assert [one["voice"] for one in lines] == ["af_heart", "bm_george.600+af_sky.400"]
    assert lines[1]["offset"] == lines[0]["samples"]
    assert [voice for _, _, voice in Corpus(tmp_path)] == 3 * [one["voice"] for one in lines]
    reel = Reel(tmp_path, 0.01, SAMPLE_RATE, torch.device("cpu"))
    reel.refresh()
    samples, phonemes = reel.labelled_crops(64, 20 * 960, 960)
    loud = samples.unflatten(1, (-1, 960))[:, :, 320 : 320 + 100].abs().amax(2) > 0.05
    assert ((phonemes > 0) == loud).float().mean() > 0.9
    assert 0.2 < loud.float().mean() < 0.9


def test_production_stops_after_the_hours_that_were_asked_for(tmp_path: Path) -> None:
    arguments = ["--model", "m", "--utterances", "u", "--heldout", "h", "--out", str(tmp_path), "--pool", "3"]
    options = parse_arguments([*arguments, "--first-pool", "2", "--hours", "0.0005"])
    produce(FakeTeacher(), [utterance()] * 50, options)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["shard-00001.jsonl", "shard-00002.jsonl"]


def test_the_first_pool_is_small_and_no_utterance_is_lost() -> None:
    many = [utterance(str(number)) for number in range(11)]
    split = list(pools(many, 2, 4))
    assert [len(pool) for pool in split] == [2, 4, 4, 1]
    assert [one for pool in split for one in pool] == many


def test_a_last_batch_is_rounded_up_to_a_size_that_was_seen_before() -> None:
    assert [batch_size(count, 64) for count in (64, 40, 32, 17, 3)] == [64, 64, 32, 32, 8]


def test_weights_are_dequantized_from_their_parts(tmp_path: Path) -> None:
    header = [["a", "int8", [2, 2], [[0.5], [2.0]], [[1.0], [0.0]]], ["b", "float32", [1], None, None]]
    payload = np.array([[1, 3], [-2, 4]], np.int8).tobytes() + np.array([7], np.float32).tobytes()
    packed = json.dumps(header).encode() + b"\n" + zlib.compress(payload)
    (tmp_path / "weights.00").write_bytes(packed[:40])
    (tmp_path / "weights.01").write_bytes(packed[40:])
    weights = network.read_weights(tmp_path)
    assert weights["a"].tolist() == [[0, 1], [-4, 8]]
    assert weights["b"].tolist() == [7]


def test_the_norm_with_snake_is_instance_norm_scale_shift_and_snake() -> None:
    x, style, alpha = torch.randn(2, 50, 4), torch.randn(2, 8), torch.rand(1, 4, 1) + 0.5
    normed = torch.nn.functional.instance_norm(x.transpose(1, 2))
    scale, shift = style[..., None].chunk(2, dim=1)
    y = (1 + scale) * normed + shift
    wanted = y + torch.sin(alpha * y).square() / alpha
    assert torch.allclose(network.norm_snake(x, style, alpha), wanted.transpose(1, 2), atol=1e-4)
