"""Errors about a body do not grow with the body."""

import contextlib
import gc
import json

import ormsgpack
import pytest

from shoal.api.bodies.parsing import MAX_ERRORS, check_parts, parse_form, parse_json, unpack, validated
from shoal.api.bodies.schemas import Invocation, SpeechBody
from shoal.api.exceptions import SchemaViolation
from shoal.server.routes.codec import Audios, Tokens


def rejection(model: type, content: object) -> SchemaViolation:
    with pytest.raises(SchemaViolation) as caught:
        validated(model, content)
    assert len(json.dumps(caught.value.errors)) < 16_000
    return caught.value


def test_the_first_errors_are_reported_and_the_rest_counted() -> None:
    found = rejection(SpeechBody, {"text": "Hi."} | {f"x{number}": 0 for number in range(900)}).errors
    assert [error["loc"] for error in found[:2]] == [["x0"], ["x1"]]
    assert len(found) == MAX_ERRORS + 1
    assert found[-1]["msg"] == "and 892 more errors"


@pytest.mark.parametrize(
    ("model", "content"),
    [
        (SpeechBody, {"text": "Hi.", "references": [[]] * 9_000}),
        (SpeechBody, {"text": "Hi.", "references": [{"a": 1, "b": 2}] * 9_000}),
        (Audios, {"audios": [0] * 9_000}),
        (Tokens, {"tokens": [[[-1] * 300_000]]}),
        (Tokens, {"tokens": [[]] * 9_000}),
        (Tokens, {"tokens": [[[]] * 9_000]}),
    ],
)
def test_a_list_of_wrong_elements_is_a_few_errors(model: type, content: object) -> None:
    assert len(rejection(model, content).errors) <= 4


def test_a_body_that_is_no_object_is_refused_in_the_words_of_json() -> None:
    assert rejection(SpeechBody, [1]).errors[0]["msg"] == "Input should be an object"


def test_long_names_are_cut() -> None:
    assert rejection(SpeechBody, {"text": "Hi.", "x" * 100_000: 0}).errors[0]["loc"] == ["x" * 64]
    assert rejection(Invocation, ["x" * 100_000]).errors
    with pytest.raises(SchemaViolation) as caught:
        check_parts({"x" * 100_000: ["a"]}, "text")
    assert caught.value.errors[0]["loc"] == ["x" * 64]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[1.5]], "codes are integers from 0"),
        ([[2**31]], "codes are integers from 0"),
        ([[10**400]], "codes are integers from 0"),
        ([[2**64 - 1]], "codes are integers from 0"),
        ([[float("nan")]], "codes are integers from 0"),
        ([["1"]], "codes are integers"),
        ([[True]], "codes are integers"),
        ([[None]], "codes are integers"),
        ([[1], [1, 2]], "same length"),
        ([[], []], "same length"),
        ([[1]] * 33, "1 to 32 rows"),
        ([1, 2], "1 to 32 rows"),
        (1, "1 to 32 rows"),
    ],
)
def test_a_wrong_matrix_of_codes_is_one_error(codes: object, message: str) -> None:
    (error,) = rejection(Tokens, {"tokens": [codes]}).errors
    assert (error["loc"], message in error["msg"]) == (["tokens"], True)


def test_codes_become_an_array() -> None:
    (codes,) = validated(Tokens, {"tokens": [[[0, 1], [2.0, 2**31 - 1]]]}).tokens
    assert codes.tolist() == [[0, 1], [2, 2**31 - 1]]
    assert codes.dtype == "int32"


def test_json_may_begin_with_a_byte_order_mark() -> None:
    assert parse_json(b'\xef\xbb\xbf{"text": "a"}') == parse_json('\ufeff{"text": "a"}') == {"text": "a"}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r"Hi \ud83d", "Hi \ufffd"),
        (r"\ude00 there", "\ufffd there"),
        (r"\uDE00\uD83D\uDE00\uD83D", "\ufffd\U0001f600\ufffd"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d\u0041", "\\\ufffdA"),
    ],
)
def test_half_of_an_emoji_is_a_replacement_character(sent: str, read: str) -> None:
    assert parse_json(f'{{"text": "{sent}"}}') == {"text": read}


def test_ambiguous_bodies_are_rejected_with_the_reason() -> None:
    with pytest.raises(SchemaViolation, match="the key 'text' occurs twice in one object"):
        parse_json('{"text": "a", "text": "b"}')
    with pytest.raises(SchemaViolation, match="1 bytes follow the end of its value"):
        unpack(ormsgpack.packb({"text": "a"}) + b"\xc0")


@pytest.mark.parametrize("end", [b"--b--\r\n", b"--c"])
def test_a_parsed_form_leaves_no_garbage(end: bytes) -> None:
    """Otherwise its recordings stay in memory, beyond the budget for bodies, until the garbage collector runs."""
    head = b'--b\r\nContent-Disposition: form-data; name="audio"; filename="a"\r\n\r\n'
    body = head + bytes(1_000) + b"\r\n" + end
    with contextlib.suppress(SchemaViolation):
        parse_form(body, "b")  # imports the parser, which leaves garbage of its own
    gc.disable()
    gc.freeze()  # what other tests left may become garbage at any time, as when the thread of an engine ends
    try:
        with contextlib.suppress(SchemaViolation):
            parse_form(body, "b")
        assert gc.collect() == 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_a_megabyte_of_empty_lists_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def parser(*_: object, **__: object) -> None:
        raise AssertionError("the parser ran")

    monkeypatch.setattr("ormsgpack.unpackb", parser)
    monkeypatch.setattr("pydantic_core.from_json", parser)
    with pytest.raises(SchemaViolation, match="more than 10,000 elements"):
        unpack(b"\xdd" + (1 << 20).to_bytes(4) + b"\x90" * (1 << 20))
    with pytest.raises(SchemaViolation, match="more than 10,000 elements"):
        parse_json(b"[" + b"[]," * (1 << 18))
