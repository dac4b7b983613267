"""`shoal say` uses a server of the same user that has the model loaded."""

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.api.local_server import EngineIdentity, connect, engine_identity, find_server, registered
from shoal.cli.say.prosody import ProsodyOptions
from shoal.cli.say.server_speech import ServerRefused, check_ready, speak_on_server
from shoal.config import EngineConfig
from shoal.errors import EngineStopped
from shoal.speech import SpeechRequest
from tests.cli.conftest import Shoal
from tests.server.conftest import Serving, start

TINY = ("--model", "random:tiny", "--max-frames", "12")
URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = start(tmp_path_factory.mktemp("say"))
    yield serving
    assert serving.end() == 0, serving.log.read_text()
    assert not list((serving.log.parent / "shoal" / "servers").iterdir())


@pytest.fixture
def same_user(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Give the command the directories of the server."""
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(serving.log.parent))
    return serving


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "shoal" / "servers"


def identity(**changes: Any) -> EngineIdentity:
    return replace(engine_identity("random:tiny", Path("voices")), **changes)


def test_a_running_server_gives_the_same_audio_as_a_model_loaded_here(
    shoal: Shoal, same_user: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("say", "It is $5.", *TINY, "--normalize", "en", "--seed", "3", "--temperature", "0.5", "--volume", "-3")
    here = shoal(*flags, "-o", tmp_path / "here.wav", "--no-server")
    monkeypatch.setattr("shoal.cli.say.speak.EngineOptions.load", lambda options: pytest.fail("the model was loaded"))
    there = shoal(*flags, "-o", tmp_path / "there.wav")
    assert (here.code, there.code) == (0, 0), there.err
    assert "using the server at" not in here.err
    assert f"using the server at {same_user.url}; --no-server loads the model instead" in there.err
    assert (tmp_path / "here.wav").read_bytes() == (tmp_path / "there.wav").read_bytes()
    reported = json.loads(shoal(*flags, "-o", tmp_path / "there.wav", "--json").out)
    assert (reported["server"], reported["seed"], reported["finish"]) == (same_user.url, 3, "stop")


def test_without_a_seed_the_server_gets_that_of_the_model(shoal: Shoal, same_user: Serving, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert shoal("say", "Hello there.", *TINY, "-o", tmp_path / f"{name}.wav").code == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_a_server_with_other_options_is_not_used(same_user: Serving) -> None:
    voices = same_user.voices
    assert find_server(engine_identity("random:tiny", voices)) is not None
    assert find_server(engine_identity("random:tiny-s2", voices)) is None
    assert find_server(engine_identity("random:tiny", voices, device="cpu")) is None
    assert find_server(engine_identity("random:tiny", voices, config=EngineConfig(quantize="int8"))) is None
    assert find_server(engine_identity("random:tiny", voices / "others")) is None
    assert find_server(engine_identity("random:tiny", voices, config=EngineConfig(cpu_isa="avx2"))) is not None
    assert find_server(engine_identity("random:tiny", voices, config=EngineConfig(cpu_isa="baseline"))) is None


def test_a_request_that_the_server_refuses_is_spoken_here(shoal: Shoal, same_user: Serving, tmp_path: Path) -> None:
    ran = shoal("say", "Hello there.", *TINY, "--repetition", "window", "-o", tmp_path / "a.wav")
    assert ran.code == 0
    assert f"note: not using the server at {same_user.url}: its API has no repetition" in ran.said
    server = find_server(engine_identity("random:tiny", same_user.voices))
    assert server is not None
    check_ready(server)
    with pytest.raises(ServerRefused, match="more than 1,500 characters"):
        speak_on_server(server, SpeechRequest("a" * 1501), {}, ProsodyOptions())
    with pytest.raises(ServerRefused, match="it answers with status 4"):
        speak_on_server(server, SpeechRequest("<|im_end|>"), {}, ProsodyOptions())


def test_the_socket_is_closed_to_others_and_disappears_with_the_server(state: Path) -> None:
    with registered(URL, "random:tiny", identity(), requires_key=False) as listener:
        assert listener is not None
        modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in [state, *state.iterdir()]}
        assert modes == {"": 0o700, ".json": 0o600, ".sock": 0o600}
        found = find_server(identity())
        assert found is not None
        assert (found.pid, found.url, found.requires_key) == (os.getpid(), URL, False)
        assert find_server(identity(version="other")) is None
        state.chmod(0o755)
        assert find_server(identity()) is None
    assert not list(state.iterdir())


def test_the_entry_of_a_dead_server_is_removed(state: Path) -> None:
    with registered(URL, "random:tiny", identity(), requires_key=False) as listener:
        assert listener is not None
        listener.close()  # as after SIGKILL: the file stays and refuses connections
        server = find_server(identity())
        assert server is not None
        with pytest.raises(ConnectionRefusedError):
            connect(server, 1.0)
        assert find_server(identity()) is None
        assert not list(state.iterdir())


def test_an_entry_of_another_machine_or_with_nonsense_is_skipped(state: Path) -> None:
    with registered(URL, "random:tiny", identity(), requires_key=False):
        entry = next(state.glob("*.json"))
        content = json.loads(entry.read_text())
        entry.write_text(json.dumps(content | {"host": "elsewhere"}))
        assert find_server(identity()) is None
        for nonsense in ("", "[]", "{}", json.dumps(content | {"more": 1})):
            entry.write_text(nonsense)
            assert find_server(identity()) is None


def test_a_server_without_a_writable_directory_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shoal").write_text("a file where the directory would be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with registered(URL, "random:tiny", identity(), requires_key=False) as listener:
        assert listener is None


def test_a_server_that_breaks_off_is_an_error_and_one_that_is_not_ready_is_not_used(state: Path) -> None:
    answers = [
        b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"state": "ready"}',
        b"HTTP/1.1 200 OK\r\nX-Sample-Rate: 16000\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b'HTTP/1.1 503 Unavailable\r\nContent-Length: 21\r\n\r\n{"state": "starting"}',
        b"nonsense\r\n\r\n",
    ]
    with registered(URL, "random:tiny", identity(), requires_key=True) as listener:
        assert listener is not None
        threading.Thread(target=answer, args=(listener, answers), daemon=True).start()
        server = find_server(identity())
        assert server is not None
        check_ready(server)
        with closing(speak_on_server(server, SpeechRequest("Hello."), {}, ProsodyOptions())) as speech:
            chunks = speech.chunks()
            assert len(next(chunks).samples) == 1
            with pytest.raises(EngineStopped, match="broke off"):
                next(chunks)
        with pytest.raises(ServerRefused, match="it is starting"):
            check_ready(server)
        with pytest.raises(ServerRefused, match="it does not answer"):
            check_ready(server)


@pytest.mark.parametrize(("key", "cause"), [("", "set SHOAL_API_KEY"), ("wrong", "rejects the key of SHOAL_API_KEY")])
def test_a_missing_key_and_a_wrong_key_are_told_apart(
    state: Path, monkeypatch: pytest.MonkeyPatch, key: str, cause: str
) -> None:
    monkeypatch.setenv("SHOAL_API_KEY", key)
    with registered(URL, "random:tiny", identity(), requires_key=True) as listener:
        assert listener is not None
        refusal = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
        threading.Thread(target=answer, args=(listener, [refusal]), daemon=True).start()
        server = find_server(identity())
        assert server is not None
        with pytest.raises(ServerRefused, match=cause):
            speak_on_server(server, SpeechRequest("Hello."), {}, ProsodyOptions())


def answer(listener: socket.socket, answers: list[bytes]) -> None:
    """Answer one connection after the other."""
    for content in answers:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as request:
            lines = list(iter(request.readline, b"\r\n"))
            sizes = [int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length")]
            request.read(sum(sizes))
            connection.sendall(content)
