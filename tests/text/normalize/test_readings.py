import re

import pytest

from shoal.text.normalize import normalize
from tests.text.normalize.held_out import HELD_OUT
from tests.text.normalize.held_out_second import SECOND_HELD_OUT
from tests.text.normalize.held_out_third import THIRD_HELD_OUT
from tests.text.normalize.readings import READINGS
from tests.text.normalize.test_english import SPOKEN

CASES = [(category, *case) for category, cases in READINGS.items() for case in cases]


@pytest.mark.parametrize(("category", "written", "spoken"), CASES)
def test_text_is_read_as_people_read_it(category: str, written: str, spoken: str) -> None:
    assert normalize(written) == spoken


@pytest.mark.parametrize("category", HELD_OUT)
def test_texts_that_no_rule_was_written_for_are_read_acceptably(category: str) -> None:
    read = {written: (normalize(written), accepted) for written, *accepted in HELD_OUT[category]}
    assert not {written: spoken for written, (spoken, accepted) in read.items() if spoken not in accepted}


@pytest.mark.parametrize("category", SECOND_HELD_OUT)
def test_texts_of_language_models_are_read_acceptably(category: str) -> None:
    read = {written: (normalize(written).lower(), accepted) for written, *accepted in SECOND_HELD_OUT[category]}
    assert not {
        written: spoken for written, (spoken, accepted) in read.items() if spoken not in map(str.lower, accepted)
    }


@pytest.mark.parametrize("category", SECOND_HELD_OUT)
def test_readings_of_language_models_texts_are_stable(category: str) -> None:
    readings = [normalize(written) for written, *_ in SECOND_HELD_OUT[category]]
    assert [normalize(reading) for reading in readings] == readings


def words_and_ends(reading: str) -> str:
    """Return a reading without capitals, without the marks inside a sentence and the one at the end."""
    return " ".join(re.sub(r"[,;:]", " ", reading.lower()).split()).rstrip(".!?")


@pytest.mark.parametrize("category", THIRD_HELD_OUT)
def test_texts_of_strangers_are_read_acceptably_and_stay_as_they_are_read(category: str) -> None:
    readings = {written: normalize(written) for written, *_ in THIRD_HELD_OUT[category]}
    accepted = {written: {words_and_ends(each) for each in rest} for written, *rest in THIRD_HELD_OUT[category]}
    assert not {written: read for written, read in readings.items() if words_and_ends(read) not in accepted[written]}
    assert [normalize(reading) for reading in readings.values()] == list(readings.values())


@pytest.mark.parametrize(("category", "written", "spoken"), CASES)
def test_a_reading_is_normalised_to_itself(category: str, written: str, spoken: str) -> None:
    assert normalize(spoken) == spoken


def test_the_table_is_large_enough_to_mean_something() -> None:
    assert len(CASES) + len(SPOKEN) >= 400
