"""Help pages: flags are shown without a type."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Typer shows `<bool>` beside a flag, as if it took a value; an empty metavar hides it."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class HelpCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class HelpGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


def use_help_classes(app: typer.Typer) -> None:
    """Use the classes above for all commands and groups of `app`."""
    app.info.cls = HelpGroup
    for command in app.registered_commands:
        command.cls = HelpCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.cls = HelpGroup
            use_help_classes(group.typer_instance)
