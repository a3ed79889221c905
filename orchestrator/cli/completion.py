"""`polyfleet completion bash|zsh|fish`, and answering the shell when it completes."""

import os
from enum import StrEnum
from importlib import import_module
from typing import Annotated

import typer

from orchestrator.cli.output import write

VARIABLE = "_POLYFLEET_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Your shell.")]) -> None:
    """Print the completion script: `eval "$(polyfleet completion bash)"`."""
    script = import_module("typer.completion").get_completion_script
    write(script(prog_name="polyfleet", complete_var=VARIABLE, shell=shell.value))


def answer_shell() -> None:
    """Typer learns the shells only together with its own `--install-completion`, which we replace: teach it here."""
    if VARIABLE in os.environ:
        import_module("typer.completion").completion_init()
