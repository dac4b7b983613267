"""`shoal serve` with settings that it rejects, `shoal config` and `shoal keys`; tests/server has servers that run."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "99999"], "port (flag)"),
        (["--set", "slow_reader=wait"], "slow_reader (flag)"),
        (["--host", "0.0.0.0"], "no API key"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--set", "quantize=foo"], "quantize (flag)"),
        (["--set", "admin_key=short"], "admin_key (flag)"),
        (["--device", "cuda:63"], "cuda:63: this machine has"),
    ],
)
def test_wrong_settings_are_reported_before_the_model_is_loaded(shoal: Shoal, flags: list[str], message: str) -> None:
    ended = shoal("serve", "--model", "random:tiny", *flags)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1
    assert "listening" not in ended.err


def test_settings_are_shown_with_their_sources_and_without_secrets(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PORT", "9000")
    assert "SHOAL_PORT" in shoal("config").text
    monkeypatch.setenv("SHOAL_API_KEYS", "very-secret-key-1")
    monkeypatch.setenv("SHOAL_ADMIN_KEY", "the-operators-own-key")
    output = shoal("config", "--json").text
    assert '"from": "SHOAL_PORT"' in output
    assert "very-secret" not in output
    assert "operators" not in output
    assert json.loads(output)["admin_key"] == {"value": "**********", "from": "SHOAL_ADMIN_KEY"}


def test_a_key_file_that_exists_is_read_by_default(shoal: Shoal) -> None:
    assert json.loads(shoal("config", "--json").text)["keys_file"]["value"] is None
    shoal("keys", "new", "alice")
    assert json.loads(shoal("config", "--json").text)["keys_file"]["value"].endswith("keys.json")


def test_keys_can_be_created_listed_and_revoked(shoal: Shoal) -> None:
    secret = shoal("keys", "new", "alice", "--concurrency", "2").text.strip()
    assert secret.startswith("shoal_")
    listed = shoal("keys", "list").text
    assert "alice" in listed
    assert secret not in listed
    assert shoal("keys", "revoke", "alice").code == 0
    assert "no keys" in shoal("keys", "list").err
    assert shoal("keys", "revoke", "alice").code == 2


def test_the_first_key_and_the_last_say_what_servers_do_now(shoal: Shoal) -> None:
    assert "servers that read the file now refuse requests without a key" in shoal("keys", "new", "alice").err
    assert "now refuse" not in shoal("keys", "new", "ben").err
    assert "no key is left" not in shoal("keys", "revoke", "ben").err
    said = shoal("keys", "revoke", "alice").err
    assert "to serve without keys, delete" in said
    assert "keys.json" in said
