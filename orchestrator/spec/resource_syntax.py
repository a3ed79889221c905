"""Parse devices, sizes and durations in the forms that other schedulers use, into kinds and numbers.

`nvidia:H100:8`, `H100:8`, `nvidia:A100-80GB,H100:8` (either model), `tpu:v5e`, `cpu:1`, `any`, `cpu:ipex:1`,
`nvidia:H100:2..8`, `nvidia:8+`; a list of these, in order of preference; a mapping {H100: 8, A100: 8}, any of them.
Sizes `16GB`, `16GiB`; durations `30s`, `5m`, `1h30m`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from cluster.catalogue import MODEL_NAME, aliases, backend_name, is_backend, kind_spellings, resolve_name, vendors
from cluster.errors import UserError
from orchestrator.core.plan.options.fit import ANY

MAX_COUNT = 4096
"""Upper end of a range such as `8+`: more devices than one node has."""

COUNT = re.compile(r"(?P<low>[0-9]{1,6})(?P<more>\+|\.\.(?P<high>[0-9]{1,6}))?")
TIME = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|s|m|h|d))+")
TIME_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MIN_HANG_S = 5.0
FORMS = "write BACKEND, BACKEND:MODEL or BACKEND:MODEL:COUNT, e.g. nvidia:H100:8, tpu:v5e:4, cpu:1, any"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One alternative: any of `kinds` (patterns), `min_count` to `count` devices per node. `has_count`: the text
    contains a number.
    """

    kinds: tuple[str, ...]
    count: int = 1
    min_count: int = 1
    has_count: bool = False


def accelerators(value: object) -> tuple[DeviceRequest, ...]:
    """Parse alternatives, in the order written. Raises UserError with what to write instead."""
    if isinstance(value, str):
        return (_parse_accelerator(value),)
    if isinstance(value, list | tuple) and value and not any(isinstance(item, list | tuple) for item in value):
        return tuple(request for item in value for request in accelerators(item))
    if isinstance(value, Mapping) and value:
        return tuple(with_count(_parse_accelerator(str(name)), count) for name, count in value.items())
    raise UserError(f"does not name a device: {str(value)[:60]!r}", FORMS)


def with_count(request: DeviceRequest, count: object) -> DeviceRequest:
    """Add a number from another field to a request: 8, "8", "2..8" or "8+". UserError if it already has one."""
    if request.has_count:
        raise UserError(f"the number of {','.join(request.kinds)} is set twice", "keep one of them")
    low, high = _count(str(count) if isinstance(count, int) and not isinstance(count, bool) else count)
    return DeviceRequest(request.kinds, high, low, has_count=True)


def duration_s(value: object) -> float:
    """`500ms`, `30s`, `5m`, `1h30m`, `2d`; a plain number is seconds. Raises UserError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return float(value)
    if isinstance(value, str) and (seconds := _seconds(value)) is not None:
        return seconds
    raise UserError(f"{value!r} is not a duration", "write a number and a unit, e.g. 30s, 5m or 1h30m")


@lru_cache(1024)
def _seconds(text: str) -> float | None:
    if not TIME.fullmatch(text.strip()):
        return None
    return sum(float(number) * SECONDS[unit] for number, unit in TIME_PART.findall(text))


def hang_after_s(value: object) -> float:
    """A duration of at least MIN_HANG_S, -1 for `never`, 0 for "": the default rule. Raises UserError."""
    if value == "":
        return 0.0
    if value == "never":
        return -1.0
    seconds = duration_s(value)
    if seconds < MIN_HANG_S:
        raise UserError(f"{value} is too short", f"write at least {MIN_HANG_S:.0f}s, or never")
    return seconds


@lru_cache(1024)
def _parse_accelerator(text: str) -> DeviceRequest:
    parts = [part.strip() for part in text.split(":")]
    number = parts.pop() if len(parts) > 1 and COUNT.fullmatch(parts[-1]) else ""
    if len(parts) > 2 or not all(parts):
        raise UserError(f"{text!r} is not an accelerator", FORMS)
    kinds = _kinds(parts[0], parts[1] if len(parts) > 1 else "", text)
    return with_count(DeviceRequest(kinds), number) if number else DeviceRequest(kinds)


def _kinds(first: str, models: str, text: str) -> tuple[str, ...]:
    if not models and first.lower() != ANY and "," not in first:
        return _backend_or_model(first)
    if not models:
        return (ANY,) if first.lower() == ANY else _parse_names(first, _backend_or_model)
    if first.lower() == ANY:
        raise UserError(f"{text!r}: `any` takes no model", FORMS)
    backend = backend_name(first)
    return _parse_names(models, lambda name: _model_kinds(backend, name, text))


def _parse_names(names: str, read: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(kind for name in names.split(",") for kind in read(name.strip())))


def _model_kinds(backend: str, name: str, text: str) -> tuple[str, ...]:
    """Kinds of a model of a back end. The model need not be in the catalogue: discovery may find cards that are not."""
    if kinds := resolve_name(name, backend):
        return kinds
    if not MODEL_NAME.fullmatch(name):
        raise UserError(f"{text!r}: {name!r} is not a model", FORMS)
    return (f"{backend}:{name}",)


def _backend_or_model(name: str) -> tuple[str, ...]:
    """Kinds of a single name, a back end or a model. A model may have a variant: `A100-80GB`."""
    if is_backend(name):
        return (backend_name(name),)
    if kinds := resolve_name(name):
        return kinds
    choices = {choice.lower(): choice for choice in (*vendors(), *aliases(), ANY, *kind_spellings())}
    close = get_close_matches(name.lower(), list(choices), n=1, cutoff=0.5)
    suggestion = f"did you mean {choices[close[0]]!r}? " if close else ""
    raise UserError(f"unknown accelerator {name!r}", f"{suggestion}{FORMS}")


def _count(text: object) -> tuple[int, int]:
    """(minimum, maximum) number of devices."""
    match = COUNT.fullmatch(text.strip()) if isinstance(text, str) else None
    if not match:
        raise UserError(f"{text!r} is not a number of devices", "write 8, 2..8 or 8+")
    low = int(match["low"])
    high = int(match["high"]) if match["high"] else MAX_COUNT if match["more"] else low
    if not 1 <= low <= high <= MAX_COUNT:
        raise UserError(f"{text} is not a valid range of devices", f"write 1 to {MAX_COUNT}, the smaller number first")
    return low, high
