"""Text of the modules in orchestrator/client/verbs/: a class for each noun, with a method for each of its verbs."""

import inspect
import keyword
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

import orchestrator.views
from orchestrator.verbs.declare import Exchange, Upload, Verb, all_verbs, arg_of

CLIENT = Path(__file__).parents[1] / "orchestrator" / "client" / "verbs"
WIDTH = 106
"""Columns of a docstring's text: a line has 120, and eight are indentation; a single line has quotes, too."""
CONTENT_TYPES = {bytes: "application/octet-stream", Upload: "application/zip"}
CONTENTS = {bytes: "bytes", Upload: "BinaryIO"}
LINK = ("Downloaded", "Link", "Rows")
KEY = "idempotency key: a repeated call with the same key and arguments counts once"
Lines = Iterator[str]


def modules() -> dict[str, str]:
    """Text of each module by the name of its file, formatted by ruff."""
    nouns = groupby(all_verbs(), key=lambda verb: verb.noun)
    return {f"{noun}.py": _formatted(f"{noun}.py", "\n".join(_module(noun, list(verbs)))) for noun, verbs in nouns}


def _formatted(name: str, text: str) -> str:
    command = [Path(sys.executable).with_name("ruff"), "format", "--stdin-filename", CLIENT / name, "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout


def _module(noun: str, verbs: list[Verb]) -> Lines:
    body = [line for verb in verbs for line in _methods(verb)]
    text = "\n".join(body)
    yield f'"""Verbs of `{noun}`, written by docs/generate.py. Change orchestrator/verbs/{noun}.py instead."""'
    yield from ("", "from __future__ import annotations", "")
    yield from _imports(text)
    name = "".join(word.capitalize() for word in noun.split("_"))
    yield from ("", "", f"class {name}:", "    def __init__(self, link: Link):", "        self._link = link")
    yield from body


def _imports(text: str) -> Lines:
    """Imports of the names in a module's text, for types alone."""
    words = set(re.findall(r"\w+", text))
    abstract = [name for name in ("Iterator", "Mapping", "Sequence") if name in words]
    typing = [name for name in ("Any", "BinaryIO", "Literal") if name in words]
    if abstract:
        yield f"from collections.abc import {', '.join(abstract)}"
    yield f"from typing import {', '.join(['TYPE_CHECKING', *typing])}"
    yield from ("", "if TYPE_CHECKING:")
    names = [name for name in LINK if name in words or name == "Link"]
    yield f"    from orchestrator.client.link import {', '.join(names)}"
    if "Bytes" in words:
        yield "    from orchestrator.client.server_connection import Bytes"
    views = sorted((module, name) for _, module, name in _views() if name in words)
    for module, names in groupby(views, key=lambda pair: pair[0]):
        yield f"    from {module} import {', '.join(dict.fromkeys(name for _, name in names))}"


# -- a verb


def _methods(verb: Verb) -> Lines:
    result = _result_type(verb)
    yield from _method(verb, verb.name + "_" * keyword.iskeyword(verb.name), result, _call(verb))
    if verb.exchange is Exchange.PAGE:
        yield from _method(verb, f"{verb.name}_pages", f"Iterator[{result}]", _arguments_of("pages", verb))


def _method(verb: Verb, name: str, result: str, call: str) -> Lines:
    parameters = list(_parameters(verb))
    required = [text for text in parameters if " = " not in text]
    optional = [text for text in parameters if " = " in text]
    signature = ", ".join(["self", *required, *(["*", *optional] if optional else [])])
    yield from ("", f"    def {name}({signature}) -> {result}:")
    yield from textwrap.indent(_docstring(verb), " " * 8).split("\n")
    if result == "None":
        yield f"        {call}"
    elif result in ("bool", "Downloaded"):
        yield f"        return {call}"
    else:
        yield from (f"        result: {result} = {call}", "        return result")


def _parameters(verb: Verb) -> Lines:
    for name in verb.request_names:
        default = verb.default(name)
        text = (
            "" if default is inspect.Parameter.empty else f" = {'None' if _is_json(verb, name) else _literal(default)}"
        )
        yield f"{name}: {_parameter_type(verb, name)}{text}"
    for hint, text in CONTENTS.items():
        yield from (f"{name}: {text}" for name in verb.parameters_of(hint))
    if verb.exchange is Exchange.OPERATION:
        yield "progress: Bytes | None = None"
    if verb.takes_key:
        yield 'key: str = ""'


def _is_json(verb: Verb, name: str) -> bool:
    return arg_of(verb.hints[name]).is_json


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _call(verb: Verb) -> str:
    """The expression that sends the request."""
    if verb.resume is not None:
        return _arguments_of("follow", verb, f"{verb.resume!r}")
    if verb.exchange is Exchange.STREAM:
        if (kinds := _event_types(verb)) and len(kinds) == 1:
            return f"(data for _, data in {_arguments_of('stream', verb)})"
        return _arguments_of("stream", verb)
    if verb.exchange is Exchange.OPERATION:
        return _arguments_of("operation", verb, "progress, key" if verb.takes_key else 'progress, ""')
    if verb.exchange is Exchange.UPLOAD:
        ((hint, name),) = [(hint, name) for hint in CONTENTS for name in verb.parameters_of(hint)]
        return _arguments_of("upload", verb, f'{name}, "{CONTENT_TYPES[hint]}"')
    if verb.exchange is Exchange.DOWNLOAD:
        return _arguments_of("download", verb)
    if verb.method == "HEAD":
        return _arguments_of("exists", verb)
    return _arguments_of("once" if verb.has_own_key else "plain", verb, _plain_options(verb))


def _plain_options(verb: Verb) -> str:
    key = "key=key" if verb.takes_key else ""
    slow = "is_slow=True" if verb.slow and verb.method == "POST" else ""
    return ", ".join(filter(None, (key, slow)))


WAYS_WITH_METHOD = ("plain", "once", "stream", "upload")


def _arguments_of(way: str, verb: Verb, more: str = "") -> str:
    """Call of a method of the link with the verb's method, path, arguments and body."""
    in_url = [name for name in verb.request_names if verb.is_in_url(name)]
    in_body = [name for name in verb.request_names if name not in in_url]
    method = f'"{verb.method}"' if way in WAYS_WITH_METHOD else ""
    body = _mapping(verb, in_body) if in_body or way == "operation" else ""
    parts = (method, f'"{verb.path}"', _mapping(verb, in_url), body, more)
    return f"self._link.{way}({', '.join(filter(None, parts))})"


def _mapping(verb: Verb, names: list[str]) -> str:
    pairs = (f'"{arg_of(verb.hints[name]).alias or name}": {name}' for name in names)
    return f"{{{', '.join(pairs)}}}"


def _docstring(verb: Verb) -> str:
    """The verb's docstring, then the texts of its parameters."""
    paragraphs = (inspect.getdoc(verb.function) or "").split("\n\n")
    texts = [(name, arg_of(verb.hints[name]).text) for name in verb.request_names]
    texts += [("progress", "called with bytes done and bytes in total")] if verb.exchange is Exchange.OPERATION else []
    texts += [("key", KEY)] if verb.takes_key else []
    rows = [f"- `{name}`: {described}" for name, described in texts if described]
    parts = ["\n".join(textwrap.wrap(" ".join(paragraph.split()), WIDTH)) for paragraph in paragraphs]
    if rows:
        parts.append("\n".join(line for row in rows for line in textwrap.wrap(row, WIDTH, subsequent_indent="  ")))
    text = "\n\n".join(parts)
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'


# -- types


def _result_type(verb: Verb) -> str:
    if verb.method == "HEAD":
        return "bool"
    if verb.exchange is Exchange.DOWNLOAD:
        return "Downloaded"
    if verb.exchange is Exchange.PAGE:
        return f"Rows[{type_text(verb.result)}]"
    if verb.exchange is Exchange.STREAM:
        kinds = _event_types(verb)
        return f"Iterator[{type_text(kinds[0]) if len(kinds) == 1 else 'tuple[str, Any]'}]"
    return type_text(verb.result).replace("Sequence[", "Rows[")


def _event_types(verb: Verb) -> list[Any]:
    """Types of the data that a stream yields: of a stream that can be resumed all but that of its end."""
    hints = get_type_hints(verb.result)
    return [hint for name, hint in hints.items() if name != "error" and not (verb.resume and name == "end")]


def _parameter_type(verb: Verb, name: str) -> str:
    return "Mapping[str, Any] | None" if _is_json(verb, name) else type_text(verb.hints[name])


def type_text(hint: Any) -> str:
    """A type as the client's modules write it: that of a view by its name."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if name := next((name for value, _, name in _views() if value == hint), ""):
        return name
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, inner))
    if origin is Literal:
        return f"Literal[{', '.join(map(_literal, inner))}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(type_text, inner))}]"
    if origin in (list, tuple):
        return f"Sequence[{type_text(inner[0])}]"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "JsonObject"
    return "None" if hint is NoneType else str(hint.__name__)


@cache
def _views() -> list[tuple[Any, str, str]]:
    """Each type of orchestrator/views/ that a verb can name, with its module and name."""
    (folder,) = orchestrator.views.__path__
    names = sorted(path.stem for path in Path(folder).glob("*.py") if path.stem not in ("__init__", "values"))
    found = []
    for module in (import_module(f"orchestrator.views.{name}") for name in ("values", *names)):
        own = [(value, name) for name, value in vars(module).items() if _is_view(value, module.__name__)]
        found += [(value, module.__name__, name) for value, name in own if all(value != other for other, *_ in found)]
    return found


def _is_view(value: Any, module: str) -> bool:
    if isinstance(value, type) and not get_origin(value):
        return value.__module__ == module
    return get_origin(value) in (Literal, dict) or get_origin(value) is UnionType
