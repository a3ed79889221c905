"""Insert kernels into a model's modules where they were measured to be faster than the modules' own code."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from workers.devices.backends.precision import name_of
from workers.kernels.dispatch import tuner
from workers.kernels.dispatch.classes import shape_class
from workers.kernels.dispatch.comparison import measure
from workers.kernels.dispatch.fastest import candidates, kind_of
from workers.kernels.dispatch.probes import Probe
from workers.kernels.dispatch.tuner import REFERENCE, KernelMeasurement, Situation, software_of
from workers.kernels.models import attention_patch, module_forms, module_swap
from workers.kernels.models.call_recorder import SITE_PREFIX, RecordedCall, Recorder
from workers.kernels.models.module_forms import Form, NotReplaceable
from workers.measurement.inputs import Sample
from workers.measurement.model_state import preserve_state


@dataclass(frozen=True, slots=True)
class Site:
    """A module that computes an operation of kernels."""

    name: str
    module: nn.Module
    forms: tuple[Form, ...]


@dataclass(slots=True)
class InsertedKernels:
    """`chosen` maps (module name, operation) to the measurement; `unchanged_modules` has the reason for each other."""

    chosen: dict[tuple[str, str], KernelMeasurement] = field(default_factory=dict)
    unchanged_modules: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Format e.g. `rmsnorm in 5 modules by cpu, 2.31 times as fast (2.10 to 2.52)`, with the smallest gain."""
        parts = []
        for (operation, kernels), number in Counter((o, m.kernels) for (_, o), m in self.chosen.items()).items():
            least = min(
                (m for (_, o), m in self.chosen.items() if (o, m.kernels) == (operation, kernels)),
                key=lambda m: m.speedup,
            )
            gain = f"{least.speedup:.2f} times as fast ({least.low:.2f} to {least.high:.2f})"
            parts.append(f"{operation} in {number} module{'s' if number > 1 else ''} by {kernels}, {gain}")
        return "; ".join(parts)


def find(model: nn.Module) -> tuple[list[Site], dict[str, str]]:
    """Find the modules that compute an operation of kernels, and why similar modules do not qualify.

    A module inside a recognised one, such as the activation of a gated layer, is part of that one.
    """
    sites, unchanged_modules, inside = [], dict[str, str](), set[int]()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        try:
            forms = _forms(module)
        except NotReplaceable as e:
            unchanged_modules[name] = str(e)
            continue
        if forms:
            sites.append(Site(name, module, tuple(forms)))
            if forms[0].operation == "swiglu":
                inside |= {id(child) for child in module.modules()}
    return sites, unchanged_modules


def _forms(module: nn.Module) -> list[Form]:
    if module_swap.has_kernels(module):
        return []
    if forms := attention_patch.forms_of(module):
        module_forms.check_replaceable(module)
        return forms
    form = module_forms.form_of(module)
    return [form] if form else []


def record(model: nn.Module, sites: Sequence[Site], sample: Sample, device: torch.device) -> list[RecordedCall]:
    """Record the calls of each site during one call of the model, and restore the model afterwards."""
    for number, site in enumerate(sites):
        insert(site, {form.operation: f"{SITE_PREFIX}{number}" for form in site.forms}, device)
    try:
        recorder = Recorder()
        with torch.no_grad(), preserve_state(model), recorder:
            inputs = sample.copy()
            model(*inputs.args, **inputs.kwargs)
    finally:
        for site in sites:
            module_swap.remove_kernels(site.module)
    return recorder.calls


def insert(site: Site, kernels: dict[str, str], device: torch.device) -> None:
    """Insert `kernels` (operation to name). Raises TypeError if Python cannot change the module's class."""
    if site.forms[0].operation in ("apply_rope", "attention"):
        module_swap.rebind(site.module, tuple(sorted(kernels.items())))
    else:
        module_swap.swap(site.module, site.forms[0], kernels[site.forms[0].operation], device)


def fit(
    model: nn.Module,
    sample: Sample,
    device: torch.device,
    *,
    training: bool = False,
    compiled: bool = False,
    measured: Iterable[KernelMeasurement] | None = None,
) -> InsertedKernels:
    """Insert, into the model itself, the kernels that were measured to be faster.

    `measured` (None: stored measurements for this device and software) must show a gain for every call that the sample
    makes of a module, and, with `training`, for its gradient.
    """
    sites, unchanged_modules = find(model)
    fitted, calls = InsertedKernels(unchanged_modules=unchanged_modules), dict[int, list[RecordedCall]]()
    for call in record(model, sites, sample, device):
        calls.setdefault(call.site, []).append(call)
    measurements = _Measurements(device, training, compiled, measured)
    for number, site in enumerate(sites):
        chosen = {}
        for form in site.forms:
            form_calls = [call for call in calls.get(number, []) if call.operation == form.operation]
            best = measurements.best(form_calls) if form_calls else "the sample does not call it"
            if isinstance(best, KernelMeasurement):
                chosen[form.operation] = best
            else:
                fitted.unchanged_modules[f"{site.name} ({form.operation})"] = best
        if chosen:
            insert(site, {operation: one.kernels for operation, one in chosen.items()}, device)
            fitted.chosen |= {(site.name, operation): one for operation, one in chosen.items()}
    return fitted


def restore(model: nn.Module) -> int:
    """Remove all kernels, so that modules compute bit for bit as before. Return the number of modules changed."""
    return sum(module_swap.remove_kernels(module) for module in list(model.modules()))


def situation(call: RecordedCall, kind: str, *, gradient: bool = False, compiled: bool = False) -> Situation:
    shapes = (*call.shapes, ())
    size_class = shape_class(call.operation, *shapes[:2])
    return Situation(kind, call.operation, name_of(call.dtype), size_class, gradient, compiled)


class _Measurements:
    """Measurements, and the best kernels for calls according to them."""

    def __init__(
        self, device: torch.device, training: bool, compiled: bool, measured: Iterable[KernelMeasurement] | None
    ):
        self.kind, self.training, self.compiled = kind_of(device), training, compiled
        software = {name: software_of(one) for name, one in candidates(device).items()}
        lines = tuner.read_measurements() if measured is None else measured
        self.last = {
            (one.situation, one.kernels): one
            for one in lines
            if one.situation.kind == self.kind and software.get(one.kernels) == one.software
        }

    def best(self, calls: list[RecordedCall]) -> KernelMeasurement | str:
        """Return the measurement of the fastest kernels, for their slowest call, or the reason for using none."""
        measurements, reasons = [], []
        for name in sorted({kernels for _, kernels in self.last}):
            results = [self._slowest_measurement(call, name) for call in calls]
            gains = [one for one in results if isinstance(one, KernelMeasurement)]
            if len(gains) == len(results):
                measurements.append(min(gains, key=lambda one: one.speedup))
            else:
                reasons += [f"{name}: {one}" for one in results if isinstance(one, str)]
        if measurements:
            return max(measurements, key=lambda one: one.speedup)
        return (
            "; ".join(dict.fromkeys(reasons))
            or "nothing has been measured on this device: run `polyfleet kernels tune`"
        )

    def _slowest_measurement(self, call: RecordedCall, name: str) -> KernelMeasurement | str:
        situations = [situation(call, self.kind, compiled=self.compiled)]
        situations += [situation(call, self.kind, gradient=True)] if self.training else []
        lines = [self.last.get((one, name)) for one in situations]
        for line, about in zip(lines, situations, strict=True):
            case = " inside torch.compile" if about.compiled else " with its gradient" if about.gradient else ""
            if line is None:
                return f"not measured{case} for {about.shapes}"
            if not line.right:
                return f"wrong{case} for {about.shapes}"
            if line.low <= 1:
                return f"no faster{case}: {line.speedup:.2f} times ({line.low:.2f} to {line.high:.2f})"
        return min((line for line in lines if line), key=lambda line: line.speedup)


def measure_calls(
    model: nn.Module, sample: Sample, device: torch.device, *, compiled: bool = False
) -> list[KernelMeasurement]:
    """Measure every implementation of the device for each size that occurs in one call of the model."""
    sites, _ = find(model)
    calls = record(model, sites, sample, device)
    cases = dict.fromkeys((Probe(one.operation, one.shapes, one.causal), one.dtype) for one in calls)
    kernels = [one for name, one in candidates(device).items() if name != REFERENCE]
    return measure(list(cases), kernels, device, compiled=compiled)
