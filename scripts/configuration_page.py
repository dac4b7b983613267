"""The page of settings, made from them: `python -m scripts.configuration_page > docs/configuration.md`."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize

from shoal.settings import ALIASES, BACKEND_RUNGS, PREFIX, Settings

# The first setting of each part.
PARTS = {"model": "Model", "slots": "Engine", "host": "Server", "request_seconds": "Limits"}
HEAD = """# Configuration

*Made by `python -m scripts.configuration_page`; change `shoal/settings.py`, not this page.*

Every setting has one name. It can be given, and is taken, in this order:

1. a flag of `shoal serve`: `--port 9000`, or for any setting `--set port=9000`;
2. a variable of the environment: `SHOAL_PORT=9000`; lists have commas;
3. a line of the TOML file: `port = 9000`. The file is the one of `--config`, else of `SHOAL_CONFIG`, else
   `shoal/shoal.toml` in the user's configuration directory if it is there;
4. the default.

`shoal config` shows what comes out and where each value came from; keys are masked. A value that is wrong, or a name in
the file or a flag that is unknown, is told with its place, and nothing is started. Sizes are bytes, or `800MB`, `1GiB`.

Secrets belong into a file or the environment, not into flags, which other users of the machine can see.
"""
TAIL = """
## Names of an older server

Accepted as variables where the name above is not set: {aliases}.
`S1_MINI_BATCH_TIMEOUT_MS` is in milliseconds. `S1_MINI_COMPILE=false` is rung `eager`; otherwise
`S1_MINI_COMPILE_BACKEND` chooses the rung ({backends}),
and `S1_MINI_COMPILE=true` alone is `auto`. The engine has fused kernels of its own and calls no torch.compile.
"""


def page() -> str:
    return HEAD + "".join(_tables()) + _tail()


def _tables() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        if name in PARTS:
            yield f"\n## {PARTS[name]}\n\n| Setting | Variable | Default | Meaning |\n|---|---|---|---|\n"
        choices = _choices(field.annotation)
        meaning = (field.description or "") + (f" One of {choices}." if choices else "")
        yield f"| `{name}` | `{PREFIX}{name.upper()}` | {_default(field.default)} | {meaning} |\n"


def _tail() -> str:
    aliases = ", ".join(f"`{alias}` ({name})" for name, alias in ALIASES.items())
    backends = ", ".join(f"`{backend}`: {rung}" for backend, rung in BACKEND_RUNGS.items())
    return TAIL.format(aliases=aliases, backends=backends)


def _choices(annotation: Any) -> str:
    return ", ".join(f"`{each}`" for each in get_args(annotation)) if get_origin(annotation) is Literal else ""


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator=' ')}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{', '.join(map(str, value)) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    print(page(), end="")
