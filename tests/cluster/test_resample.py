import numpy as np

from shoal.cluster.resample import ChunkResampler
from shoal.speech import AudioChunk, FinishReason


def test_chunks_of_the_promised_rate_pass_untouched() -> None:
    chunk = AudioChunk(np.ones(10, np.float32), 16_000)
    assert ChunkResampler(16_000)(chunk) is chunk


def test_chunks_of_another_rate_come_out_at_the_promised_one_with_the_same_length_in_time() -> None:
    tone = np.sin(np.arange(44_100) / 44_100 * 2 * np.pi * 440).astype(np.float32)
    chunks = [AudioChunk(piece, 44_100) for piece in np.array_split(tone, 7)]
    chunks[-1] = AudioChunk(chunks[-1].samples, 44_100, FinishReason.STOP)
    same = ChunkResampler(16_000)
    heard = [same(chunk) for chunk in chunks]
    assert {chunk.sample_rate for chunk in heard} == {16_000}
    assert heard[-1].finish is FinishReason.STOP
    samples = np.concatenate([chunk.samples for chunk in heard])
    assert abs(len(samples) - 16_000) <= 1
    crossings = int((np.diff(np.signbit(samples)) != 0).sum())
    assert abs(crossings - 880) <= 2
