import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.audio.resample import Resampler, StreamPool
from shoal.errors import MissingExtra


def test_equal_rates_pass_through_untouched(without_extras, speech):
    samples = speech(0.1)
    resampler = Resampler(44_100, 44_100)
    assert resampler.feed(samples) is samples
    assert resampler.finish().size == 0


def test_other_rates_without_the_extra_name_the_command(without_extras):
    with pytest.raises(MissingExtra, match=r"44100 to 48000 Hz needs: pip install 'shoal-tts\[formats\]'"):
        Resampler(44_100, 48_000)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 5000), max_size=8), rate=st.sampled_from([8_000, 24_000, 48_000]))
def test_resampling_in_pieces_equals_resampling_whole(speech, cuts, rate):
    samples = speech(0.4)
    whole = Resampler(44_100, rate)
    expected = np.concatenate([whole.feed(samples), whole.finish()])
    pieces = Resampler(44_100, rate)
    got = [pieces.feed(piece) for piece in np.split(samples, np.cumsum(cuts))]
    assert np.array_equal(np.concatenate([*got, pieces.finish()]), expected)
    assert abs(len(expected) - len(samples) * rate / 44_100) <= 1


def resampled(resampler, samples):
    return np.concatenate([resampler.feed(samples), resampler.finish()])


def test_a_stream_that_is_used_again_does_not_remember_the_last_signal(monkeypatch, speech):
    expected = resampled(Resampler(44_100, 24_000), speech(0.3))
    pool = StreamPool(2)
    monkeypatch.setattr("shoal.audio.resample.STREAMS", pool)
    resampled(Resampler(44_100, 24_000), np.full(3000, np.nan, np.float32))
    resampled(Resampler(44_100, 24_000), np.ones(5, np.float32))
    assert len(pool) == 1
    assert np.array_equal(resampled(Resampler(44_100, 24_000), speech(0.3)), expected)


def test_idle_streams_are_bounded_and_belong_to_their_rates(monkeypatch):
    pool = StreamPool(2)
    monkeypatch.setattr("shoal.audio.resample.STREAMS", pool)
    for rate in (8_000, 16_000, 24_000):
        Resampler(44_100, rate).finish()
    assert len(pool) == 2
    assert resampled(Resampler(44_100, 8_000), np.zeros(44_100, np.float32)).size == 8_000
    assert resampled(Resampler(44_100, 24_000, quality="VHQ"), np.zeros(44_100, np.float32)).size == 24_000


@pytest.mark.parametrize("rate", [44_100, 24_000])
def test_a_finished_resampler_takes_no_more_samples(rate):
    resampler = Resampler(44_100, rate)
    resampler.finish()
    with pytest.raises(RuntimeError, match="finished"):
        resampler.feed(np.zeros(10, np.float32))


def test_no_stream_is_alive_when_the_interpreter_ends():
    program = """
import atexit
atexit.register(lambda: print(len(resample.STREAMS)))  # runs last
from shoal.audio import resample
resample.Resampler(44_100, 24_000).finish()
print(len(resample.STREAMS))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
