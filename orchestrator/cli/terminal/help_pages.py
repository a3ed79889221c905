"""Additions to Typer's `--help`: commands in groups, and two examples of each command."""

import shlex
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

GROUPS: dict[str, tuple[str, ...]] = {
    "Jobs": (
        *("submit", "run", "offer", "jobs", "show", "logs", "cancel", "migrate", "rename", "explain"),
        *("exec", "shell", "files"),
    ),
    "Fleet": ("up", "down", "status", "inventory", "backends", "doctor", "top", "node", "hosts", "env", "render"),
    "Checkpoints and measurements": ("checkpoint", "benchmark", "validate", "kernels", "simulate"),
    "Server and shell": ("server", "debug", "schema", "completion"),
}
"""Headings of `polyfleet --help`; a test checks that each command is below one of them."""


class WithExamples(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does. The error for an unknown option or argument names what the command accepts."""
        accepts_more, ctx.allow_extra_args = ctx.allow_extra_args, True
        try:
            extra = super().parse_args(ctx, args)
        except Exception as e:
            if letter := getattr(e, "option_name", "")[1:]:
                valid = (option for parameter in self.params for option in parameter.opts)
                e.possibilities = e.possibilities or [o for o in valid if o.startswith(f"--{letter}")]  # type: ignore[attr-defined]
            raise
        if extra and not accepts_more and not ctx.resilient_parsing:
            ctx.fail(self._unexpected(ctx, extra))
        return extra

    def _unexpected(self, ctx: Any, extra: list[str]) -> str:
        names = [piece.strip("{}[]") for parameter in self.params for piece in parameter.get_usage_pieces(ctx)]
        if names:
            return f"{ctx.command_path} accepts only {' '.join(names)}, but also got {shlex.join(extra)}."
        message = f"{ctx.command_path} accepts no argument, but got {shlex.join(extra)}."
        if any("--file" in parameter.opts for parameter in self.params):
            message += f" To name a file, write --file {shlex.quote(extra[0])}."
        return message

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        examples = import_module("orchestrator.cli.terminal.examples").EXAMPLES.get(_command_path(ctx), ())
        if examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in examples))


class InGroups(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, self.commands))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                rest = formatter.width - widest - 6
                formatter.write_dl([(f"{n:{widest}}", self.commands[n].get_short_help_str(rest)) for n in names])


def show_examples(app: typer.Typer) -> None:
    """Add the examples of orchestrator/cli/terminal/examples.py to every command of `app` and of its sub-apps."""
    for command in app.registered_commands:
        if command.cls is None or command.cls is TyperCommand:
            command.cls = WithExamples
    for group in app.registered_groups:
        if group.typer_instance is not None:
            show_examples(group.typer_instance)


def _command_path(ctx: Any) -> str:
    """Path of a command after the program's name: `checkpoint copy` for `polyfleet checkpoint copy`."""
    return str(ctx.command_path).partition(" ")[2]
