"""Fields of the Fish API and the requests they become."""

from typing import Any

import pytest

from shoal.api.bodies.parsing import validated
from shoal.api.bodies.schemas import SpeechBody
from shoal.api.config import Limits
from shoal.api.exceptions import SchemaViolation
from shoal.api.requests import fish_request


def body(**fields: Any) -> SpeechBody:
    return validated(SpeechBody, {"text": "Hello.", **fields})


@pytest.mark.parametrize("name", [*sorted({*SpeechBody.model_fields, "model_id"} - {"text"})])
def test_a_null_is_a_field_that_is_not_set(name: str) -> None:
    assert body(**{name: None}) == body()


def test_a_null_in_place_of_the_text_is_a_missing_text() -> None:
    with pytest.raises(SchemaViolation, match="text: Field required"):
        body(text=None)


@pytest.mark.parametrize(
    ("latency", "frame_rate", "frames"),
    [(None, 21.5, None), ("low", 21.5, None), ("balanced", 21.5, 10), ("balanced", 25.0, 12), ("normal", 21.5, 20)],
)
def test_latency_chooses_the_first_chunk(latency: str | None, frame_rate: float, frames: int | None) -> None:
    assert body(latency=latency).first_chunk_frames(frame_rate) == frames


def test_nested_references_number_the_speakers() -> None:
    nested = [[{"audio": b"a", "text": "A."}, {"audio": b"b", "text": "B."}], [{"audio": b"c", "text": "C."}]]
    recordings = fish_request(body(references=nested), Limits()).recordings
    assert [(each.audio, each.speaker) for each in recordings] == [(b"a", 0), (b"b", 0), (b"c", 1)]


def test_flat_references_have_no_speakers() -> None:
    recordings = fish_request(body(references=[{"audio": b"a", "text": "A."}]), Limits()).recordings
    assert [each.speaker for each in recordings] == [None]


@pytest.mark.parametrize("speakers", [(1,), (0, 2), (0, None)])
def test_speakers_are_numbered_without_gaps(speakers: tuple[int | None, ...]) -> None:
    references = [{"audio": b"a", "text": "A.", "speaker": speaker} for speaker in speakers]
    with pytest.raises(SchemaViolation, match="number the speakers from 0"):
        fish_request(body(references=references), Limits())


def test_a_list_of_names_has_one_voice_for_each_speaker() -> None:
    assert fish_request(body(reference_id=["anna", "ben"]), Limits()).voices == ("anna", "ben")
    assert fish_request(body(reference_id=["anna"]), Limits()).voice == "anna"
    assert fish_request(body(reference_id="anna", references=[{"audio": b"a", "text": "A."}]), Limits()).voice == "anna"


def test_clients_that_turn_conditioning_off_get_separate_turns() -> None:
    assert not fish_request(body(condition_on_previous_chunks=False), Limits()).carry_turns
