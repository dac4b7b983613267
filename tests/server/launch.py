"""Runs the `shoal` command in its own process."""

from shoal.cli import app, main
from shoal.cli.serving import serve


def run() -> None:
    from tests.server.engine_forks import fork_engines

    fork_engines()
    if "serve" not in [
        command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands
    ]:
        serve.add_to(app)
    main()


if __name__ == "__main__":
    run()
