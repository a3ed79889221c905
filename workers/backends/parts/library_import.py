"""Importing a vendor's library, and what to say where it does not load."""

import importlib

import torch

# What extensions built for another torch raise: missing symbols, missing shared objects, failed registrations.
Failure = (ImportError, OSError, RuntimeError, AttributeError)


def import_error(library: str) -> str:
    """The message of a library that does not load beside this torch, "" when it does."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as e:
        if e.name == library:
            return f"{library} is not installed in this environment"
        return f"{library} needs {e.name}, which is not installed in this environment"
    except Failure as e:
        return f"{library} does not load beside torch {torch.__version__}: {e}"
    return ""
