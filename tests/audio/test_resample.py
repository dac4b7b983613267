import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.audio.resample import Resampler
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
