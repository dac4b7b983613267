"""Playback by `shoal say`, with a fake player that stores its input."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.say.player import KNOWN, find_player
from tests.cli.conftest import Shoal
from tests.cli.say.test_say import LONG, TINY, samples_of
from tests.waiting import wait_until

KEEPS_INPUT = '#!/bin/sh\necho "$0 $*" > {folder}/called\nexec cat > {folder}/received\n'
KEEPS_FILE = '#!/bin/sh\nexec cp "$1" {folder}/received\n'
BROKEN = "#!/bin/sh\necho starting >&2\necho 'no sound card' >&2\nexit 3\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without players; tests install programs into `bin`."""
    (tmp_path / "bin").mkdir()
    for tool in ("cat", "cp", "sh"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SHOAL_PLAYER", raising=False)
    return tmp_path


def install(machine: Path, name: str, script: str) -> None:
    program = machine / "bin" / name
    program.write_text(script.format(folder=machine))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("name", [player.name for player in KNOWN])
def test_every_known_player_receives_the_samples_of_the_file(shoal: Shoal, machine: Path, name: str) -> None:
    streams = next(player.streams for player in KNOWN if player.name == name)
    install(machine, name, KEEPS_INPUT if streams else KEEPS_FILE)
    assert find_player().name == name
    ran = shoal("say", "Hello there.", "-o", machine / "a.wav", "--play", *TINY)
    assert (ran.code, ran.err) == (0, "")
    received, written = (machine / "received").read_bytes(), samples_of(machine / "a.wav")
    assert np.array_equal(np.frombuffer(received[-2 * len(written) :], "<i2"), written)
    assert len(received) - 2 * len(written) in (0, 44)


def test_players_of_raw_samples_get_the_sample_rate(shoal: Shoal, machine: Path) -> None:
    install(machine, "aplay", KEEPS_INPUT)
    assert shoal("say", "Hello there.", *TINY).code == 0
    assert "-r 16000" in (machine / "called").read_text()


def test_a_configured_player_takes_precedence(shoal: Shoal, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine, "aplay", KEEPS_INPUT)
    install(machine, "mine", KEEPS_INPUT)
    monkeypatch.setenv("SHOAL_PLAYER", "mine --loud")
    ran = shoal("say", "Hello there.", "--json", *TINY)
    assert "mine --loud" in (machine / "called").read_text()
    assert (machine / "received").read_bytes()[:4] == b"RIFF"
    document = json.loads(ran.out)
    assert (document["output"], document["player"]) == (None, "mine")


def test_without_a_player_the_error_says_what_to_do(shoal: Shoal, machine: Path) -> None:
    ran = shoal("say", "Hello there.", *TINY)
    assert ran.code == 10
    assert "aplay" in ran.said
    assert "-o FILE" in ran.said
    assert "SHOAL_PLAYER" in ran.said


def test_a_failing_player_is_an_error_with_its_last_line(shoal: Shoal, machine: Path) -> None:
    install(machine, "aplay", BROKEN)
    ran = shoal("say", "Hello there.", *TINY)
    assert ran.code == 10
    assert "aplay failed: no sound card" in ran.said


def test_a_format_needs_an_output_file(shoal: Shoal, machine: Path) -> None:
    install(machine, "aplay", KEEPS_INPUT)
    ran = shoal("say", "Hello there.", "--format", "mp3", *TINY)
    assert (ran.code, "-o" in ran.said) == (2, True)


def test_an_interrupt_stops_the_player(machine: Path) -> None:
    """The player starts before generation ends, and is killed with the command."""
    install(machine, "aplay", KEEPS_INPUT.replace("exec cat", "echo $$ > {folder}/pid; exec cat"))
    command = [sys.executable, "-m", "shoal.cli", "say", "A long story. " * 500, *LONG]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    received = machine / "received"
    wait_until(lambda: received.exists() and received.stat().st_size)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (130, b"")
    with pytest.raises(ProcessLookupError):
        os.kill(int((machine / "pid").read_text()), 0)
