"""The `shoal` command: flags in, calls out, no logic.

Nothing heavy is imported before a command needs it: `shoal --help` answers at once.
"""

import logging
import os
import signal
import sys
from typing import Annotated

import typer

from shoal.cli import (
    batch,
    bench,
    cluster,
    deploy,
    doctor,
    load,
    models,
    profile,
    report,
    serve,
    simulate,
    speak,
    voices,
)
from shoal.errors import ShoalError, VoiceNotFound

BUG_EXIT_CODE = 70
ABOUT = """Speech from the Fish-Speech voices, heard while it is made.

Example: shoal say "The tide is coming in."

Example: shoal serve, then open http://localhost:8080/
"""

app = typer.Typer(
    name="shoal",
    help=ABOUT,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The order of the groups in the help: what most people want stands first.
for room in (speak, voices, batch, serve, cluster, deploy, models, bench, load, simulate, report, profile, doctor):
    room.add_to(app)


@app.callback()
def before_every_command(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SHOAL_DEBUG", help="Log everything, show tracebacks.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=doctor.print_version, help="Show the version.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("shoal").setLevel(logging.DEBUG if debug else logging.WARNING)


def main() -> None:
    """Run one command. Every way out has its exit code, and only --debug shows where an error came from."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app(prog_name="shoal")
    except VoiceNotFound as error:
        _fail(f"{error} `shoal voices list` shows those there are.", error.exit_code)
    except ShoalError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as bug:  # noqa: BLE001 - the edge: past here is only Python's own traceback
        _fail(f"{type(bug).__name__}: {bug}\nThis is a bug in shoal: please report it.", BUG_EXIT_CODE)


def _fail(message: str, exit_code: int) -> None:
    if _debugging():
        logging.getLogger(__name__).exception("stopped")
    elif exit_code == BUG_EXIT_CODE:
        message += " SHOAL_DEBUG=1 shows the traceback."
    typer.secho("error: ", fg="red", err=True, nl=False)
    typer.echo(message, err=True)
    _abandon_stdout()
    sys.exit(exit_code)


def _debugging() -> bool:
    return logging.getLogger("shoal").isEnabledFor(logging.DEBUG)


def _stop(signum: int, frame: object) -> None:
    """SIGTERM unwinds like an interrupt, so that nothing half-written stays behind."""
    sys.exit(128 + signum)


def _abandon_stdout() -> None:
    """A reader that went away must not raise once more when Python flushes at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
