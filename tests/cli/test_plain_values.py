"""Flags whose values need no conversion: nothing heavy is imported for them, and the others are still checked."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.help import use_help_classes


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def show(
        name: str = "a",
        size: int | None = None,
        rate: float = 1.0,
        path: Path | None = None,
        existing: Annotated[Path | None, typer.Option(exists=True)] = None,
        flag: bool = False,
        several: list[str] | None = None,
    ) -> None:
        print(repr((name, size, rate, path, existing, flag, several)))

    use_help_classes(app)
    return app


def run(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    return result.stdout.strip() if result.exit_code == 0 else f"exit {result.exit_code}"


def test_defaults_and_plain_values_arrive_in_their_types(app: typer.Typer) -> None:
    assert run(app) == "('a', None, 1.0, None, None, False, None)"
    given = run(app, "--name", "b", "--size", "3", "--rate", "2", "--path", "x/y", "--flag")
    assert given == "('b', 3, 2.0, PosixPath('x/y'), None, True, None)"


def test_values_that_need_a_check_are_checked(app: typer.Typer, tmp_path: Path) -> None:
    assert run(app, "--size", "many") == "exit 2"
    assert run(app, "--rate", "fast") == "exit 2"
    assert run(app, "--existing", str(tmp_path / "missing")) == "exit 2"
    assert str(tmp_path) in run(app, "--existing", str(tmp_path))
    assert run(app, "--several", "a", "--several", "b").endswith("['a', 'b'])")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "loud"), "'loud' is not a number, such as 1.5"),
        (("--size", "many"), "'many' is not a whole number, such as 3"),
        (("--size", "1.5"), "'1.5' is not a whole number, such as 3"),
        (("--size", "inf"), "'inf' is not a whole number, such as 3"),
    ],
)
def test_text_that_is_no_number_is_named(app: typer.Typer, arguments: tuple[str, str], message: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}': {message}" in result.stderr


def test_numbers_in_every_spelling_arrive(app: typer.Typer) -> None:
    assert run(app, "--size", "3.0", "--rate", "1e-3").startswith("('a', 3, 0.001,")
