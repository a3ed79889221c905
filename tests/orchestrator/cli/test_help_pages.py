"""`--help`: every command stands in one group and has two examples, which its parser takes."""

import shlex

import pytest
import typer.main

from orchestrator.cli.main import app
from orchestrator.cli.terminal.examples import EXAMPLES
from orchestrator.cli.terminal.help_pages import GROUPS

ROOT = typer.main.get_command(app)


def commands(command, words=()):
    """(words, command) of each that does something."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


def test_every_command_stands_below_one_heading():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(ROOT.commands)


def test_every_command_has_two_examples_and_no_other_has_any():
    assert {" ".join(words) for words, _ in commands(ROOT)} == EXAMPLES.keys()
    assert all(len(examples) == 2 for examples in EXAMPLES.values())


@pytest.mark.parametrize(("words", "command"), [pytest.param(*one, id=" ".join(one[0])) for one in commands(ROOT)])
def test_the_examples_of_a_command_are_taken_by_its_parser(words, command):
    for example in EXAMPLES[" ".join(words)]:
        typed = shlex.split(example.partition(" && ")[0].partition(" > ")[0])
        assert typed[: len(words) + 1] == ["polyfleet", *words]
        command.make_context(example, typed[len(words) + 1 :])


@pytest.mark.parametrize(
    ("words", "option"),
    [(["up", "-a", "x"], "--address"), (["benchmark", "report", "r", "-f", "md"], "--format")],
)
def test_an_unknown_short_option_names_the_long_one(polyfleet, words, option):
    done = polyfleet(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"(Possible options: {option})" in done.stderr and "No such option: -" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["up", "my fleet.yaml"],
            "polyfleet up accepts no argument, but got 'my fleet.yaml'. To name a file, write --file 'my fleet.yaml'.",
        ),
        (["show", "a", "b"], "polyfleet show accepts only JOB, but also got b."),
    ],
)
def test_an_unexpected_argument_is_named_with_those_that_are_accepted(polyfleet, words, message):
    done = polyfleet(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"Error: {message}\n")


def test_help_prints_groups_and_examples(polyfleet):
    assert all(f"\n{heading}:\n" in polyfleet("--help").stdout for heading in GROUPS)
    shown = polyfleet("checkpoint", "copy", "--help").stdout
    assert shown.endswith("Examples:\n" + "".join(f"  {line}\n" for line in EXAMPLES["checkpoint copy"]))
