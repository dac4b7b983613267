import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.audio.pcm import speech_samples, to_float, to_int16
from shoal.errors import GenerationFailed


@given(pcm=hnp.arrays(np.int16, st.integers(0, 200)))
def test_sixteen_bit_audio_survives_a_trip_through_floats(pcm):
    assert np.array_equal(to_int16(to_float(pcm)), pcm)


@given(samples=hnp.arrays(np.float32, st.integers(0, 200), elements=st.floats(-2, 2, width=32)))
def test_sixteen_bit_conversion_is_nearest_and_clips(samples):
    exact = np.clip(samples.astype(np.float64) * 32768, -32768, 32767)
    assert np.abs(to_int16(samples) - exact).max(initial=0) <= 0.5


def test_every_integer_width_has_full_scale_at_one():
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        assert to_float(np.array([limits.min, 0], dtype)).tolist() == [-1.0, 0.0]
        assert to_float(np.array([limits.max], dtype))[0] == pytest.approx(1.0, abs=0.01)
    assert to_float(np.array([0, 128], np.uint8)).tolist() == [-1.0, 0.0]


def test_a_double_beyond_float32_becomes_an_infinity_without_a_warning():
    assert np.isinf(to_float(np.array([1e300])))


def test_samples_that_are_not_finite_are_not_encoded():
    with pytest.raises(GenerationFailed, match="not finite"):
        speech_samples(np.array([0.0, np.nan], np.float32))


def test_two_dimensions_are_not_mono():
    with pytest.raises(ValueError, match="mono"):
        speech_samples(np.zeros((2, 10), np.float32))
