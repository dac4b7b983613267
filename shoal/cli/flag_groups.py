"""Groups of flags: dataclasses whose fields are flags of a command, for options that belong together."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import wraps
from typing import Any


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that Typer accepts: each parameter whose type is a dataclass becomes a flag per field."""
    parameters = inspect.signature(command).parameters
    groups = {name: each.annotation for name, each in parameters.items() if _is_group(each)}
    flags = [flag for each in parameters.values() for flag in _flags(each)]

    @wraps(command)
    def run(**values: Any) -> None:
        built = {
            name: group(**{flag: values.pop(flag) for flag in inspect.signature(group).parameters})
            for name, group in groups.items()
        }
        command(**values, **built)

    run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


def _flags(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the parameter, or those of its group."""
    found = inspect.signature(parameter.annotation).parameters.values() if _is_group(parameter) else (parameter,)
    yield from (each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in found)


def _is_group(parameter: inspect.Parameter) -> bool:
    return is_dataclass(parameter.annotation)
