"""Typer commands whose help shows flags without a type, and whose values are converted only if needed."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.cli.plain_values import skip_conversion


def _prepared(params: list[Any]) -> list[Any]:
    """Hide the type of flags with an empty metavar: Typer shows `<bool>`, as if a flag took a value."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        skip_conversion(param)
    return params


class HelpCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _prepared(super().get_params(ctx))


class HelpGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _prepared(super().get_params(ctx))


def use_help_classes(app: typer.Typer) -> None:
    """Use the classes above for all commands and groups of `app`."""
    app.info.cls = HelpGroup
    for command in app.registered_commands:
        command.cls = HelpCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.cls = HelpGroup
            use_help_classes(group.typer_instance)
