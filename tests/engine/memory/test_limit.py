import pytest

from shoal.engine.memory.limit import parse_memory_limit
from shoal.errors import InvalidRequest

TOTAL = 24 * 10**9


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("0.9", 21.6e9), ("1", TOTAL), (".5", 12e9), ("4GB", 4e9), ("4 gb", 4e9), ("2GiB", 2 << 30), ("500MB", 5e8),
     ("3000000000", 3e9)],
)  # fmt: skip
def test_a_memory_limit_is_a_fraction_or_a_size(text: str, bytes: float) -> None:
    assert parse_memory_limit(text, TOTAL) == int(bytes)


@pytest.mark.parametrize("text", ["", "a lot", "-1", "4 TB", "90%", "1e9GB", "nan"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"neither a fraction such as 0\.9 nor a size such as 4GB"):
        parse_memory_limit(text, TOTAL)


@pytest.mark.parametrize("text", ["3", "90"])
def test_a_number_too_large_for_a_fraction_and_too_small_for_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="has no unit"):
        parse_memory_limit(text, TOTAL)


@pytest.mark.parametrize(("text", "message"), [("0", "is 0"), ("0GB", "is 0"), ("25GB", r"this device has 24\.0 GB")])
def test_zero_and_more_than_the_device_has_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_memory_limit(text, TOTAL)
