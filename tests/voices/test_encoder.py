import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from shoal.checkpoint.random import random_checkpoint
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError
from shoal.voices.encoder import CodecEncoder, codec_fingerprint


def samples(seconds: float = 0.5) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, round(seconds * 16_000)).astype(np.float32)


def test_codes_are_those_of_the_codec(tiny):
    codes = CodecEncoder(tiny.codec).encode(samples())
    expected = tiny.codec.encode(torch.from_numpy(samples())[None])[0]
    assert np.array_equal(codes, expected.numpy())
    assert codes.dtype == np.int32


def test_rates_are_those_of_the_codec(tiny):
    encoder = CodecEncoder(tiny.codec)
    assert (encoder.sample_rate, encoder.frame_rate) == (16_000, tiny.codec.config.frame_rate)


def test_a_fingerprint_fits_in_a_file_name(tiny):
    assert CodecEncoder(tiny.codec).fingerprint.isalnum()


def test_the_same_weights_have_the_same_fingerprint(tiny):
    again = random_checkpoint("tiny", dtype=torch.float32)
    assert codec_fingerprint(again.codec) == codec_fingerprint(tiny.codec)


def test_a_fingerprint_is_the_same_without_the_encoder_and_in_half_precision(tiny):
    codec = Codec(tiny.codec.config, encoder=False)
    codec.load_state_dict({n: t for n, t in tiny.codec.state_dict().items() if n in codec.state_dict()})
    assert codec_fingerprint(codec) == codec_fingerprint(tiny.codec)
    assert codec_fingerprint(codec.to(torch.bfloat16)) == codec_fingerprint(tiny.codec)


def test_other_weights_have_another_fingerprint(tiny):
    other = random_checkpoint("tiny", seed=1, dtype=torch.float32)
    assert codec_fingerprint(other.codec) != codec_fingerprint(tiny.codec)


@pytest.mark.parametrize("part", ["quantizer.quantizer.quantizers.8.codebook.weight", "decoder.model.1.block.0.alpha"])
def test_one_changed_weight_changes_the_fingerprint(tiny, part):
    codec = copy.deepcopy(tiny.codec)
    with torch.no_grad():
        codec.get_parameter(part).view(-1)[0] += 1.0
    assert codec_fingerprint(codec) != codec_fingerprint(tiny.codec)


def test_encoding_without_the_encoder_is_refused(tiny):
    encoder = CodecEncoder(Codec(tiny.codec.config, encoder=False))
    with pytest.raises(CheckpointError, match="without its encoder"):
        encoder.encode(samples())


def test_encoding_does_not_replace_tables_that_a_decoder_reads(tiny):
    codec = copy.deepcopy(tiny.codec)
    encoder = CodecEncoder(codec, max_seconds=2.0)
    table = codec.quantizer.post_module.table
    encoder.encode(samples(2.0))
    assert codec.quantizer.post_module.table is table


def test_threads_may_encode_concurrently(tiny):
    encoder = CodecEncoder(tiny.codec)
    expected, results = encoder.encode(samples()), []
    threads = [threading.Thread(target=lambda: results.append(encoder.encode(samples()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(codes, expected) for codes in results)
    assert len(results) == 4


@pytest.mark.gpu
def test_a_gpu_has_the_same_fingerprint_and_encodes_on_its_own_stream(tiny):
    codec = copy.deepcopy(tiny.codec).to("cuda")
    encoder = CodecEncoder(codec)
    assert encoder.fingerprint == codec_fingerprint(tiny.codec)
    encoder.encode(samples())  # the first call sets up libraries and memory, which waits for everything
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second of the stream that decodes
    busy.record()
    codes = encoder.encode(samples())
    assert not busy.query()
    assert np.mean(codes == CodecEncoder(tiny.codec).encode(samples())) > 0.9


def test_one_codec_call_runs_at_a_time_outside_the_steps(tiny):
    """The memory profile has room for one: voices and `/v1/vqgan` have encoders and threads of their own."""
    one, other, entered = CodecEncoder(tiny.codec), CodecEncoder(tiny.codec), threading.Event()

    def second() -> None:
        with other.exclusive():
            entered.set()

    with one.exclusive():
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.05)
        assert not other._lock.acquire(blocking=False)
    assert entered.wait(240)
    thread.join()
    assert CodecEncoder(random_checkpoint("tiny").codec)._lock is not one._lock


def test_encoding_runs_on_its_own_stream(tiny, monkeypatch):
    encoder, inside = CodecEncoder(tiny.codec), list[bool]()

    @contextmanager
    def stream() -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    monkeypatch.setattr(encoder, "_on_own_stream", stream)
    encoder.encode(samples(0.1))
    assert inside == [True, False]
