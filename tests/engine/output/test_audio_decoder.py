from collections.abc import Sequence as Rows
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.audio.guard import SpeechGuard
from shoal.checkpoint.load import Checkpoint
from shoal.codec.config import MAX_POSITIONS
from shoal.codec.fused import FusedDecoder
from shoal.codec.graph_decoder import FrameSpan, PendingDecode
from shoal.codec.plain_graphs import PlainCall
from shoal.codec.streaming import StreamingDecoder
from shoal.engine.execution.retry import FIRST_SECONDS
from shoal.engine.output.audio_decoder import AudioDecoder, DecodeResult, PlannedChunk
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Turn, Utterance
from shoal.errors import GenerationFailed
from shoal.speech import Samples, SamplingParams
from shoal.text.prompt import Codes
from tests.engine.clock import FakeClock

NO_TOKENS = np.zeros((1, 11), np.int32)


def codes(frames: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 128, (10, frames)).astype(np.int32)


def utterance(slot: int, frames: Codes | None = None, *, whole: bool = False) -> Utterance:
    """Return an utterance in a slot, with frames to decode."""
    made = Utterance(slot, [Turn("words", NO_TOKENS, NO_TOKENS)], SamplingParams(), whole=whole)
    made.sequence = Sequence.start(slot, NO_TOKENS, SamplingParams(), 100)
    made.sequence.slot = slot
    made.codes = [] if frames is None else list(frames.T)
    return made


def audio_decoder(
    checkpoint: Checkpoint, clock: FakeClock | None = None, first: int = 2, max_frames: int = 32
) -> AudioDecoder:
    return AudioDecoder(checkpoint.codec, 4, first_frames=first, max_frames=max_frames, clock=clock or FakeClock())


def whole(checkpoint: Checkpoint, frames: Codes) -> Samples:
    samples: Samples = checkpoint.codec.decode(torch.from_numpy(frames.astype(np.int64))[None])[0].numpy()
    return samples


def sound(answer: DecodeResult) -> Samples:
    assert not isinstance(answer, GenerationFailed), answer
    return answer


def decode(decoder: AudioDecoder, due: list[PlannedChunk]) -> list[DecodeResult]:
    decoder.submit(due)
    return [answer for _, answer in decoder.collect()]


class Listener:
    """Plays an utterance in real time from its first chunk on."""

    def __init__(self, decoder: AudioDecoder, clock: FakeClock, speaker: Utterance) -> None:
        self.decoder, self.clock, self.speaker = decoder, clock, speaker
        self.chunks: list[int] = []

    def hear(self, *, ended: bool = False) -> None:
        """Decode the next chunk, as the request tracker does."""
        due = self.decoder.next_chunk(self.speaker, ended=ended)
        if due is not None:
            if not self.speaker.sent:
                self.speaker.first_sent = self.clock.now
            self.speaker.decoded += due.frames
            self.speaker.sent = self.speaker.decoded
            self.chunks.append(due.frames)

    @property
    def lead(self) -> float:
        """Frames that were received and not yet played."""
        received = (self.clock.now - self.speaker.first_sent) * self.decoder.codec.config.frame_rate
        return self.speaker.sent - received


def test_the_first_chunk_is_sent_after_first_chunk_frames(tiny: Checkpoint) -> None:
    decoder, speaker = audio_decoder(tiny, first=3), utterance(0, codes(2))
    assert decoder.next_chunk(speaker, ended=False) is None
    speaker.codes.append(codes(1)[:, 0])
    assert decoder.next_chunk(speaker, ended=False) == PlannedChunk(speaker, 3, ended=False)


def test_frames_that_were_held_back_do_not_delay_the_first_chunk(tiny: Checkpoint) -> None:
    decoder, speaker = audio_decoder(tiny, first=2), utterance(0, codes(9))
    speaker.guard, speaker.turns = SpeechGuard(16000), [replace(speaker.turns[0], min_frames=10, hold_frames=10)]
    assert decoder.next_chunk(speaker, ended=False) is None
    speaker.codes.append(codes(1)[:, 0])
    assert decoder.next_chunk(speaker, ended=False) == PlannedChunk(speaker, 2, ended=False)
    speaker.decoded = speaker.sent = 2
    assert decoder.next_chunk(speaker, ended=False) == PlannedChunk(speaker, 8, ended=False)


def test_chunks_grow_with_the_lead_over_playback(tiny: Checkpoint) -> None:
    clock = FakeClock()
    speaker = utterance(0)
    listener = Listener(audio_decoder(tiny, clock, max_frames=16), clock, speaker)
    for _ in range(300):
        clock.now += 1 / (10 * tiny.codec.config.frame_rate)
        speaker.codes.append(NO_TOKENS[0, 1:])
        listener.hear()
    assert listener.chunks[:2] == [2, 2]
    assert listener.chunks == sorted(listener.chunks)
    assert max(listener.chunks) == 16


@pytest.mark.parametrize("speed", [2.0, 5.0, 300.0])
def test_chunks_are_cut_at_the_same_places_whatever_the_speed(tiny: Checkpoint, speed: float) -> None:
    clock = FakeClock()
    listener = Listener(audio_decoder(tiny, clock, max_frames=16), clock, utterance(0))
    for _ in range(100):
        clock.now += 1 / (speed * tiny.codec.config.frame_rate)
        listener.speaker.codes.append(NO_TOKENS[0, 1:])
        listener.hear()
    assert listener.chunks[:9] == [2, 2, 2, 3, 4, 6, 9, 14, 16]


@pytest.mark.parametrize("speed", [5.0, 300.0])
def test_a_first_chunk_of_one_frame_is_followed_by_the_next_frame(tiny: Checkpoint, speed: float) -> None:
    clock = FakeClock()
    listener = Listener(audio_decoder(tiny, clock, first=1, max_frames=16), clock, utterance(0))
    for _ in range(100):
        clock.now += 1 / (speed * tiny.codec.config.frame_rate)
        listener.speaker.codes.append(NO_TOKENS[0, 1:])
        listener.hear()
        assert listener.lead > 0
    assert listener.chunks[:9] == [1, 1, 2, 2, 3, 4, 6, 9, 14]


def test_whole_utterances_are_decoded_in_the_largest_chunks(tiny: Checkpoint) -> None:
    decoder, speaker = audio_decoder(tiny, max_frames=8), utterance(0, codes(7), whole=True)
    assert decoder.next_chunk(speaker, ended=False) is None
    speaker.codes.append(codes(1)[:, 0])
    assert decoder.next_chunk(speaker, ended=False) == PlannedChunk(speaker, 8, ended=False)


def test_all_frames_are_decoded_before_the_prefill_of_the_next_turn(tiny: Checkpoint) -> None:
    decoder, speaker = audio_decoder(tiny, first=4), utterance(0, codes(1))
    assert decoder.next_chunk(speaker, ended=False) is None
    assert decoder.next_chunk(speaker, ended=False, pausing=True) == PlannedChunk(speaker, 1, ended=False)
    speaker.decoded = 1
    assert decoder.next_chunk(speaker, ended=False, pausing=True) is None


def test_the_last_chunk_has_all_remaining_frames_and_may_be_empty(tiny: Checkpoint) -> None:
    decoder = audio_decoder(tiny)
    assert decoder.next_chunk(utterance(0, codes(1)), ended=True).frames == 1  # type: ignore[union-attr]
    nothing = decoder.next_chunk(utterance(1), ended=True)
    assert nothing is not None
    assert [len(sound(answer)) for answer in decode(decoder, [nothing])] == [0]


@settings(deadline=None, max_examples=40)
@given(
    gaps=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=30),
    first=st.integers(1, 4),
    max_frames=st.integers(4, 64),
)
def test_playback_never_underruns_while_generation_is_faster_than_real_time(
    tiny: Checkpoint, gaps: list[float], first: int, max_frames: int
) -> None:
    """A gap is the time between two frames, in frames."""
    clock = FakeClock()
    speaker = utterance(0)
    listener = Listener(audio_decoder(tiny, clock, first, max_frames), clock, speaker)
    for frame in range(200):
        clock.now += gaps[frame % len(gaps)] / tiny.codec.config.frame_rate
        assert not speaker.sent or listener.lead > 0
        speaker.codes.append(NO_TOKENS[0, 1:])
        listener.hear()
    assert sum(listener.chunks) >= 200 - max_frames


def test_a_client_after_an_underrun_gets_chunks_of_the_first_size(tiny: Checkpoint) -> None:
    clock = FakeClock()
    listener = Listener(audio_decoder(tiny, clock, first=2), clock, utterance(0))
    for _ in range(20):
        clock.now += 3 / tiny.codec.config.frame_rate
        listener.speaker.codes.append(NO_TOKENS[0, 1:])
        listener.hear()
    assert set(listener.chunks) == {2}


def test_chunks_of_any_lengths_in_one_call_equal_whole_decoding(tiny: Checkpoint) -> None:
    decoder = audio_decoder(tiny)
    speakers = [utterance(slot, codes(12, slot)) for slot in range(3)]
    received: list[list[Samples]] = [[], [], []]
    for lengths in ([2, 5, 0], [1, 1, 1], [7, 2, 3], [2, 4, 8]):
        dues = [PlannedChunk(each, frames, ended=False) for each, frames in zip(speakers, lengths, strict=True)]
        for pieces, answer in zip(received, decode(decoder, dues), strict=True):
            pieces.append(sound(answer))
    for slot, pieces in enumerate(received):
        assert np.allclose(np.concatenate(pieces), whole(tiny, codes(12, slot)), atol=1e-6)
    assert decoder.seconds > 0


def test_a_released_slot_has_no_state_of_the_utterance_before(tiny: Checkpoint) -> None:
    decoder = audio_decoder(tiny)
    for seed in range(2):
        [answer] = decode(decoder, [PlannedChunk(utterance(1, codes(6, seed)), 6, ended=True)])
        assert np.allclose(sound(answer), whole(tiny, codes(6, seed)), atol=1e-6)
        decoder.clear(1)


class Breaking:
    """Decoder that fails on some slots after writing its state."""

    backend = "eager"

    def __init__(self, decoder: AudioDecoder, bad: set[int], times: int = 1_000_000) -> None:
        self._real, self.bad, self.times = decoder._decoder, bad, times
        self.past = self._real.past

    def decode(self, codes: Tensor, slots: Rows[int], lengths: Rows[int] | None = None) -> Tensor:
        samples = self._real.decode(codes, slots, lengths)
        if self.times and self.bad & set(slots):
            self.times -= 1
            raise RuntimeError("the codec broke")
        return samples

    def reset(self, slots: Rows[int]) -> None:
        self._real.reset(slots)


def test_a_failing_codec_call_fails_only_the_faulty_utterance(tiny: Checkpoint) -> None:
    decoder = audio_decoder(tiny, max_frames=4)
    speakers = [utterance(slot, codes(11, slot)) for slot in range(3)]
    received: list[list[Samples]] = [[], [], []]

    def say(frames: int, bad: set[int]) -> list[DecodeResult]:
        decoder._decoder = Breaking(decoder, bad)  # type: ignore[assignment]
        answers = decode(decoder, [PlannedChunk(each, frames, ended=False) for each in speakers])
        decoder._decoder = decoder._decoder._real  # type: ignore[attr-defined]
        return answers

    for frames, bad in ((3, set[int]()), (6, {1}), (2, set[int]())):
        answers = say(frames, bad)
        assert [isinstance(answer, GenerationFailed) for answer in answers] == [slot in bad for slot in range(3)]
        for pieces, answer in zip(received, answers, strict=True):
            if not isinstance(answer, GenerationFailed):
                pieces.append(answer)
    for slot in (0, 2):
        assert np.allclose(np.concatenate(received[slot]), whole(tiny, codes(11, slot)), atol=1e-6)


def test_a_codec_call_that_fails_once_is_recovered(tiny: Checkpoint) -> None:
    decoder = audio_decoder(tiny)
    decoder._decoder = Breaking(decoder, {0, 1}, times=1)  # type: ignore[assignment]
    speakers = [utterance(slot, codes(5, slot)) for slot in range(2)]
    for slot, answer in enumerate(decode(decoder, [PlannedChunk(each, 5, ended=True) for each in speakers])):
        assert np.allclose(sound(answer), whole(tiny, codes(5, slot)), atol=1e-6)
        assert speakers[slot].decoded == 5


@pytest.mark.parametrize("first", [1, 2, 5])
def test_sent_audio_is_counted_in_frames(tiny: Checkpoint, first: int) -> None:
    clock = FakeClock()
    listener = Listener(audio_decoder(tiny, clock, first=first), clock, utterance(0, codes(first)))
    listener.hear()
    assert listener.lead == first


class BrokenGraphs(FusedDecoder):
    """Graph decoder that fails after some calls, with its state half written."""

    def __init__(self, checkpoint: Checkpoint, works: int, *, late: bool) -> None:
        """With `late` the call fails only when the samples are fetched, as on an asynchronous device."""
        self.eager = StreamingDecoder(checkpoint.codec, 4)
        self.left, self.late = works, late
        self._seen = self.eager._seen

    def launch(self, codes: np.ndarray, slots: Rows[int], lengths: Rows[int]) -> PendingDecode:
        self.left -= 1
        samples = self.eager.decode(torch.from_numpy(codes), slots, lengths)
        if self.left >= 0:
            step = self.eager.codec.config.frame_length
            calls = [([FrameSpan(row, 0, each)], samples[row, : each * step]) for row, each in enumerate(lengths)]
            return PendingDecode(calls, list(lengths), step, None)
        if self.late:
            return PendingDecode([([FrameSpan(0, 0, 1)], samples[0])], [], 1, None)
        raise ValueError("an illegal memory access")

    def reset(self, slots: Rows[int]) -> None:
        self.eager.reset(slots)

    def drop_failed(self) -> bool:
        return False

    def wrap(self, decoder: AudioDecoder) -> None:
        decoder._backends, decoder._decoder = ("graph", "eager"), self
        decoder._built["graph"] = self


@pytest.mark.parametrize("late", [False, True])
def test_a_codec_whose_graphs_fail_falls_back_without_audible_difference(tiny: Checkpoint, late: bool) -> None:
    decoder, frames = audio_decoder(tiny), [codes(6, seed) for seed in (1, 2)]
    BrokenGraphs(tiny, works=2, late=late).wrap(decoder)
    speakers = [utterance(0, frames[0][:, :2]), utterance(1, frames[1][:, :2])]
    received = [[], []]  # type: ignore[var-annotated]

    def hear(*rows: int) -> None:
        answers = decode(decoder, [PlannedChunk(speakers[row], speakers[row].backlog, ended=False) for row in rows])
        for row, answer in zip(rows, answers, strict=True):
            received[row].append(sound(answer))

    hear(0, 1)
    assert decoder.backend == "graph"
    speakers[0].codes += list(frames[0][:, 2:4].T)
    hear(0)
    speakers[0].codes += list(frames[0][:, 4:].T)
    hear(0)  # fails; the other utterance has no chunk in this call
    assert decoder.backend == "eager"
    speakers[1].codes += list(frames[1][:, 2:].T)
    hear(1)
    for row in range(2):
        assert np.allclose(np.concatenate(received[row]), whole(tiny, frames[row]), atol=1e-5)


@pytest.mark.parametrize("works", [0, 1])
def test_chunks_of_utterances_released_before_collect_are_dropped(tiny: Checkpoint, works: int) -> None:
    decoder, speakers = audio_decoder(tiny), [utterance(slot, codes(3, slot)) for slot in range(3)]
    BrokenGraphs(tiny, works, late=True).wrap(decoder)
    decoder.submit([PlannedChunk(each, 3, ended=True) for each in speakers])
    gone = speakers.pop(1)
    gone.sequence.slot = -1
    decoder.clear(1)
    collected = decoder.collect()
    assert [due.utterance for due, _ in collected] == speakers
    for due, answer in collected:
        assert np.allclose(sound(answer), whole(tiny, codes(3, due.utterance.id)), atol=1e-5)
    # The slot belongs to another utterance now and has been reset.
    newcomer = utterance(1, codes(3, 9))
    [answer] = decode(decoder, [PlannedChunk(newcomer, 3, ended=True)])
    assert np.allclose(sound(answer), whole(tiny, codes(3, 9)), atol=1e-5)


def test_a_stream_too_long_for_the_graphs_fails_alone_and_the_graphs_stay(tiny: Checkpoint) -> None:
    decoder, speakers = audio_decoder(tiny), [utterance(slot, codes(3, slot)) for slot in range(2)]
    BrokenGraphs(tiny, works=1, late=False).wrap(decoder)
    decoder._decoder._seen[0] = MAX_POSITIONS - 2
    answers = decode(decoder, [PlannedChunk(each, 3, ended=True) for each in speakers])
    assert isinstance(answers[0], GenerationFailed)
    assert "several requests" in str(answers[0])
    assert np.allclose(sound(answers[1]), whole(tiny, codes(3, 1)), atol=1e-5)
    assert decoder.backend == "graph"


def test_only_graphs_overlap_with_the_model(tiny: Checkpoint) -> None:
    """Eager operators finish when they are launched: collecting a step later would only delay the audio."""
    decoder = AudioDecoder(tiny.codec, 4, first_frames=2, max_frames=32, overlap=True)
    assert not decoder.overlap
    BrokenGraphs(tiny, works=0, late=False).wrap(decoder)
    decoder._overlap = True
    decode(decoder, [PlannedChunk(utterance(0, codes(3)), 3, ended=True)])
    assert (decoder.backend, decoder.overlap) == ("eager", False)


def test_a_codec_backend_that_fails_is_tried_again_later(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing size is left out first; a second failure switches to the next backend; both end after a while."""
    clock, failing, run = FakeClock(), set[int](), PlainCall.run

    def run_or_fail(call: PlainCall) -> None:
        if call.frames in failing:
            raise ValueError("an illegal memory access")
        run(call)

    monkeypatch.setattr(PlainCall, "run", run_or_fail)
    decoder = AudioDecoder(
        tiny.codec, 4, first_frames=2, max_frames=32, clock=clock, backends=("plain-graph", "eager"), overlap=True
    )
    frames, received = codes(12, 1), []
    speaker = utterance(0)

    def hear(until: int) -> None:
        speaker.codes = list(frames[:, :until].T)
        (answer,) = decode(decoder, [PlannedChunk(speaker, speaker.backlog, ended=False)])
        received.append(sound(answer))

    hear(2)
    failing.add(2)
    hear(4)
    assert (decoder.backend, decoder.overlap) == ("plain-graph", True)
    assert "plain codec graph (2, 1): ValueError: an illegal memory access" in decoder.dropped
    failing |= {8, 32}
    hear(6)
    assert (decoder.backend, decoder.overlap) == ("eager", False)
    assert "illegal memory access" in decoder.reasons["plain-graph"]
    hear(8)
    failing.clear()
    clock.now += FIRST_SECONDS
    hear(12)
    assert decoder.backend == "plain-graph"
    assert decoder.reasons == {}
    assert np.allclose(np.concatenate(received), whole(tiny, frames), atol=1e-5)


def test_a_codec_size_that_fails_again_when_it_is_retried_is_left_out_again(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failing, run = FakeClock(), {2}, PlainCall.run

    def run_or_fail(call: PlainCall) -> None:
        if call.frames in failing:
            raise ValueError("an illegal memory access")
        run(call)

    decoder = AudioDecoder(
        tiny.codec, 4, first_frames=2, max_frames=32, clock=clock, backends=("plain-graph", "eager"), overlap=True
    )
    monkeypatch.setattr(PlainCall, "run", run_or_fail)
    speaker, frames = utterance(0), codes(12, 1)
    for until in (8, 10, 12):
        speaker.codes = list(frames[:, :until].T)
        decode(decoder, [PlannedChunk(speaker, speaker.backlog, ended=False)])
        assert decoder.backend == "plain-graph"
        clock.now += 100 * FIRST_SECONDS
    assert [size for size in decoder.dropped if "(2, 1)" in size]
