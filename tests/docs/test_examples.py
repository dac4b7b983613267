"""The programs of `examples/`, against a real server where they need one."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.here import ROOT
from tests.server.conftest import Serving

EXAMPLES = ROOT / "examples"
ASKS_A_SERVER = ("openai_client.py", "fish_client.py", "stream_http.py", "live_text.py", "interrupt.py")


def run(name: str, *arguments: object) -> str:
    program = EXAMPLES / name
    command = [sys.executable, str(program)] if program.suffix == ".py" else ["sh", "-e", str(program)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*command, *map(str, arguments)], capture_output=True, env=env, timeout=240)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode(errors="replace")


@pytest.mark.parametrize("name", ASKS_A_SERVER)
def test_a_client_receives_audio(name: str, site_server: Serving, elsewhere: Path) -> None:
    assert run(name, site_server.url).strip()


def test_speaking_in_this_process(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speak.py", "Hello there.", "hello.wav"])
    runpy.run_path(str(EXAMPLES / "speak.py"), run_name="__main__")
    assert "hello.wav" in capsys.readouterr().out
    assert (elsewhere / "hello.wav").stat().st_size > 44
    monkeypatch.setattr(sys, "argv", ["many_at_once.py"])
    runpy.run_path(str(EXAMPLES / "many_at_once.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_voice_is_kept_used_and_removed(site_server: Serving, elsewhere: Path, recording: bytes) -> None:
    (elsewhere / "me.wav").write_bytes(recording)
    assert "was added" in run("clone_a_voice.py", site_server.url, "me.wav", "La la la.")
    assert (elsewhere / "cloned.mp3").stat().st_size > 100


def test_curl_streams(site_server: Serving, elsewhere: Path) -> None:
    assert run("stream.sh", site_server.url).startswith("RIFF")


def test_every_example_is_listed_and_run() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert [name for name in programs if f"`{name}`" not in listed] == []
    assert programs == {*ASKS_A_SERVER, "speak.py", "many_at_once.py", "clone_a_voice.py", "stream.sh"}
