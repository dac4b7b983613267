import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.api import state as state_module
from shoal.api.config import KeyLimits, ServerConfig
from shoal.api.engine_client import EngineLifecycle
from shoal.api.exceptions import Unauthorized
from shoal.api.keys import Key, KeyFile, KeyRing, key_from_settings
from shoal.api.requests import with_key_lexicon
from shoal.api.state import create_state, load_keys
from shoal.errors import InvalidRequest, OutputError
from shoal.speech import Pronunciation, SpeechRequest
from shoal.text.lexicon import Lexicon


def test_a_key_is_stored_as_a_hash_and_authenticates(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "deep" / "keys.json")
    assert file.read() == []
    secret = file.create("alice", KeyLimits(concurrency=2))
    file.create("bob")
    assert secret not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    ring = KeyRing(file.read())
    key = ring.find(secret)
    assert key is not None
    assert (key.name, key.limits.concurrency) == ("alice", 2)
    assert ring.find(secret[:-1]) is None
    assert ring.find("\ud800") is None
    file.revoke("alice")
    assert KeyRing(file.read()).find(secret) is None


def test_a_key_file_without_keys_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_keys(ServerConfig(keys_file=tmp_path / "keys.json"))
    assert "has no keys" in caplog.text
    caplog.clear()
    KeyFile(tmp_path / "keys.json").create("alice")
    assert len(load_keys(ServerConfig(keys_file=tmp_path / "keys.json"))) == 1
    assert not caplog.text


def test_broken_files_and_wrong_names_are_rejected(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.create("alice")
    with pytest.raises(InvalidRequest, match="already"):
        file.create("alice")
    with pytest.raises(InvalidRequest, match="no key named"):
        file.revoke("bob")
    file.path.write_text('{"keys": [{"name": "x"}]}')
    with pytest.raises(InvalidRequest, match="not a key file"):
        file.read()


ENTRY = {"name": "x", "sha256": "0" * 64, "created": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "needs an object with a list under `keys`"),
        ([], "needs an object with a list under `keys`"),
        ({"keys": [5]}, "every key needs the texts name, sha256, created"),
        ({"keys": [{"name": "x", "created": ""}]}, "every key needs the texts name, sha256, created"),
        ({"keys": [ENTRY | {"colour": 1}]}, "the key 'x' has an unknown field 'colour'"),
        ({"keys": [ENTRY | {"sha256": "00"}]}, "sha256 of the key 'x' must have 64 characters"),
        (
            {"keys": [ENTRY | {"requests_per_minute": "60"}]},
            "requests_per_minute of the key 'x' must be null or a number",
        ),
        ({"keys": [ENTRY | {"concurrency": -1}]}, "concurrency of the key 'x' must be null or a number"),
        ({"keys": [ENTRY | {"lexicon": 5}]}, "lexicon of the key 'x' must be a text"),
    ],
)
def test_an_edited_key_file_is_refused_with_the_wrong_field(tmp_path: Path, content: object, message: str) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.path.write_text(json.dumps(content))
    with pytest.raises(InvalidRequest, match=message):
        file.read()


def test_concurrent_changes_of_the_key_file_lose_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = KeyFile(tmp_path / "keys.json"), KeyFile.read
    file.create("old")

    def slow_read(self: KeyFile) -> list[Key]:
        keys = read(self)
        time.sleep(0.05)  # without the lock, a concurrent writer would overwrite this change
        return keys

    monkeypatch.setattr(KeyFile, "read", slow_read)
    with ThreadPoolExecutor(7) as pool:
        changes = [pool.submit(KeyFile(file.path).create, f"user{number}") for number in range(6)]
        changes.append(pool.submit(KeyFile(file.path).revoke, "old"))
        for change in changes:
            change.result()
    assert {key.name for key in read(file)} == {f"user{number}" for number in range(6)}


def test_a_key_file_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*keys\.json"):
        KeyFile(tmp_path / "file" / "keys.json").create("alice")


def test_a_key_short_enough_to_guess_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="at least 16"):
        key_from_settings(1, "password", KeyLimits())


def test_a_key_file_that_is_created_later_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "KEY_CHECK_SECONDS", 0.0)
    file = KeyFile(tmp_path / "keys.json")
    state = create_state(ServerConfig(upcoming_keys_file=file.path), EngineLifecycle(lambda: pytest.fail("no load")), 1)
    assert state.authenticate("").name == "anyone"

    async def create_and_wait() -> str:
        watching = asyncio.create_task(state.watch_keys())
        secret = file.create("alice")
        while not len(state.keys):
            await asyncio.sleep(0)
        watching.cancel()
        return secret

    secret = asyncio.run(asyncio.wait_for(create_and_wait(), 240))
    with pytest.raises(Unauthorized):
        state.authenticate("")
    assert state.authenticate(f"Bearer {secret}").name == "alice"


def test_a_key_may_have_a_lexicon_which_yields_to_that_of_the_request(tmp_path: Path) -> None:
    words, file = tmp_path / "words.txt", KeyFile(tmp_path / "keys.json")
    words.write_text("nginx = engine x\nSQL = sequel\n")
    secret = file.create("alice", lexicon=words)
    key = load_keys(ServerConfig(keys_file=file.path)).find(secret)
    assert key is not None
    own = SpeechRequest("nginx and SQL", lexicon=(Pronunciation("SQL", "ess cue ell"),))
    merged = with_key_lexicon(own, key)
    assert Lexicon(merged.lexicon).apply(own.text, phonemes=False) == "engine x and ess cue ell"
    assert with_key_lexicon(merged, key) is merged
    written = SpeechRequest("nginx", normalize=False)
    assert with_key_lexicon(written, key) is written


def test_a_lexicon_that_cannot_be_read_is_reported_when_the_key_is_made_and_loaded(tmp_path: Path) -> None:
    words, file = tmp_path / "words.txt", KeyFile(tmp_path / "keys.json")
    with pytest.raises(InvalidRequest, match="cannot read the lexicon"):
        file.create("alice", lexicon=words)
    words.write_text("\n".join(f"word{number} = a" for number in range(1001)))
    with pytest.raises(InvalidRequest, match="a key may have at most 1000"):
        file.create("alice", lexicon=words)
    words.write_text("a = b")
    file.create("alice", lexicon=words)
    words.unlink()
    with pytest.raises(InvalidRequest, match="cannot read the lexicon"):
        load_keys(ServerConfig(keys_file=file.path))
