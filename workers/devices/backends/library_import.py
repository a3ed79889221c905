"""Import a vendor's library and describe why it does not load."""

import importlib

import torch

# Extensions built for another torch raise these: missing symbols, missing shared objects, failed registrations.
Failure = (ImportError, OSError, RuntimeError, AttributeError)


def import_error(library: str) -> str:
    """Return the reason why a library does not load with this torch, "" if it loads."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as e:
        if e.name == library:
            return f"{library} is not installed in this environment"
        return f"{library} needs {e.name}, which is not installed in this environment"
    except Failure as e:
        return f"{library} does not load with torch {torch.__version__}: {e}"
    return ""
