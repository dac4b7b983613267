"""`shoal lexicon`: check files with readings of words."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import Json, utf8_text
from shoal.errors import counted

PANEL = "Speak"

app = typer.Typer(help="Check files with readings of words.", no_args_is_help=True)


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app, name="lexicon", rich_help_panel=PANEL)


@app.callback()
def group() -> None:
    """Keep `check` a subcommand: a group of one command would become that command."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Lexicon: a table or a W3C PLS document.")],
    model: Annotated[str, typer.Option(help="Model that the lexicon is for; nano reads no phonemes.")] = "nano",
    text: Annotated[str | None, typer.Option(help="Text to apply the lexicon to.", callback=utf8_text)] = None,
    json: Json = False,
) -> None:
    """Report all problems of a lexicon: invalid lines, duplicate words, words that the model cannot read.

    The exit code is 1 when there is a problem.

    Example: shoal lexicon check words.txt --text "Restart nginx."
    """
    from shoal.checkpoint.format.text_rules import model_text_rules
    from shoal.cli.tables import print_json
    from shoal.text.lexicon import Lexicon, lexicon_problems, parse_lexicon

    rules = model_text_rules(model)
    entries, problems = parse_lexicon(file)
    problems += lexicon_problems(entries, phonemes=rules.phonemes)
    applied = None if text is None or problems else Lexicon(entries).apply(text, phonemes=rules.phonemes)
    if json:
        print_json({"words": len(entries), "problems": problems, "text": applied})
    else:
        _print(file, len(entries), problems, applied)
    if problems:
        raise typer.Exit(1)


def _print(file: Path, words: int, problems: list[str], applied: str | None) -> None:
    for problem in problems:
        typer.echo(problem, err=True)
    typer.echo(f"{file}: {counted(words, 'word')}, {counted(len(problems), 'problem')}", err=True)
    if applied is not None:
        typer.echo(applied)
