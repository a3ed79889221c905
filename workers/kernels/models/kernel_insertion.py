"""Puts kernels into a model where they were measured to be faster than what the model computes by itself."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from workers.backends.parts.precision import name_of
from workers.kernels import tuner
from workers.kernels.models import attention_patch, module_forms, module_swap
from workers.kernels.models.call_recorder import SITE, Recorder, Seen
from workers.kernels.models.module_forms import Form, Unlike
from workers.kernels.parts.classes import shape_class
from workers.kernels.parts.fastest import candidates, kind_of
from workers.kernels.tuner import Measured, Situation, software_of
from workers.optimizers.model_state import unchanged
from workers.optimizers.pass_context import Sample


@dataclass(frozen=True, slots=True)
class Site:
    """A module that computes what kernels have."""

    name: str
    module: nn.Module
    forms: tuple[Form, ...]


@dataclass(slots=True)
class Fitted:
    """`chosen` has the measurement by the module's name and operation; `left` why others stayed as they are."""

    chosen: dict[tuple[str, str], Measured] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """`rmsnorm in 5 modules by cpu, 2.31 times as fast (2.10 to 2.52)`; the interval is of the least gain."""
        told = []
        for (operation, kernels), number in Counter((o, m.kernels) for (_, o), m in self.chosen.items()).items():
            least = min(
                (m for (_, o), m in self.chosen.items() if (o, m.kernels) == (operation, kernels)),
                key=lambda m: m.speedup,
            )
            gain = f"{least.speedup:.2f} times as fast ({least.low:.2f} to {least.high:.2f})"
            told.append(f"{operation} in {number} module{'s' if number > 1 else ''} by {kernels}, {gain}")
        return "; ".join(told)


def find(model: nn.Module) -> tuple[list[Site], dict[str, str]]:
    """Modules that compute what kernels have, and why others that look like it are left. A module inside of one that is
    found whole, as the activation of a gated layer, is part of it.
    """
    sites, left, inside = [], dict[str, str](), set[int]()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        try:
            found = _forms(module)
        except Unlike as e:
            left[name] = str(e)
            continue
        if found:
            sites.append(Site(name, module, tuple(found)))
            if found[0].operation == "swiglu":
                inside |= {id(child) for child in module.modules()}
    return sites, left


def _forms(module: nn.Module) -> list[Form]:
    if module_swap.swapped(module):
        return []
    if found := attention_patch.forms_of(module):
        module_forms.require_untouched(module)
        return found
    form = module_forms.form_of(module)
    return [form] if form else []


def record(model: nn.Module, sites: Sequence[Site], sample: Sample, device: torch.device) -> list[Seen]:
    """What one call of the model asks of each site; the model is as it was afterwards."""
    for number, site in enumerate(sites):
        put(site, {form.operation: f"{SITE}{number}" for form in site.forms}, device)
    try:
        recorder = Recorder()
        with torch.no_grad(), unchanged(model), recorder:
            given = sample.copy()
            model(*given.args, **given.kwargs)
    finally:
        for site in sites:
            module_swap.take_out(site.module)
    return recorder.seen


def put(site: Site, kernels: dict[str, str], device: torch.device) -> None:
    """`kernels` by operation. Raises TypeError where Python does not let the module's class be exchanged."""
    if site.forms[0].operation in ("apply_rope", "attention"):
        module_swap.rebind(site.module, tuple(sorted(kernels.items())))
    else:
        module_swap.swap(site.module, site.forms[0], kernels[site.forms[0].operation], device)


def fit(
    model: nn.Module,
    sample: Sample,
    device: torch.device,
    *,
    learns: bool = False,
    compiled: bool = False,
    measured: Iterable[Measured] | None = None,
) -> Fitted:
    """Swap what was measured to be faster, in the model itself. `measured` (None: what is stored for this device and
    this software) must say so of every call that the sample makes of a module, and with `learns` of its gradient.
    """
    sites, left = find(model)
    fitted, calls = Fitted(left=left), dict[int, list[Seen]]()
    for seen in record(model, sites, sample, device):
        calls.setdefault(seen.site, []).append(seen)
    book = _Book(device, learns, compiled, measured)
    for number, site in enumerate(sites):
        chosen = {}
        for form in site.forms:
            asked = [seen for seen in calls.get(number, []) if seen.operation == form.operation]
            found = book.best(asked) if asked else "the sample does not call it"
            if isinstance(found, Measured):
                chosen[form.operation] = found
            else:
                fitted.left[f"{site.name} ({form.operation})"] = found
        if chosen:
            put(site, {operation: one.kernels for operation, one in chosen.items()}, device)
            fitted.chosen |= {(site.name, operation): one for operation, one in chosen.items()}
    return fitted


def restore(model: nn.Module) -> int:
    """Take all kernels out: every module computes what it did before, to the bit. Returns how many modules had some."""
    return sum(module_swap.take_out(module) for module in list(model.modules()))


def situation(seen: Seen, kind: str, *, gradient: bool = False, compiled: bool = False) -> Situation:
    shapes = (*seen.shapes, ())
    told = shape_class(seen.operation, *shapes[:2])
    return Situation(kind, seen.operation, name_of(seen.dtype), told, gradient, compiled)


class _Book:
    """Measurements, and what they say of calls."""

    def __init__(self, device: torch.device, learns: bool, compiled: bool, measured: Iterable[Measured] | None):
        self.kind, self.learns, self.compiled = kind_of(device), learns, compiled
        software = {name: software_of(one) for name, one in candidates(device).items()}
        lines = tuner.recorded() if measured is None else measured
        self.last = {
            (one.situation, one.kernels): one
            for one in lines
            if one.situation.kind == self.kind and software.get(one.kernels) == one.software
        }

    def best(self, asked: list[Seen]) -> Measured | str:
        """The measurement of the fastest kernels, the slowest of its calls; or why there are none."""
        found, reasons = [], []
        for name in sorted({kernels for _, kernels in self.last}):
            said = [self._of(seen, name) for seen in asked]
            gains = [one for one in said if isinstance(one, Measured)]
            if len(gains) == len(said):
                found.append(min(gains, key=lambda one: one.speedup))
            else:
                reasons += [f"{name}: {one}" for one in said if isinstance(one, str)]
        if found:
            return max(found, key=lambda one: one.speedup)
        return "; ".join(dict.fromkeys(reasons)) or "nothing is measured on this device: `polyfleet kernels tune`"

    def _of(self, seen: Seen, name: str) -> Measured | str:
        wanted = [situation(seen, self.kind, compiled=self.compiled)]
        wanted += [situation(seen, self.kind, gradient=True)] if self.learns else []
        lines = [self.last.get((one, name)) for one in wanted]
        for line, about in zip(lines, wanted, strict=True):
            case = " inside torch.compile" if about.compiled else " with its gradient" if about.gradient else ""
            if line is None:
                return f"not measured{case} for {about.shapes}"
            if not line.right:
                return f"wrong{case} for {about.shapes}"
            if line.low <= 1:
                return f"no faster{case}: {line.speedup:.2f} times ({line.low:.2f} to {line.high:.2f})"
        return min((line for line in lines if line), key=lambda line: line.speedup)
