import json
from pathlib import Path

import pytest

from shoal.checkpoint.find import BUNDLED_DIRECTORY
from shoal.checkpoint.format.profile import PROFILE_FILE, ModelProfile, default_profile, profile_document, read_profile
from shoal.errors import CheckpointError
from shoal.model.family import S1, S2
from shoal.speech import SamplingParams
from tests.nano import VOICES


def stored(directory: Path, document: object) -> Path:
    (directory / PROFILE_FILE).write_text(json.dumps(document))
    return directory


def test_absent_profile_fields_are_the_familys(tmp_path: Path) -> None:
    assert read_profile(tmp_path, S2) == default_profile(S2)
    read = read_profile(stored(tmp_path, {"voice": None, "sampling": {"temperature": 1}}), S2)
    assert read == ModelProfile(sampling=SamplingParams(temperature=1, top_k=30, repetition_penalty=1.0))


def test_a_field_is_read_by_its_former_name(tmp_path: Path) -> None:
    assert read_profile(stored(tmp_path, {"carried_columns": 640}), S1).context_tokens == 640


def test_a_profile_round_trips(tmp_path: Path) -> None:
    bundled = read_profile(BUNDLED_DIRECTORY, S1)
    assert bundled.voice in VOICES
    assert read_profile(stored(tmp_path, profile_document(bundled)), S1) == bundled


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"chunk_bytes": "many"}, "chunk_bytes"),
        ({"chunk_bytes": 600.5}, "chunk_bytes"),
        ({"chunk_bytes": 15}, "chunk_bytes"),
        ({"max_characters": None}, "max_characters"),
        ({"max_characters": 0}, "max_characters"),
        ({"context_tokens": -3}, "context_tokens"),
        ({"context_tokens": True}, "context_tokens"),
        ({"normalize": "false"}, "normalize"),
        ({"voice": 3}, "voice"),
        ({"colour": "red"}, "colour"),
        ({"sampling": []}, "sampling"),
        ({"sampling": {"top_k": 1.5}}, "top_k"),
        ({"sampling": {"temperature": "hot"}}, "temperature"),
        ({"sampling": {"repetition": None}}, "repetition"),
        ({"sampling": {"colour": "red"}}, "colour"),
    ],
)
def test_a_profile_that_would_fail_every_request_is_refused(document: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{PROFILE_FILE}: .*{message}"):
        read_profile(stored(tmp_path, document), S1)
