from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.api.voices.openai import OPENAI_VOICES, assign_openai_voices
from shoal.voices.description import VoiceDescription
from shoal.voices.store import VoiceStore
from tests.voices.conftest import wav

__all__ = ["wav"]  # a fixture here, too


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory, wav: Callable[..., bytes]) -> Path:
    folder = tmp_path_factory.mktemp("builtin")
    genders = {"anna": "female", "berta": "female", "carl": "male", "dirk": "male"}
    for name, gender in genders.items():
        VoiceStore(folder).add_recordings(name, [(wav(), "La.")], VoiceDescription(gender=gender))
    return folder


def test_openai_names_are_spread_over_the_builtin_voices_by_gender(builtin: Path, tmp_path: Path) -> None:
    assigned = assign_openai_voices(VoiceStore(tmp_path, (builtin,)), "carl")
    assert set(assigned) == OPENAI_VOICES
    assert assigned["default"] == assigned["alloy"] == "carl"
    assert {assigned["nova"], assigned["shimmer"]} == {"anna", "berta"}
    assert {assigned["onyx"], assigned["echo"]} == {"carl", "dirk"}
    assert assigned == assign_openai_voices(VoiceStore(tmp_path, (builtin,)), "carl")


def test_a_model_without_builtin_voices_keeps_its_own(tmp_path: Path, wav: Callable[..., bytes]) -> None:
    store = VoiceStore(tmp_path)
    store.add("me", wav(), "La.")
    assert assign_openai_voices(store, None) == {}
