import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.checkpoint.find import BUNDLED_DIRECTORY
from shoal.errors import InvalidRequest, VoiceNotFound
from shoal.voices.description import VoiceDescription, description_document, read_description
from shoal.voices.store import VoiceStore

ANNA = VoiceDescription("Anna", "Soft, for stories.", "female", "Irish", "Once upon a time.")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"titel": "x"}',
        b'{"title": 3}',
        b'{"title": "a\\nb"}',
        b'{"gender": "loud"}',
        b"[" * 100_000,
        json.dumps({"accent": "x" * 61}).encode(),
        '{"title": "a\u202eb"}'.encode(),
    ],
)
def test_anything_but_short_printable_fields_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_description(content)


def test_a_description_is_stored_replaced_and_moves_with_its_voice(
    store: VoiceStore, wav: Callable[..., bytes], directory: Path
) -> None:
    store.add_recordings("me", [(wav(), "La.")], ANNA)
    assert store.description("me") == ANNA
    stamp = store.stamp("me")
    store.describe("me", VoiceDescription("Berta"))
    assert store.description("me") == VoiceDescription("Berta")
    assert store.stamp("me") == stamp, "codes and cached prompts stay valid"
    store.rename("me", "you")
    assert store.description("you").title == "Berta"
    store.delete("you")
    assert not (directory / "you").exists()


def test_a_builtin_voice_keeps_its_description(tmp_path: Path, wav: Callable[..., bytes]) -> None:
    VoiceStore(tmp_path / "builtin").add("narrator", wav(), "La.")
    store = VoiceStore(tmp_path / "own", (tmp_path / "builtin",))
    with pytest.raises(InvalidRequest, match="built in"):
        store.describe("narrator", ANNA)
    with pytest.raises(VoiceNotFound):
        store.describe("nobody", ANNA)


def test_a_broken_description_is_logged_and_the_voice_still_speaks(
    store: VoiceStore,
    wav: Callable[..., bytes],
    directory: Path,
    encoder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.add("me", wav(), "La.")
    (directory / "me" / "description.json").write_text('{"titel": "x"}')
    with caplog.at_level(logging.WARNING):
        assert store.description("me") == VoiceDescription()
    assert "unknown field 'titel'" in caplog.text
    assert store.get("me", encoder).frames > 0


def test_a_document_is_read_back() -> None:
    assert read_description(description_document(ANNA)) == ANNA


def test_the_descriptions_of_nano_can_be_read_and_tell_its_voices_apart() -> None:
    files = sorted((BUNDLED_DIRECTORY / "voices").glob("*/description.json"))
    titles = [read_description(file.read_bytes()).title for file in files]
    assert len(set(titles)) == len(titles)
