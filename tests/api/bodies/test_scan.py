"""Limits that are checked before a body becomes Python objects."""

import json
from typing import Any

import ormsgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.bodies.scan import MAX_DEPTH, MAX_ESCAPES, MAX_KEYS, PIECE_BYTES, BodyRejected, scan_json, scan_msgpack

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=40,
)


def elements(value: Any) -> int:
    """Count values and keys."""
    if isinstance(value, list):
        return 1 + sum(map(elements, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(elements, value.values()))
    return 1


@settings(deadline=None, max_examples=60)
@given(value=VALUES)
def test_msgpack_is_counted_exactly(value: Any) -> None:
    body, count = ormsgpack.packb(value), elements(value)
    scan_msgpack(body, count)
    with pytest.raises(BodyRejected, match="elements"):
        scan_msgpack(body, count - 1)
    with pytest.raises(BodyRejected, match="bytes follow the end"):
        scan_msgpack(body + b"\0", count)
    with pytest.raises(BodyRejected):
        scan_msgpack(body[:-1], count)


@settings(deadline=None, max_examples=60)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_json_is_counted_within_a_factor_of_two(value: Any, indent: int | None, ascii: bool) -> None:
    body, count = json.dumps(value, indent=indent, ensure_ascii=ascii).encode(errors="surrogatepass"), elements(value)
    scan_json(body, 2 * count)
    if count > 3:
        with pytest.raises(BodyRejected, match="elements"):
            scan_json(body, count // 2 - 1)


@pytest.mark.parametrize("binary", [b"a" * 10, b"a" * 300, b"a" * 70_000])
def test_binary_data_is_one_element(binary: bytes) -> None:
    scan_msgpack(ormsgpack.packb({"audio": binary}), 3)


@pytest.mark.parametrize("body", [b"\x91\xcb\x00\x00", b"\x92\x01", b"\x91\x92\x01\xca\x00", b"\xa4te", b"\xdc\x00"])
def test_a_truncated_msgpack_body_is_named_so(body: bytes) -> None:
    with pytest.raises(BodyRejected, match="truncated"):
        scan_msgpack(body)


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_deep_nesting_is_rejected(levels: int) -> None:
    for scan, body in ((scan_msgpack, b"\x91" * levels + b"\x01"), (scan_json, b"[" * levels + b"1" + b"]" * levels)):
        if levels > MAX_DEPTH:
            with pytest.raises(BodyRejected, match=f"deeper than {MAX_DEPTH} levels"):
                scan(body)
        else:
            scan(body)


@pytest.mark.parametrize("declared", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\xff\xff"])
def test_a_declared_length_is_rejected_before_its_values_arrive(declared: bytes) -> None:
    with pytest.raises(BodyRejected, match="elements"):
        scan_msgpack(declared)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "a", "text": "b"}',
        b'{"text": "a", "te\\u0078t": "b"}',
        b'[{"a": {"text":1}, "text" \n : "a", "b": [1, {"text": 2}], "text":"b"}]',
    ],
)
def test_a_key_twice_in_json_is_rejected(body: bytes) -> None:
    with pytest.raises(BodyRejected, match="the key 'text' occurs twice in one object"):
        scan_json(body)


def test_a_key_twice_in_msgpack_is_rejected_in_any_encoding() -> None:
    for key in (b"\xa4text", b"\xd9\x04text", b"\xda\x00\x04text", b"\xdb\x00\x00\x00\x04text"):
        with pytest.raises(BodyRejected, match="the key 'text' occurs twice in one object"):
            scan_msgpack(b"\x82\xa4text\x01" + key + b"\x02")


def test_equal_keys_of_different_objects_and_equal_values_are_accepted() -> None:
    value = {"a": {"text": "text"}, "b": [{"text": "a"}, {"text": "a"}], "text": "a"}
    scan_json(json.dumps(value).encode())
    scan_msgpack(ormsgpack.packb(value))


def test_keys_are_limited_apart_from_elements() -> None:
    value = {str(number): 0 for number in range(MAX_KEYS + 1)}
    with pytest.raises(BodyRejected, match="1,000 keys"):
        scan_msgpack(ormsgpack.packb(value))
    with pytest.raises(BodyRejected, match="1,000 keys"):
        scan_json(json.dumps(value).encode())


@pytest.mark.parametrize("offset", range(-3, 4))
@pytest.mark.parametrize("escape", ['\\"', "\\\\", "\\u0041", "x"])
def test_strings_longer_than_a_piece_end_where_they_end(escape: str, offset: int) -> None:
    """A comma, a bracket or a quote inside a string counts as nothing."""
    text = "[" * (PIECE_BYTES - 4 + offset) + escape + "{,"
    scan_json(f'{{"a\\n": "{text}", "b": 1}}'.encode(), 5)


def test_escapes_are_limited() -> None:
    scan_json(b'"' + b"\\/" * MAX_ESCAPES + b'"')
    with pytest.raises(BodyRejected, match="1,000,000 escapes"):
        scan_json(b'"' + b"\\/" * (MAX_ESCAPES + 1) + b'"')


@pytest.mark.parametrize("body", [b"]]]]", b'"', b'"\\', b'{"a"' + b" " * 70_000, b"{,:", b'"a":1', b'{"\\x":1}', b""])
def test_malformed_json_is_left_to_the_parser(body: bytes) -> None:
    scan_json(body)
