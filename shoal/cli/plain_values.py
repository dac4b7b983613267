"""Skip Typer's conversion of flag values that need none: it imports pydantic, which takes 0.1 s at every start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import typer

PLAIN = {bool, int, float, str, Path, NoneType}


def skip_conversion(param: Any) -> None:
    """Make a parameter accept values that have its type as they are, and strings as paths. In place, idempotent.

    Parameters of other types, and those of a Typer version with another converter, are not changed.
    """
    build = getattr(param, "get_runtime_param", None)
    descriptor = getattr(param, "type_descriptor", None)
    if build is None or descriptor is None or param.multiple or param.nargs != 1:
        return
    types = set(get_args(descriptor.annotation) or (descriptor.annotation,))
    if types <= PLAIN and "get_runtime_param" not in vars(param):
        param.get_runtime_param = lambda: PlainValues(build, types, descriptor.parameter_info)


@dataclass(frozen=True)
class PlainValues:
    """Replaces Typer's converter of a parameter, which `build` creates only for a value that needs it."""

    build: Callable[[], Any]
    types: set[Any]
    info: Any

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None or type(value) in self.types:
            return value
        if isinstance(value, str) and Path in self.types and not self._checks_path:
            return Path(value)
        if isinstance(value, str) and self.types <= {int, float, NoneType}:
            self._check_number(value, param, ctx)
        return self.build().coerce(value, param=param, ctx=ctx)

    def _check_number(self, value: str, param: Any, ctx: Any) -> None:
        """Raise BadParameter for text that is no number; the message of Typer's converter does not name the value."""
        try:
            number = float(value)
            valid = float in self.types or number.is_integer()
        except ValueError:
            valid = False
        if not valid:
            expected = "a number, such as 1.5" if float in self.types else "a whole number, such as 3"
            raise typer.BadParameter(f"{value[:40]!r} is not {expected}", ctx=ctx, param=param)

    @property
    def _checks_path(self) -> bool:
        """Return whether Typer has to check the file or resolve its path."""
        return bool(self.info.exists or self.info.resolve_path or self.info.path_type)
