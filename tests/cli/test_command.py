"""The edge: what every command has in common."""

import subprocess
import sys

import pytest

from shoal import __version__, cli
from tests.cli.conftest import Shoal

COMMANDS = ["say", "pull", "inspect", "verify", "random", "doctor", "version"]


def test_the_help_names_every_command(shoal: Shoal) -> None:
    told = shoal("--help").text
    assert all(f" {name} " in told for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(shoal: Shoal, command: str) -> None:
    told = shoal(command, "--help")
    assert told.code == 0
    assert "Example" in told.text or command == "version"


def test_the_version_is_told_both_ways(shoal: Shoal) -> None:
    assert shoal("--version").text == shoal("version").text == f"shoal {__version__}\n"


def test_the_help_comes_without_torch() -> None:
    """Importing torch takes seconds; who asks for help should not wait for it."""
    code = "import sys, shoal.cli; sys.exit([name for name in ('torch', 'numpy', 'rich') if name in sys.modules] or 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_wrong_flag_is_a_usage_error(shoal: Shoal) -> None:
    ran = shoal("inspect", "random:tiny", "--colour")
    assert ran.code == 2
    assert "--colour" in ran.err


def test_an_error_is_one_line_and_an_exit_code(shoal: Shoal) -> None:
    ran = shoal("inspect", "./nowhere")
    assert (ran.code, ran.out) == (8, b"")
    assert ran.err.startswith("error: ./nowhere: no such directory")
    assert ran.err.count("\n") == 1


def test_debug_shows_where_an_error_came_from(shoal: Shoal, caplog: pytest.LogCaptureFixture) -> None:
    assert shoal("--debug", "inspect", "./nowhere").code == 8
    assert "find_directory" in caplog.text


def test_a_bug_is_reported_as_one(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**flags: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("shoal.doctor.examine", broken)
    ran = shoal("doctor")
    assert ran.code == cli.BUG_EXIT_CODE == 70
    assert "ZeroDivisionError: division by zero" in ran.err
    assert "please report it" in ran.err
    assert "SHOAL_DEBUG=1" in ran.err


def test_an_interrupt_ends_with_130(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**flags: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.doctor.examine", interrupted)
    assert shoal("doctor").code == 130
