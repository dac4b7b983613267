"""Behaviour shared by all commands: help, completion, errors and exit codes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal import __version__, cli
from tests.cli.conftest import Shoal

GROUPS = ("Speak", "Serve", "Models", "Measure", "This machine")


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf command with the words that call it."""
    group = group or typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands())


def test_the_help_groups_every_command_by_what_it_is_for(shoal: Shoal) -> None:
    ran = shoal("--help").text
    places = [ran.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    assert all(f"│ {path[0]} " in ran for path in COMMANDS)
    assert "─ Commands ─" not in ran, "a command has no group"


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "shoal", "version"], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, __version__ in ran.stdout) == (0, True), ran.stderr


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_for_every_parameter(shoal: Shoal, path: tuple[str, ...]) -> None:
    ran = shoal(*path, "--help")
    assert ran.code == 0
    assert "Example: " in ran.text or path == ("version",)
    assert "<bool>" not in ran.text, "a flag takes no value"
    silent = [each.name for each in COMMANDS[path].params if not getattr(each, "help", None)]
    assert silent == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("shoal sa", "say"),
        ("shoal say --model ran", "random:tiny"),
        ("shoal serve --model s1", "s1-mini"),
        ("shoal say --voice narr", "narrator"),
    ],
)
def test_the_shell_completes(typed: str, offered: str, tmp_path: Path) -> None:
    (tmp_path / "narrator").mkdir()
    env = {**os.environ, "_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "SHOAL_VOICES": str(tmp_path)}
    env["COMP_CWORD"] = str(len(typed.split()) - 1)
    script = Path(sys.executable).with_name("shoal")
    ran = subprocess.run([script], capture_output=True, text=True, env=env, timeout=240)
    assert offered in ran.stdout.split()


def test_the_version_command_and_flag_agree(shoal: Shoal) -> None:
    assert shoal("--version").text == shoal("version").text == f"shoal {__version__}\n"


def test_the_cli_imports_without_torch() -> None:
    """Importing torch takes seconds, which `--help` must not."""
    code = "import sys, shoal.cli; sys.exit([name for name in ('torch', 'numpy', 'rich') if name in sys.modules] or 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("torch", "inspect nano", "error: cannot import torch: "),
        (
            "pydantic_settings",
            "keys list",
            "error: this command needs pydantic_settings: pip install 'shoal-tts[server]'",
        ),
    ],
)
def test_a_package_that_is_not_installed_is_no_bug_of_shoal(package: str, arguments: str, message: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from shoal.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, timeout=240)
    assert (ran.returncode, ran.stdout) == (11, "")
    assert ran.stderr.startswith(message)
    assert len(ran.stderr.splitlines()) == 1


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

    monkeypatch.setattr("shoal.tools.doctor.examine", broken)
    ran = shoal("doctor")
    assert ran.code == cli.BUG_EXIT_CODE == 70
    assert "ZeroDivisionError: division by zero" in ran.err
    assert "please report it" in ran.err
    assert "SHOAL_DEBUG=1" in ran.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_is_no_bug() -> None:
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "shoal", "version"], stdout=full, stderr=subprocess.PIPE, timeout=300
        )
    assert (ran.returncode, ran.stderr) == (10, b"error: cannot write the output: No space left on device\n")


def test_an_interrupt_ends_with_130(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**flags: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.tools.doctor.examine", interrupted)
    assert shoal("doctor").code == 130


def test_flags_of_several_engines_without_ray_are_refused(shoal: Shoal, tmp_path: Path) -> None:
    ran = shoal("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "--replicas", "2")
    assert (ran.code, "add --ray" in ran.said) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("flag", "name"), [("--top-p", "top_p"), ("--repetition-penalty", "repetition_penalty")])
def test_a_sampling_value_that_must_not_be_zero_is_named(shoal: Shoal, flag: str, name: str) -> None:
    assert f"{name} must be greater than 0" in shoal("say", "Hello.", flag, "0").said
