"""The command line: `anymla COMMAND`. A command is a function in the module of its name, imported when run.

Exit codes: 0 all is well, 1 a check failed, 2 the command was used wrongly.
"""

import json
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from anymla.errors import AnyMLAError

COMMANDS = {
    "explain": "Say what every backend would do with a model on a machine, and why.",
    "doctor": "Show this machine, its versions, each backend's verdict and what is verified here.",
    "verify": "Check a backend against the fp64 definition, and that every known fault is caught.",
    "bench": "Time a backend on cases that it has just passed.",
    "generate": "Generate text through the paged latent cache.",
}


class _Command(TyperCommand):
    """A command that turns our own errors into exit code 2, in JSON if that was asked for."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except AnyMLAError as error:
            in_json = any(ctx.params.get(str(param.name)) for param in self.params if "--json" in param.opts)
            typer.echo(json.dumps({"error": str(error)}) if in_json else f"anymla: {error}", err=not in_json)
            raise typer.Exit(2) from None


class _Deferred(TyperCommand):
    """A command's name and help; the command itself is imported when its arguments are parsed."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = getattr(import_module(f"anymla.cli.{self.name}"), str(self.name))
        one.command(name=self.name, cls=_Command)(function)
        return typer.main.get_command(one).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """The table COMMANDS as a group of commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _Deferred(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _anymla() -> None:
    """Multi-head Latent Attention on every chip: it says why, and it proves it."""


def main() -> None:
    """Run the command line, the entry point `anymla`."""
    app(prog_name="anymla")
