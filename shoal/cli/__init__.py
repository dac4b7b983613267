"""The `shoal` command: parses flags and calls the library; no logic of its own.

Commands import torch and other heavy modules only when they run, so `shoal --help` is fast.
"""

import errno
import logging
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from shoal.cli import doctor, lexicon, models, voices
from shoal.cli.files import batch, book
from shoal.cli.help import use_help_classes
from shoal.cli.measure import align, bench, load, profile, report, simulate
from shoal.cli.quick_exit import QuickExit
from shoal.cli.say import command as say_command
from shoal.cli.serving import balance, cluster, deploy, keys, serve
from shoal.errors import MissingExtra, OutputError, ShoalError, VoiceNotFound

BUG_EXIT_CODE = 70
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # no quotas on Windows
ABOUT = """Text-to-speech engine for the Fish-Speech models: speak a text, run a server, manage models, measure speed.

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
# This is the order of the groups in the help: the most common commands come first.
for module in (
    say_command,
    voices,
    lexicon,
    batch,
    book,
    serve,
    keys,
    cluster,
    balance,
    deploy,
    models,
    align,
    bench,
    load,
    simulate,
    report,
    profile,
    doctor,
):
    module.add_to(app)
use_help_classes(app)


@app.callback()
def before_every_command(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SHOAL_DEBUG", help="Log at debug level and show tracebacks of errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=doctor.print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("shoal").setLevel(logging.DEBUG if debug else logging.WARNING)


def run() -> None:
    """Entry point of the `shoal` process."""
    try:
        main()
    except QuickExit as end:
        # Skips the interpreter's teardown, which frees torch's objects one by one and takes 0.3 s.
        _abandon_stdout()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def main() -> None:
    """Run one command and exit. Every error class has its exit code; tracebacks are shown with --debug only."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app(prog_name="shoal")
    except VoiceNotFound as error:
        _fail(f"{str(error).rstrip('.')}; `shoal voices list` shows the available voices", error.exit_code)
    except ShoalError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        _fail_import(error)
    except Exception as problem:  # noqa: BLE001 - process edge: an unexpected error becomes a message and an exit code
        if isinstance(problem, OSError) and problem.errno in DISK_FULL:
            _fail(f"cannot write {problem.filename or 'the output'}: {problem.strerror}", OutputError.exit_code)
        _fail_bug(problem)


def _fail_import(error: ImportError) -> NoReturn:
    """Report a package of others that is missing or broken, such as a torch without its libraries."""
    package = (error.name or "shoal").partition(".")[0]
    if package == "shoal":
        _fail_bug(error)
    _fail(f"cannot import {package}: {error}; `shoal doctor` checks the installation", MissingExtra.exit_code)


def _fail_bug(bug: Exception) -> NoReturn:
    _fail(f"{type(bug).__name__}: {bug}\nThis is a bug in shoal: please report it.", BUG_EXIT_CODE)


def _fail(message: str, exit_code: int) -> NoReturn:
    if _debugging():
        logging.getLogger(__name__).exception("command failed")
    elif exit_code == BUG_EXIT_CODE:
        message += " SHOAL_DEBUG=1 shows the traceback."
    typer.secho("error: ", fg="red", err=True, nl=False)
    typer.echo(message, err=True)
    _abandon_stdout()
    sys.exit(exit_code)


def _debugging() -> bool:
    return logging.getLogger("shoal").isEnabledFor(logging.DEBUG)


def _stop(signum: int, frame: object) -> None:
    """Raise SystemExit on SIGTERM, so that context managers remove partly written files."""
    sys.exit(128 + signum)


def _abandon_stdout() -> None:
    """Flush stdout; redirect it to /dev/null if its reader has closed it: Python's flush at exit would raise again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
