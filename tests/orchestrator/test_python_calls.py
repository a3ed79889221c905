"""The command line, the Python interface and REST have the same methods, with the same defaults."""

import importlib.util
import inspect
from pathlib import Path

import pytest

from orchestrator.benchmark.suite import BenchmarkRequest

SPEC = importlib.util.spec_from_file_location("python_calls", Path(__file__).parents[2] / "docs" / "python_calls.py")


@pytest.fixture(scope="module")
def python_calls():
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    return module


def defaults_of_options(command):
    options = (p for p in command.params if p.param_type_name == "option" and not p.required)
    return {option.name: value_of(getattr(option.default, "value", option.default)) for option in options}


def defaults_of_parameters(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: value_of(p.default) for p in parameters if p.default is not inspect.Parameter.empty}


def value_of(default):
    """None, an empty text, an empty list, zero and false all mean that nothing is given."""
    return default or None


def different(options, parameters):
    shared = options.keys() & parameters
    return {name: (options[name], parameters[name]) for name in shared if options[name] != parameters[name]}


def test_an_option_named_like_a_parameter_has_its_default(python_calls):
    compared = 0
    for call in python_calls.calls():
        if call.command is not None:
            options = defaults_of_options(call.command)
            functions = [call.function, *([call.verb.function] if call.verb else [])]
            for parameters in map(defaults_of_parameters, functions):
                compared += len(options.keys() & parameters)
                assert different(options, parameters) == {}, call.name
    assert compared > 20


def test_an_option_of_a_benchmark_named_like_a_field_has_its_default(python_calls):
    fields = {name: value_of(field.default) for name, field in BenchmarkRequest.model_fields.items()}
    options = defaults_of_options(python_calls.commands()["benchmark run"])
    assert len(options.keys() & fields) > 8
    assert different(options, fields) == {}


def test_every_row_names_a_command_and_an_action_that_exist(python_calls):
    names = {call.name for call in python_calls.calls()}
    assert names >= python_calls.COMMANDS.keys() | python_calls.ACTIONS.keys()
    assert {words.partition(" --")[0] for words in python_calls.COMMANDS.values()} <= python_calls.commands().keys()
    assert {verb.action for verb in python_calls.all_verbs()} >= set(python_calls.ACTIONS.values())
    without = {call.name for call in python_calls.calls() if not call.words and not call.verb}
    assert without == set()


def test_a_parameter_of_python_and_of_the_verb_has_one_default(python_calls):
    for call in python_calls.calls():
        if call.verb is not None:
            ours = defaults_of_parameters(call.function)
            assert different(ours, defaults_of_parameters(call.verb.function)) == {}, call.name
