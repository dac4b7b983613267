from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.flag_groups import with_groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--wide", help="Width.")] = 3
    height: Annotated[int | None, typer.Option(help="Height.")] = None


def draw(
    title: Annotated[str, typer.Argument(help="Title.")],
    bold: Annotated[bool, typer.Option("--bold", help="Bold.")] = False,
    *,
    size: Size,
) -> None:
    """Draw a box."""
    typer.echo(f"{title} {bold} {size}")


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(with_groups(draw))
    return made


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["box"], f"box False {Size()}"),
        (["box", "--bold", "--wide", "5", "--height", "7"], f"box True {Size(5, 7)}"),
    ],
)
def test_the_fields_of_a_group_are_flags_of_the_command(app: typer.Typer, arguments: list[str], printed: str) -> None:
    assert CliRunner().invoke(app, arguments).output == printed + "\n"


def test_the_help_lists_the_flags_in_order(app: typer.Typer) -> None:
    page = CliRunner().invoke(app, ["--help"]).output
    places = [page.index(text) for text in ("Draw a box.", "--bold", "--wide", "--height")]
    assert places == sorted(places)
    assert "size" not in page
